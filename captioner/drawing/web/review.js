"use strict";
/* A page to review alternative texts. Each card shows a group of rows of the table: a picture that is
   used in the same way, possibly in several places of the site. A text that is changed on the page
   always counts as reviewed, so that no key can take a correction back. The browser stores the
   reviews, if it stores data for pages that are opened as files. Rows that an earlier table marks as
   reviewed come last. */
(() => {
  const { id, rows, pictures } = JSON.parse(document.getElementById("captioner-data").textContent);
  const groups = new Map();
  for (const row of rows) {
    const key = [row.image || row.tag, row.link, row.before, row.alt, row.reviewed, row.note].join("\n");
    groups.set(key, [...(groups.get(key) ?? []), row]);
  }
  const storage = `captioner alt ${id}`;
  const reviews = stored();
  let unsaved = false; // changes since the last download

  /** Return the reviews of an earlier visit: the text and the tick of each group. */
  function stored() {
    try {
      return JSON.parse(localStorage.getItem(storage)) ?? {};
    } catch {
      return {}; // the browser stores nothing
    }
  }

  /** Store the reviews in the browser, if possible. */
  function keep() {
    try {
      localStorage.setItem(storage, JSON.stringify(reviews));
    } catch {
      // The warning before the page is left is enough.
    }
  }

  /** Return the card of a group. */
  function card([key, group], number) {
    const { image, link, note, before, alt, suggested, confidence, tag } = group[0];
    const needsText = link.endsWith(" without text"); // as captioner.data.html_images writes it
    const sure = confidence && `${percent(Number(confidence))} likely to be right`;
    const aim = needsText && goal(link, suggested, sure);
    const suggestion = needsText ? "" : suggested;
    let [start, ticked] = reviews[key] ?? [alt, group[0].reviewed === "yes"];
    const show = () => {
      const text = field.value.trim();
      const changed = text !== alt.trim();
      const missing = needsText && !text;
      const reviewed = (changed || ticked) && !missing;
      box.checked = reviewed;
      item.classList.toggle("reviewed", reviewed);
      field.setAttribute("aria-invalid", missing && (changed || ticked));
      state.textContent = described({ text, changed, ticked, missing, suggestion });
      for (const row of group) Object.assign(row, { alt: text, reviewed: reviewed ? "yes" : "" });
    };
    const change = ({ target }) => {
      if (target === box) ticked = box.checked;
      reviews[key] = [field.value, ticked];
      unsaved = true;
      keep();
      show();
      count();
    };
    const state = element("span", { class: "quiet", id: `state-${number}` });
    const field = element("textarea", { rows: "2", autocomplete: "off", oninput: change }, start);
    const box = element("input", { type: "checkbox", autocomplete: "off", onchange: change });
    const descriptions = aim ? `aim-${number} ${state.id}` : state.id;
    for (const one of [field, box]) one.setAttribute("aria-describedby", descriptions);
    const empty = before === "empty" && 'has alt="" in the page: decorative, or Markdown without text';
    const lines = [image || tag, link, empty, note].filter(Boolean);
    const places = group.map(({ page, line }) => `${page}:${line}`).join(", ");
    const texts = element("div", {},
      ...lines.map((text, index) => element(index ? "div" : "b", {}, text)),
      ...(aim ? [element("p", { class: "aim", id: `aim-${number}` }, aim.reason)] : []),
      element("label", {}, aim ? aim.label : `alternative text${sure && `, ${sure}`}`, field),
      element("p", { class: "state" }, element("label", {}, box, " reviewed"), " ", state),
      element("p", { class: "quiet" }, places));
    const item = element("li", {}, element("img", { src: pictures[image] ?? null, alt: "" }), texts);
    show();
    return item;
  }

  /** Return the label and the explanation for a picture that is the only content of a link or button. */
  function goal(link, suggested, sure) {
    const kind = link.startsWith("button") ? "button" : "link";
    const aim = kind === "link" ? "where the link leads" : "what the button does";
    const reason = `This ${kind} contains only the picture, so screen readers read the text as the name of the `
      + `${kind}. The text should say ${aim}, not what the picture shows. `;
    const seen = suggested && `The model describes the picture as “${suggested}”${sure && ` (${sure})`}.`;
    return { label: `alternative text: ${aim}`, reason: reason + seen };
  }

  /** Describe the review of a card, or why the card cannot be reviewed, after the word "reviewed". */
  function described({ text, changed, ticked, missing, suggestion }) {
    if (missing && (changed || ticked)) return "The link or button contains nothing else, so it needs a text.";
    if (!changed && !ticked) return "";
    if (!text) return 'as decorative, with alt=""';
    if (text === suggestion.trim()) return "as suggested";
    return suggestion ? `with your text in place of “${suggestion}”` : "with your text";
  }

  /** Show the number of reviewed rows. */
  function count() {
    const done = rows.filter(({ reviewed }) => reviewed).length;
    const open = unsaved ? ", not downloaded yet" : "";
    document.querySelector("[role=status]").textContent = `${done} of ${rows.length} reviewed${open}`;
  }

  document.querySelector("[download]").addEventListener("click", ({ target }) => {
    const lines = [Object.keys(rows[0]), ...rows.map(Object.values)];
    const text = lines.map((line) => `${line.map(csvCell).join(",")}\n`).join("");
    target.href = URL.createObjectURL(new Blob(["\ufeff", text], { type: "text/csv" }));
    unsaved = false;
    count();
  });
  window.addEventListener("beforeunload", (event) => unsaved && event.preventDefault());
  const open = ([, [{ reviewed }]]) => reviewed !== "yes";
  const cards = [...groups].sort((one, other) => open(other) - open(one));
  document.querySelector(".review").append(...cards.map(card));
  count();
})();
