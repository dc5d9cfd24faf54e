"use strict";
/* A review of alternative texts: a card for each picture in one use, which may be in several places. */
(() => {
  const { rows, pictures, file } = JSON.parse(document.getElementById("captioner-data").textContent);
  const find = (selector) => document.querySelector(selector);
  const groups = new Map();
  for (const row of rows) {
    const key = JSON.stringify([row.image || row.tag, row.note]);
    groups.set(key, [...(groups.get(key) ?? []), row]);
  }
  let unsaved = false;

  function card(group) {
    const [{ image, note, alt, confidence, tag }] = group;
    const field = element("textarea", { rows: "2", placeholder: "none: the picture only decorates" });
    const box = element("input", { type: "checkbox" });
    const item = element("li");
    field.value = alt;
    const change = () => {
      for (const row of group) Object.assign(row, { alt: field.value.trim(), reviewed: box.checked ? "yes" : "" });
      item.classList.toggle("done", box.checked);
      unsaved = true;
      show();
    };
    field.addEventListener("input", () => {
      box.checked = field.value.trim() !== "";
      change();
    });
    box.addEventListener("change", change);
    const places = group.map(({ page, line }) => `${page}:${line}`);
    const more = places.length > 3 ? ` and ${places.length - 3} more` : "";
    const sure = confidence === "" ? "" : `, ${percent(Number(confidence))} likely to be right`;
    const picture = pictures[image];
    item.append(
      picture ? element("img", { src: picture, alt: "", loading: "lazy" }) : element("span", { class: "quiet" }, "no picture"),
      element(
        "div",
        {},
        element("p", {}, image || tag),
        ...(note ? [element("p", { class: "note" }, note)] : []),
        element("label", {}, element("span", { class: "quiet" }, `alternative text${sure}`), field),
        element("label", {}, box, " reviewed"),
        element("p", { class: "quiet" }, places.slice(0, 3).join(", ") + more),
      ),
    );
    return item;
  }

  function show() {
    find(".count").textContent = `${rows.filter(({ reviewed }) => reviewed).length} of ${rows.length} reviewed`;
  }

  find(".tally button").addEventListener("click", () => {
    const names = Object.keys(rows[0]);
    const cell = (value) => (/[",\r\n]/.test(value) ? `"${`${value}`.replaceAll('"', '""')}"` : value);
    const lines = [names, ...rows.map((row) => names.map((name) => row[name]))];
    const text = lines.map((line) => `${line.map(cell).join(",")}\n`).join("");
    const url = URL.createObjectURL(new Blob(["\ufeff", text], { type: "text/csv" }));
    element("a", { href: url, download: file }).click();
    setTimeout(() => URL.revokeObjectURL(url), 60_000); // the download has to start before
    unsaved = false;
  });
  window.addEventListener("beforeunload", (event) => unsaved && event.preventDefault());
  find(".review").append(...[...groups.values()].map(card));
  show();
})();
