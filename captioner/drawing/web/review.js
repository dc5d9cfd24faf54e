"use strict";
/* A review of alternative texts: a card for each picture in one use, which may be in several places. */
(() => {
  const { rows, pictures } = JSON.parse(document.getElementById("captioner-data").textContent);
  const groups = new Map();
  for (const row of rows) {
    const key = `${row.image || row.tag}\n${row.link}`;
    groups.set(key, [...(groups.get(key) ?? []), row]);
  }
  let unsaved = false;

  function card(group) {
    const { image, link, note, alt, confidence, tag } = group[0];
    let ticked = false; // by hand
    const change = ({ target }) => {
      if (target === box) ticked = box.checked;
      const text = field.value.trim();
      box.disabled = text !== alt.trim(); // so that no key takes back a correction
      box.checked = box.disabled || ticked;
      for (const row of group) Object.assign(row, { alt: text, reviewed: box.checked ? "yes" : "" });
      unsaved = true;
      count();
    };
    const placeholder = "none: the picture only decorates";
    const field = element("textarea", { rows: "2", placeholder, oninput: change }, alt);
    const box = element("input", { type: "checkbox", onchange: change });
    const sure = confidence && `, ${percent(Number(confidence))} likely to be right`;
    const lines = [image || tag, link, note].filter(Boolean).map((text) => element("div", {}, text));
    const label = element("label", {}, `alternative text${sure}`, field);
    const places = group.map(({ page, line }) => `${page}:${line}`).join(", ");
    const where = element("p", { class: "quiet" }, places);
    const texts = element("div", {}, ...lines, label, element("label", {}, box, " reviewed"), where);
    return element("li", {}, element("img", { src: pictures[image] ?? null, alt: "" }), texts);
  }

  function count() {
    const done = rows.filter(({ reviewed }) => reviewed).length;
    document.querySelector("[role=status]").textContent = `${done} of ${rows.length} reviewed`;
  }

  document.querySelector("[download]").addEventListener("click", ({ target }) => {
    const lines = [Object.keys(rows[0]), ...rows.map(Object.values)];
    const text = lines.map((line) => `${line.map(csvCell).join(",")}\n`).join("");
    target.href = URL.createObjectURL(new Blob(["\ufeff", text], { type: "text/csv" }));
    unsaved = false;
  });
  window.addEventListener("beforeunload", (event) => unsaved && event.preventDefault());
  document.querySelector(".review").append(...[...groups.values()].map(card));
  count();
})();
