"use strict";
/* Downloads, made in the browser, in the formats of `captioner caption` and `captioner attend`. */

function saveFile(blob, name) {
  const url = URL.createObjectURL(blob);
  element("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 60_000); // the download must have started by then
}

const textFile = (text, type) => new Blob([text], { type: `${type};charset=utf-8` });

/** The digest of a caption, as `digest_cell` in data/cells.py computes it. Over plain http, except on
    localhost, browsers do not offer SHA-256. The cell is then empty. */
async function digestCell(text) {
  const bytes = new TextEncoder().encode(text.trim());
  const digest = new Uint8Array((await crypto.subtle?.digest("SHA-256", bytes)) ?? []);
  const digits = [...digest.subarray(0, 8)].map((byte) => byte.toString(16).padStart(2, "0"));
  return digits.length > 0 ? `sha256:${digits.join("")}` : "";
}

/** Photos with captions as CSV, as `captioner caption -o captions.csv` writes them. Corrected captions
    have no numbers and no digest, so `captioner apply` treats them as texts by people. */
async function captionsCsv(photos) {
  const withKeywords = photos.some(({ response }) => response.captions[0].keywords);
  const row = async (name, { text, log_prob: log, confidence, keywords = [], corrected }, index) => {
    const sure = typeof confidence === "number" ? confidence.toFixed(4) : "";
    const words = withKeywords ? [keywords.map(({ word }) => word).join(", ")] : [];
    const digest = corrected ? "" : await digestCell(text);
    return [name, `${index + 1}`, text, log?.toFixed(4) ?? "", sure, ...words, digest];
  };
  const rows = photos.flatMap(({ name, captions }) => captions.map((one, index) => row(name, one, index)));
  const more = withKeywords ? ["keywords", "digest"] : ["digest"];
  const header = ["image", "rank", "caption", "log_prob", "confidence", ...more];
  const lines = [header, ...(await Promise.all(rows))];
  return textFile(lines.map((line) => `${line.map(csvCell).join(",")}\n`).join(""), "text/csv");
}

/** Photos with captions as JSON, as `captioner caption -o captions.json` writes them. */
function captionsJson(photos) {
  const numbers = ["log_prob", "log_probs", "confidence", "doubtful", "truth"];
  const kept = ["text", "corrected", "words", ...numbers, "phrases", "left_out", "keywords"];
  const maps = ["map", "alphas", "gates"]; // of keywords and left-out words
  const plain = (key, value) => (maps.includes(key) ? undefined : value);
  const entries = photos.map(({ name, captions }) => ({
    image: name,
    captions: captions.map((caption) =>
      Object.fromEntries(kept.filter((key) => key in caption).map((key) => [key, caption[key]])),
    ),
  }));
  return textFile(`${JSON.stringify(entries, plain, 1)}\n`, "application/json");
}

/** Photos as an interactive page, as `captioner attend -o all.html` makes it. `shown` contains each
    photo and the response with its captions. */
async function galleryPage(shown, { template, look }) {
  const single = shown.length === 1;
  const [items, entries] = [[], []];
  for (const { photo, response: { captions } } of shown) {
    await photo.load();
    items.push(galleryItem(photo, captions, items.length + 1, single ? 1280 : 800).outerHTML);
    entries.push({ title: photo.name, labels: [], captions });
  }
  const title = element("i", {}, single ? entries[0].title : `${shown.length} photos`);
  const block = { type: "application/json", id: "captioner-data" };
  const parts = {
    kind: single ? "single" : "many",
    title: title.innerHTML.replaceAll('"', "&quot;"),
    items: items.join("\n"),
    data: element("script", block, embeddedJson({ entries, look })).outerHTML,
  };
  return textFile(template.replace(/@@(\w+)@@/g, (_, name) => parts[name]), "text/html");
}

/** JSON in which no text can end the HTML element around it, as `embedded` in drawing/pages.py writes it. */
function embeddedJson(data) {
  const escape = (letter) => `\\u${letter.charCodeAt(0).toString(16).padStart(4, "0")}`;
  return JSON.stringify(data).replace(/[<>&\u2028\u2029]/g, escape);
}

/** The confidence of a caption, if it has one, as `_sure` in drawing/pages.py writes it. */
function sure({ confidence }) {
  if (typeof confidence !== "number") return [];
  return [" ", element("span", { class: "sure" }, `${percent(confidence)} likely to be right`)];
}

/** The list item of a photo, as `_item` in drawing/pages.py writes it. */
function galleryItem({ name, image }, captions, number, side) {
  const { naturalWidth: width, naturalHeight: height } = image;
  const canvas = paintedOnWhite(image, width, height, Math.min(1, side / Math.max(width, height)));
  const texts = captions.map(({ text }) => text || "no words");
  const lines = texts.flatMap((text, index) => [
    ...(index > 0 ? [element("br")] : []),
    element("span", { class: "text" }, text),
    ...leftOut(captions[index]),
    ...sure(captions[index]),
  ]);
  const picture = element("img", {
    src: canvas.toDataURL("image/jpeg", 0.88),
    alt: texts[0],
    width: canvas.width,
    height: canvas.height,
    decoding: "async",
  });
  const caption = element("figcaption", {}, ...lines, element("span", { class: "name" }, name));
  const link = element("a", { href: `#photo-${number}` }, picture, caption);
  return element("li", { class: "entry", id: `entry-${number}` }, element("figure", {}, link));
}

/** A button that copies text. */
function copyButton(text) {
  const button = element("button", { type: "button", class: "copy" }, "Copy");
  button.addEventListener("click", async () => {
    await navigator.clipboard?.writeText(text).catch(() => copySelected(text));
    if (!navigator.clipboard) copySelected(text); // only https and localhost offer the clipboard
    button.textContent = "Copied";
    setTimeout(() => (button.textContent = "Copy"), 2000);
  });
  return button;
}

/** Copy by selecting the text of a hidden field. */
function copySelected(text) {
  const { activeElement } = document;
  const field = element("textarea", { class: "hidden-text", "aria-hidden": "true" });
  field.value = text;
  document.body.append(field);
  field.select();
  document.execCommand("copy");
  field.remove();
  activeElement?.focus();
}
