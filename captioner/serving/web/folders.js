"use strict";
/* Files of chosen and dropped folders, and their names on this page. */

const droppedPaths = new WeakMap(); // the paths of files in dropped folders, by file

/** The name of a file. In a folder, it is the path below the folder, as in `captioner caption FOLDER`. */
function fileName(file) {
  return droppedPaths.get(file) ?? (file.webkitRelativePath.replace(/^[^/]*\//, "") || file.name);
}

/** Whether a file comes from a folder, which can also contain other files. */
const isInFolder = (file) => droppedPaths.has(file) || file.webkitRelativePath !== "";

/** The dropped files. Folders are replaced by the files in them. */
async function droppedFiles({ items, files }) {
  // At once, because the lists are emptied when the event is over.
  const entries = [...items].map((item) => item.webkitGetAsEntry?.()).filter(Boolean);
  const given = [...files];
  if (!entries.some((entry) => entry.isDirectory)) return given;
  const found = [];
  // With several folders, the names begin with the folder.
  for (const entry of entries) await walk(entry, entries.length > 1 ? entry.name : "", found);
  return found;
}

async function walk(entry, path, found) {
  if (entry.isFile) {
    const file = await new Promise((resolve, reject) => entry.file(resolve, reject));
    droppedPaths.set(file, path || entry.name);
    found.push(file);
    return;
  }
  const reader = entry.createReader();
  const inside = [];
  for (;;) {
    const some = await new Promise((resolve, reject) => reader.readEntries(resolve, reject));
    if (some.length === 0) break; // it returns at most 100 entries at a time
    inside.push(...some);
  }
  inside.sort((a, b) => (a.name < b.name ? -1 : 1));
  for (const one of inside) await walk(one, path ? `${path}/${one.name}` : one.name, found);
}
