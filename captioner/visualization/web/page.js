"use strict";
/* A page of photos: without a script a list of photos and captions, with it the viewer. */
(() => {
  const { entries, look } = JSON.parse(document.getElementById("captioner-data").textContent);
  const items = [...document.querySelectorAll(".entry")];
  const gallery = document.querySelector(".gallery");
  const alone = document.querySelector(".alone");
  const stand = alone.querySelector(".stand");
  const bar = document.querySelector(".bar-of-gallery");
  const single = entries.length === 1;
  let viewer = null;
  let shown = null; // the photo's place; null: the gallery
  let turn = 0; // a photo that is ready too late is not shown

  /** The viewer of one photo, or the gallery. */
  async function show(index, focus) {
    const mine = (turn += 1);
    const before = shown;
    viewer?.stop();
    viewer = null;
    shown = index;
    gallery.hidden = bar.hidden = index !== null;
    alone.hidden = index === null;
    if (index === null) {
      if (before !== null) items[before].querySelector("a").focus(); // it scrolls there too
      return;
    }
    const image = items[index].querySelector("img");
    await image.decode().catch(() => {});
    if (mine !== turn) return;
    alone.querySelector("h2").textContent = single ? "" : entries[index].title;
    stand.className = "stand";
    viewer = new CaptionViewer(stand, { ...entries[index], image }, look);
    if (focus) stand.querySelector("[tabindex='0']")?.focus({ preventScroll: true });
    window.scrollTo(0, 0);
  }

  function fromAddress(focus) {
    const number = single ? 1 : Number(/^#photo-(\d+)$/.exec(location.hash)?.[1] ?? 0);
    show(number >= 1 && number <= entries.length ? number - 1 : null, focus);
  }

  /** To the next photo of those that the gallery shows. */
  function next(step) {
    let at = shown;
    do at = (at + step + items.length) % items.length;
    while (items[at].hidden && at !== shown);
    location.hash = `photo-${at + 1}`;
  }

  /** Only photos whose captions hold every word that was typed. */
  function filter(text) {
    const wanted = text.toLowerCase().split(/\s+/).filter(Boolean);
    let count = 0;
    entries.forEach(({ title, captions }, index) => {
      const said = [title, ...captions.map((caption) => caption.text)].join(" ").toLowerCase();
      const fits = wanted.every((word) => said.includes(word));
      items[index].hidden = !fits;
      count += fits;
    });
    bar.querySelector("output").textContent = `${count} of ${entries.length} photos`;
  }

  document.addEventListener("keydown", (event) => {
    const typing = event.target.closest?.("input, button, a, [role='listbox']");
    if (viewer === null || event.altKey || event.ctrlKey || event.metaKey) return;
    const leaving = event.key === "Escape";
    if (leaving && !single && viewer.selected === null) location.hash = "";
    else if (leaving || !typing) viewer.key(event, true);
  });
  for (const [selector, step] of [[".previous", -1], [".next", 1]]) {
    alone.querySelector(selector).addEventListener("click", () => next(step));
  }
  items.forEach((item, index) => {
    item.querySelector("a").addEventListener("click", (event) => {
      event.preventDefault(); // in a notebook's frame the link would lead to the notebook
      location.hash = `photo-${index + 1}`;
    });
  });
  alone.querySelector(".back").addEventListener("click", () => (location.hash = ""));
  alone.querySelector("nav").hidden = single;
  bar.querySelector("input").addEventListener("input", (event) => filter(event.target.value));
  window.addEventListener("hashchange", () => fromAddress(true));
  document.body.classList.add("scripted");
  filter("");
  fromAddress(false);
})();
