"use strict";
/* Photos in by drop, paste or choice; captions out in the viewer. Nothing but the photo's bytes and
   the wishes beside it is sent, and to this server only. */
(() => {
  const { limits, look } = JSON.parse(document.getElementById("captioner-data").textContent);
  const [input, form, stand, status, strip] = ["#file", ".wishes", ".stand", ".status", ".strip"].map(
    (selector) => document.querySelector(selector),
  );
  const complaints = document.querySelector(".complaints");
  const MOST = 30; // photos in the strip; the browser keeps the file of each
  const photos = []; // {file, image, button, turn: see orientation}
  let current = null;
  let viewer = null;
  let running = null; // AbortController of the request on its way
  let shown = null; // the photo whose captions the page shows
  let asked = null; // what the page shows, or waits for

  function say(text, wrong = false) {
    status.textContent = text;
    status.classList.toggle("wrong", wrong);
  }

  /** The wishes of the form as the query of a request. */
  function query() {
    const wishes = new URLSearchParams({ attention: "true", alternatives: "5" });
    const own = form.elements.words.value.trim();
    if (own) wishes.set("words", own);
    for (const name of own ? [] : ["beam_size", "num_captions"]) {
      const { value } = form.elements[name];
      if (value !== "") wishes.set(name, value);
    }
    return wishes;
  }

  async function answer(photo, signal) {
    const request = { method: "POST", body: photo.file, signal };
    const response = await fetch(`v1/captions?${query()}`, request).catch(() => {
      throw new Error("the server does not answer; is it running?");
    });
    const told = await response.json().catch(() => ({}));
    if (!response.ok) throw new Error(told.error ?? `the server answered ${response.status}`);
    return told;
  }

  /** Caption the photo that is shown, as the form wishes. */
  async function run() {
    const wanted = `${current.image.src} ${query()}`; // every file has an address of its own
    if (wanted === asked) return; // Enter both changes a field and submits
    asked = wanted;
    running?.abort();
    const mine = (running = new AbortController());
    const photo = current;
    say("looking …");
    document.body.classList.add("busy");
    try {
      const [told] = await Promise.all([answer(photo, mine.signal), readable(photo)]);
      if (running !== mine) return;
      show(photo, told);
    } catch (error) {
      if (running !== mine) return;
      asked = null; // the same may be asked again
      if (shown !== photo) {
        viewer?.stop();
        viewer = null;
        stand.replaceChildren();
        stand.className = "stand";
        photo.button.classList.add("failed");
        photo.button.title = `${photo.file.name}: ${error.message}`;
      }
      say(error.message, true);
    } finally {
      if (running === mine) document.body.classList.remove("busy");
    }
  }

  /** Whether the browser can show the photo; the server reads some that browsers do not (TIFF). */
  async function readable(photo) {
    await photo.image.decode().catch(() => {});
    photo.turn ??= await orientation(photo.file);
  }

  /** How a WebP is to be turned by its EXIF, which the server does and browsers do not; 1: as it is. */
  async function orientation(file) {
    const view = new DataView(await file.arrayBuffer());
    const name = (at) => String.fromCharCode(...new Uint8Array(view.buffer, at, 4));
    try {
      if (name(0) !== "RIFF" || name(8) !== "WEBP") return 1;
      let chunk = 12;
      while (name(chunk) !== "EXIF") {
        const size = view.getUint32(chunk + 4, true);
        chunk += 8 + size + (size % 2);
      }
      const tiff = chunk + (name(chunk + 8) === "Exif" ? 14 : 8);
      const little = view.getUint16(tiff) === 0x4949;
      const entries = tiff + view.getUint32(tiff + 4, little);
      for (let entry = 0; entry < view.getUint16(entries, little); entry++) {
        const at = entries + 2 + 12 * entry;
        if (view.getUint16(at, little) === 0x0112) return view.getUint16(at + 8, little);
      }
    } catch {
      // it ends before: no EXIF
    }
    return 1;
  }

  /** Why the browser's picture is not the one that the server saw; empty: it is. */
  function otherwise({ image, turn }, { width, height }) {
    const { naturalWidth, naturalHeight } = image;
    if (naturalWidth === 0) return "This browser cannot show this kind of picture";
    const lying = naturalWidth * height !== naturalHeight * width;
    // Where both have one shape, nobody can see whether the browser has turned it.
    const unknown = turn > 1 && (turn < 5 || width === height);
    return lying || unknown ? "This browser does not turn this picture upright" : "";
  }

  function show(photo, told) {
    const { captions } = told;
    viewer?.stop();
    viewer = null;
    shown = photo;
    photo.button.classList.remove("failed");
    photo.button.title = "";
    stand.className = "stand";
    say(captions[0].text);
    const reason = otherwise(photo, told);
    if (reason) {
      const lines = captions.map(({ text }) => element("p", { class: "chosen" }, text));
      const note = `${reason}, so there is no viewer.`;
      stand.replaceChildren(...lines, element("p", { class: "quiet" }, note));
      return;
    }
    photo.image.alt = captions[0].text;
    viewer = new CaptionViewer(stand, { captions, image: photo.image }, look);
  }

  function choose(photo) {
    current = photo;
    for (const { button } of photos) button.setAttribute("aria-current", `${button === photo.button}`);
    run();
  }

  function add(files) {
    const given = [...files];
    if (given.length === 0) return;
    const number = (count) => count.toLocaleString("en");
    const large = given.filter((file) => file.size > limits.max_bytes);
    complaints.replaceChildren(
      ...large.map(({ name, size }) => {
        const allowed = `give ${number(limits.max_bytes)} at most`;
        return element("p", {}, `${name} has ${number(size)} bytes; ${allowed}`);
      }),
    );
    let first = null;
    for (const file of given.filter((one) => !large.includes(one))) {
      const image = new Image();
      image.src = URL.createObjectURL(file);
      const picture = element("img", { src: image.src, alt: file.name });
      const photo = { file, image };
      photo.button = element("button", { type: "button", onclick: () => choose(photo) }, picture);
      photos.push(photo);
      strip.append(photo.button);
      first ??= photo;
    }
    if (first === null) return;
    const many = given.length - large.length - MOST;
    if (many > 0) {
      const told = `the page holds ${MOST} photos; the first ${number(many)} are left out`;
      complaints.append(element("p", {}, told));
    }
    for (const { image, button } of photos.splice(0, Math.max(0, photos.length - MOST))) {
      URL.revokeObjectURL(image.src);
      button.remove();
    }
    first = photos.includes(first) ? first : photos[0];
    strip.hidden = photos.length < 2;
    document.body.classList.remove("empty");
    choose(first);
  }

  input.addEventListener("change", () => {
    add(input.files);
    input.value = ""; // the same file can be chosen again
  });
  document.addEventListener("paste", (event) => add(event.clipboardData?.files ?? []));
  document.addEventListener("dragover", (event) => {
    event.preventDefault();
    document.body.classList.add("dragging");
  });
  document.addEventListener("dragleave", (event) => {
    if (event.relatedTarget === null) document.body.classList.remove("dragging");
  });
  document.addEventListener("drop", (event) => {
    event.preventDefault();
    document.body.classList.remove("dragging");
    add(event.dataTransfer?.files ?? []);
  });
  document.addEventListener("keydown", (event) => {
    const typing = event.target.closest?.("input, button, label, [role='listbox']");
    const leaving = event.key === "Escape";
    if ((leaving || !typing) && !event.altKey && !event.ctrlKey && !event.metaKey) viewer?.key(event, true);
  });
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (current !== null) run();
  });
  form.addEventListener("change", () => {
    const own = form.elements.words.value.trim() !== "";
    for (const name of ["beam_size", "num_captions"]) form.elements[name].disabled = own;
    if (current !== null) run();
  });
})();
