"use strict";
/* A page with a list of photos and captions. Each photo opens in the viewer. */
(() => {
  const { entries, look } = JSON.parse(document.getElementById("captioner-data").textContent);
  const items = [...document.querySelectorAll(".entry")];
  const gallery = document.querySelector(".gallery");
  const photoView = document.querySelector(".photo-view");
  const container = photoView.querySelector(".container");
  const toolbar = document.querySelector(".toolbar");
  const single = entries.length === 1;
  const sorter = toolbar.querySelector("select");
  const confidence = entries.map(({ captions }) => captions[0].confidence ?? null);
  let order = entries.map((_, index) => index); // of the photos in the list
  let viewer = null;
  let shown = null; // index of the open photo, or null while the list is shown
  let request = 0; // number of the newest request; photos of older requests are not shown

  /** Show a photo in the viewer, or the list if `index` is null. */
  async function show(index, focus) {
    const mine = (request += 1);
    const before = shown;
    viewer?.stop();
    viewer = null;
    shown = index;
    gallery.hidden = toolbar.hidden = index !== null;
    photoView.hidden = index === null;
    if (index === null) {
      if (before !== null) items[before].querySelector("a").focus(); // also scrolls to it
      return;
    }
    const image = items[index].querySelector("img");
    await image.decode().catch(() => {});
    if (mine !== request) return;
    photoView.querySelector("h2").textContent = single ? "" : entries[index].title;
    container.className = "container";
    viewer = new CaptionViewer(container, { ...entries[index], image }, look);
    if (focus) container.querySelector("[tabindex='0']")?.focus({ preventScroll: true });
    window.scrollTo(0, 0);
  }

  /** Show the photo that the address names, such as #photo-2, or the list. */
  function fromAddress(focus) {
    const number = single ? 1 : Number(/^#photo-(\d+)$/.exec(location.hash)?.[1] ?? 0);
    show(number >= 1 && number <= entries.length ? number - 1 : null, focus);
  }

  /** Open the next (`step` 1) or previous (-1) photo that matches the search. */
  function next(step) {
    let place = order.indexOf(shown);
    do place = (place + step + order.length) % order.length;
    while (items[order[place]].hidden && order[place] !== shown);
    location.hash = `photo-${order[place] + 1}`;
  }

  /** Sort the list. Photos without a confidence come last, in their original order. */
  function sort(by) {
    const names = new Intl.Collator(undefined, { numeric: true });
    const sign = by === "highest" ? -1 : 1;
    order = entries.map((_, index) => index);
    if (by === "name") order.sort((a, b) => names.compare(entries[a].title, entries[b].title));
    else if (by !== "given") {
      const rank = (index) => (confidence[index] === null ? Infinity : sign * confidence[index]);
      order.sort((a, b) => (rank(a) === rank(b) ? a - b : rank(a) - rank(b)));
    }
    gallery.append(...order.map((index) => items[index]));
  }

  /** Show only photos whose title and captions contain every word of the search. */
  function filter(query) {
    const wanted = query.toLowerCase().split(/\s+/).filter(Boolean);
    let count = 0;
    entries.forEach(({ title, captions }, index) => {
      const text = [title, ...captions.map((caption) => caption.text)].join(" ").toLowerCase();
      const matches = wanted.every((word) => text.includes(word));
      items[index].hidden = !matches;
      count += matches;
    });
    toolbar.querySelector("output").textContent = `${count} of ${entries.length} photos`;
  }

  document.addEventListener("keydown", (event) => {
    const typing = event.target.closest?.("input, select, button, a, [role='listbox']");
    if (viewer === null || event.altKey || event.ctrlKey || event.metaKey) return;
    const leaving = event.key === "Escape";
    if (leaving && !single && viewer.selected === null) location.hash = "";
    else if (leaving || !typing) viewer.key(event, true);
  });
  for (const [selector, step] of [[".previous", -1], [".next", 1]]) {
    photoView.querySelector(selector).addEventListener("click", () => next(step));
  }
  items.forEach((item, index) => {
    item.querySelector("a").addEventListener("click", (event) => {
      event.preventDefault(); // in a notebook's iframe the link would point to the notebook
      location.hash = `photo-${index + 1}`;
    });
  });
  photoView.querySelector(".back").addEventListener("click", () => (location.hash = ""));
  photoView.querySelector("nav").hidden = single;
  toolbar.querySelector("input").addEventListener("input", (event) => filter(event.target.value));
  if (confidence.every((one) => one === null)) {
    for (const option of sorter.querySelectorAll("[value$=est]")) option.remove();
  }
  sorter.addEventListener("change", () => sort(sorter.value));
  window.addEventListener("hashchange", () => fromAddress(true));
  document.body.classList.add("scripted");
  filter("");
  fromAddress(false);
})();
