"use strict";
/* Drop, paste or choose photos; captions are shown in the viewer. Only the photo's bytes and the
   options of the form are sent, to this server only. */
(() => {
  const { limits, look } = JSON.parse(document.getElementById("captioner-data").textContent);
  const [input, form, result, status, errors, strip] = [
    "#file", ".options", ".result", ".status", ".errors", ".strip",
  ].map((selector) => document.querySelector(selector));
  const MAX_PHOTOS = 30; // in the strip; the browser keeps their files
  const photos = []; // {file, image, button, orientation}
  let current = null; // the selected photo
  let viewer = null;
  let pending = null; // AbortController of the request in flight
  let shown = null; // the photo whose captions are shown
  let lastRequest = null; // photo and query that are shown or in flight

  function setStatus(text, failed = false) {
    status.textContent = text;
    status.classList.toggle("failed", failed);
  }

  /** The query parameters given by the form. */
  function query() {
    const parameters = new URLSearchParams({ attention: "true", alternatives: "5" });
    const words = form.elements.words.value.trim();
    if (words) parameters.set("words", words);
    for (const name of words ? [] : ["beam_size", "num_captions"]) {
      const { value } = form.elements[name];
      if (value !== "") parameters.set(name, value);
    }
    return parameters;
  }

  async function fetchCaptions(photo, signal) {
    const request = { method: "POST", body: photo.file, signal };
    const response = await fetchWithKey(`v1/captions?${query()}`, request).catch(() => {
      throw new Error("the server does not respond; is it running?");
    });
    const body = await response.json().catch(() => ({}));
    if (!response.ok) throw new Error(body.error ?? `the server returned ${response.status}`);
    return body;
  }

  /** Caption the selected photo with the options of the form. */
  async function run() {
    const request = `${current.image.src} ${query()}`; // each file has its own URL
    if (request === lastRequest) return; // Enter both changes a field and submits the form
    lastRequest = request;
    pending?.abort();
    const mine = (pending = new AbortController());
    const photo = current;
    setStatus("captioning …");
    document.body.classList.add("busy");
    try {
      const [response] = await Promise.all([fetchCaptions(photo, mine.signal), decode(photo)]);
      if (pending !== mine) return;
      show(photo, response);
    } catch (error) {
      if (pending !== mine) return;
      lastRequest = null; // allow a retry
      if (shown !== photo) {
        viewer?.stop();
        viewer = null;
        result.replaceChildren();
        result.className = "result";
        photo.button.classList.add("failed");
        photo.button.title = `${photo.file.name}: ${error.message}`;
      }
      setStatus(error.message, true);
    } finally {
      if (pending === mine) document.body.classList.remove("busy");
    }
  }

  /** Decode the photo, if the browser supports its format (the server supports more, e.g. TIFF). */
  async function decode(photo) {
    await photo.image.decode().catch(() => {});
    photo.orientation ??= await webpOrientation(photo.file);
  }

  /** EXIF orientation of a WebP file, which the server applies and browsers ignore; otherwise 1. */
  async function webpOrientation(file) {
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
      // end of file: no EXIF
    }
    return 1;
  }

  /** Why the browser's image differs from what the server captioned; empty if it does not. */
  function mismatch({ image, orientation }, { width, height }) {
    const { naturalWidth, naturalHeight } = image;
    if (naturalWidth === 0) return "This browser does not support this image format";
    const rotated = naturalWidth * height !== naturalHeight * width;
    // With equal aspect ratios, it is unknown whether the browser applied the orientation.
    const unknown = orientation > 1 && (orientation < 5 || width === height);
    return rotated || unknown ? "This browser does not apply this image's EXIF orientation" : "";
  }

  function show(photo, response) {
    const { captions } = response;
    viewer?.stop();
    viewer = null;
    shown = photo;
    photo.button.classList.remove("failed");
    photo.button.title = "";
    result.className = "result";
    setStatus(captions[0].text);
    const reason = mismatch(photo, response);
    if (reason) {
      const lines = captions.map(({ text }) => element("p", { class: "chosen" }, text));
      const note = `${reason}, so attention cannot be shown.`;
      result.replaceChildren(...lines, element("p", { class: "quiet" }, note));
      return;
    }
    photo.image.alt = captions[0].text;
    viewer = new CaptionViewer(result, { captions, image: photo.image }, look);
  }

  function choose(photo) {
    current = photo;
    for (const { button } of photos) button.setAttribute("aria-current", `${button === photo.button}`);
    run();
  }

  function add(files) {
    const given = [...files];
    if (given.length === 0) return;
    const format = (count) => count.toLocaleString("en");
    const small = given.filter((file) => file.size <= limits.max_bytes);
    errors.replaceChildren(
      ...given.filter((file) => !small.includes(file)).map(({ name, size }) => {
        const limit = `the limit is ${format(limits.max_bytes)}`;
        return element("p", {}, `${name} has ${format(size)} bytes; ${limit}`);
      }),
    );
    if (small.length === 0) return;
    const added = small.map((file) => {
      const image = new Image();
      image.src = URL.createObjectURL(file);
      const thumbnail = element("img", { src: image.src, alt: file.name });
      const photo = { file, image };
      photo.button = element("button", { type: "button", onclick: () => choose(photo) }, thumbnail);
      strip.append(photo.button);
      return photo;
    });
    photos.push(...added);
    const excess = added.length - MAX_PHOTOS;
    if (excess > 0) {
      const note = `the page holds ${MAX_PHOTOS} photos; the first ${format(excess)} were skipped`;
      errors.append(element("p", {}, note));
    }
    for (const { image, button } of photos.splice(0, Math.max(0, photos.length - MAX_PHOTOS))) {
      URL.revokeObjectURL(image.src);
      button.remove();
    }
    strip.hidden = photos.length < 2;
    document.body.classList.remove("empty");
    choose(photos.includes(added[0]) ? added[0] : photos[0]);
  }

  input.addEventListener("change", () => {
    add(input.files);
    input.value = ""; // so that the same file can be chosen again
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
    const hasWords = form.elements.words.value.trim() !== "";
    for (const name of ["beam_size", "num_captions"]) form.elements[name].disabled = hasWords;
    if (current !== null) run();
  });
})();
