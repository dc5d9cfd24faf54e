"use strict";
/* The session: caption the photos, the selected photo first, and show them in the viewer. `Pool` and
   `Upload` send only photos and the options of the form to the server. In the static site
   (captioner/serving/site/web/device.js) they send nothing. */
(() => {
  const settings = JSON.parse(document.getElementById("captioner-data").textContent);
  const find = (selector) => document.querySelector(selector);
  const [form, errors, cards, status, result] = [".options", ".errors", ".cards", ".status", ".result"].map(find);
  const options = new OptionsForm(form, settings);
  const correction = find(".correct");
  const field = correction.querySelector("input");
  const pool = new Pool(nextJob, (seconds) => {
    find(".count").textContent = `The server is busy; trying again in ${seconds} s`;
  });
  let photos = [];
  let current = null; // the selected photo
  let viewer = null;
  let shown = null; // photo and response in the viewer
  let explained = null; // {photo, query, response, error, abort, state}: the request for the caption in the form
  let running = false; // whether photos are being captioned
  let edited = null; // the photo whose caption is in the field
  let unsaved = false; // whether corrections exist that were not downloaded
  let method = "attention"; // how the maps of the selected photo are computed
  const computed = new WeakMap(); // for each response, further responses with the maps of other methods

  /* --- captioning ------------------------------------------------------------------------------ */

  /** The next request: the caption in the form, then the selected photo, then all others in order. */
  function nextJob() {
    if (explained?.state === "waiting") return () => explain(explained);
    const waiting = photos.filter(({ state }) => state === "waiting");
    const photo = waiting.includes(current) ? current : waiting[0];
    return photo === undefined ? null : () => captionPhoto(photo);
  }

  async function captionPhoto(photo) {
    const abort = (photo.abort = new AbortController());
    photo.enter("working");
    photo.query = options.query();
    refresh(photo);
    try {
      photo.upload ??= await Upload.of(photo, settings);
      abort.signal.throwIfAborted();
      const response = await pool.captions(photo.upload.body, photo.query, abort.signal);
      await photo.load();
      if (abort.signal.aborted) return;
      photo.response = response;
      photo.converted = photo.upload.converted;
      photo.enter("done");
    } catch (error) {
      if (abort.signal.aborted) return; // stopped, or started again with other options
      photo.enter("failed", error.message);
      stopAll(error);
    }
    refresh(photo);
  }

  async function explain(mine) {
    const { photo, query, abort } = mine;
    mine.state = "working";
    try {
      photo.upload ??= await Upload.of(photo, settings);
      mine.response = await pool.captions(photo.upload.body, query, abort.signal);
      photo.converted = photo.upload.converted;
      await photo.load();
      mine.state = "done";
    } catch (error) {
      Object.assign(mine, { state: "failed", error: error.message });
      stopAll(error);
    }
    if (mine === explained) refresh(photo);
  }

  /** Stop at an error that every photo would have, such as a missing API key. */
  function stopAll(error) {
    if (error.stopsAll) cancel();
  }

  /** Caption all photos that have no captions for the options of the form. With `again`, also repeat
      failed and stopped photos. */
  function update(again = false) {
    if (!options.valid) {
      refresh(current);
      return;
    }
    const query = options.query();
    for (const photo of photos) {
      const retry = again && ["failed", "stopped"].includes(photo.state);
      if ((photo.query === query || photo.state === "waiting") && !retry) continue;
      photo.abort?.abort();
      photo.enter("waiting");
    }
    const words = options.wordsQuery();
    const same = explained?.photo === current && explained?.query === words;
    if (!same || (again && explained?.state === "failed")) {
      explained?.abort.abort();
      const request = { photo: current, query: words, state: "waiting", abort: new AbortController() };
      explained = words === null || current === null ? null : request;
    }
    pool.fill();
    refresh(current);
  }

  function cancel() {
    for (const photo of photos.filter(({ state }) => ["waiting", "working"].includes(state))) {
      photo.abort?.abort();
      photo.query = options.query(); // until the options change, only the button continues
      photo.enter("stopped");
    }
    refresh(current);
    form.querySelector("button").focus(); // “Caption” continues; “Cancel” disappears
  }

  /* --- display --------------------------------------------------------------------------------- */

  /** Show the progress, and the selected photo if it is `photo`. */
  function refresh(photo) {
    const count = (state) => photos.filter((one) => one.state === state).length;
    const [done, failed, stopped] = ["done", "failed", "stopped"].map(count);
    const total = photos.length;
    const busy = done + failed + stopped < total;
    const parts = [`${done} of ${total} captioned`];
    if (failed > 0) parts.push(`${failed} failed`);
    const summary = parts.join(", ");
    find(".count").textContent = summary;
    Object.assign(find("progress"), { value: done + failed, max: Math.max(total, 1) });
    for (const selector of ["progress", ".cancel"]) find(selector).hidden = !busy;
    find(".order").hidden = total < 2;
    find(".session .downloads").hidden = done === 0;
    find(".session").hidden = find(".selected").hidden = total === 0;
    document.body.classList.toggle("empty", total === 0);
    // Announced only at the end, because an announcement for every photo would be too much.
    if (busy !== running) find(".announcement").textContent = busy || total < 2 ? "" : summary;
    if (running && !busy) arrange();
    running = busy;
    if (photo === current && current !== null) showCurrent();
  }

  function setStatus(text, failed = false) {
    if (status.textContent !== text) status.textContent = text;
    status.classList.toggle("failed", failed);
  }

  function showCurrent() {
    const photo = current;
    const own = explained?.photo === photo ? explained : null;
    const { state, error } = own ?? photo;
    find(".selected h2").textContent = `${photos.indexOf(photo) + 1} of ${photos.length}: ${photo.name}`;
    find(".selected nav").hidden = photos.length < 2;
    const busy = state === "waiting" || state === "working";
    document.body.classList.toggle("busy", busy);
    correction.hidden = own !== null || state !== "done";
    if (!correction.hidden && (edited !== photo || document.activeElement !== field)) {
      field.value = photo.text;
      edited = photo;
    }
    if (state === "done" && own) show(photo, own.response, own.query);
    else if (state === "done") show(photo, photo.result, photo.revised ? photo.correctionQuery : photo.query);
    else {
      const texts = { failed: error, stopped: "Not captioned. Press “Caption” to continue." };
      if (shown?.photo !== photo) clearResult();
      setStatus(texts[state] ?? "captioning …", state === "failed");
    }
  }

  function clearResult() {
    shown?.abort?.abort();
    viewer?.stop();
    viewer = shown = null;
    result.replaceChildren();
    result.className = "result";
    result.removeAttribute("aria-busy");
    find(".overlay").hidden = true;
  }

  function show(photo, response, query) {
    const { captions } = response;
    setStatus(captions[0].text);
    if (shown?.response === response) return;
    clearResult();
    if (!computed.has(response)) computed.set(response, { attention: response });
    shown = { photo, response, query, drawn: response, abort: null };
    if (typeof response.confidence === "number") captions[0].confidence ??= response.confidence;
    const actions = ({ text }) => [copyButton(text)];
    const reason = mismatch(photo, response);
    if (reason) {
      const lines = captions.map((caption) => element("p", { class: "chosen" }, caption.text, " ", ...actions(caption)));
      const note = `${reason}, so attention cannot be shown.`;
      result.replaceChildren(...lines, element("p", { class: "quiet" }, note));
      return;
    }
    photo.image.alt = captions[0].text;
    const entry = { captions, image: photo.image, actions, methods: settings.methods, onMethod: showMaps };
    viewer = new CaptionViewer(result, entry, settings.look);
    find(".overlay").hidden = viewer.captions.length === 0;
    if (method !== "attention" && viewer.captions.length > 0) showMaps(method);
  }

  /** Show the maps of a method, computed by the server, for this photo and photos selected later. */
  async function showMaps(wanted) {
    method = wanted;
    const mine = shown;
    const { photo, query, response } = mine;
    const maps = computed.get(response);
    viewer.nameMethod(method);
    mine.abort?.abort();
    const { signal } = (mine.abort = new AbortController());
    setStatus("computing the maps …");
    result.setAttribute("aria-busy", "true");
    try {
      maps[wanted] ??= await pool.captions(photo.upload.body, `${query}&method=${wanted}`, signal);
      if (signal.aborted) return;
      const { text, corrected } = response.captions[0];
      if (corrected) maps[wanted].captions = [asCorrected(maps[wanted].captions[0], text)];
      mine.drawn = maps[wanted];
      viewer.replaceMaps(mine.drawn.captions);
      setStatus(text);
    } catch (error) {
      if (signal.aborted) return;
      method = viewer.method(0);
      viewer.nameMethod(method);
      setStatus(error.message, true);
    }
    result.removeAttribute("aria-busy");
  }

  /* --- photos ---------------------------------------------------------------------------------- */

  function choose(photo, again = false) {
    current = photo;
    for (const one of photos) one.button.setAttribute("aria-current", `${one === photo}`);
    if (again && ["failed", "stopped"].includes(photo.state)) photo.enter("waiting");
    update();
    if (again) find(".selected").scrollIntoView({ block: "nearest" });
  }

  function step(by) {
    const next = photos[(photos.indexOf(current) + by + photos.length) % photos.length];
    choose(next);
    next.button.scrollIntoView({ block: "nearest", inline: "nearest" });
  }

  /** Store the caption that the user has typed. */
  function correct() {
    if (edited?.state !== "done" || field.value.trim() === edited.text) return;
    const photo = edited;
    photo.correct(field.value);
    unsaved = true;
    if (photo.corrected !== null && options.explains) photo.maps = mapCorrection(photo);
    if (photo === current) refresh(current);
  }

  /** Add maps to a corrected caption. It has none if the model does not know its words. */
  async function mapCorrection(photo) {
    const { corrected } = photo;
    const query = options.wordsQuery(corrected);
    try {
      const response = await pool.captions(photo.upload.body, query, new AbortController().signal);
      if (photo.corrected !== corrected) return; // corrected again
      photo.correctionQuery = query;
      photo.addMaps(response);
      if (photo === current) refresh(photo);
    } catch {
      // The photo is shown with the corrected caption.
    }
  }

  /** Sort the photos: the least confident captions first, or as they were added. */
  function arrange() {
    const first = find(".order input").checked;
    const focused = document.activeElement;
    const rank = (photo) => (first ? photo.confidence : 0);
    photos.sort((a, b) => (rank(a) === rank(b) ? a.number - b.number : rank(a) < rank(b) ? -1 : 1));
    cards.append(...photos.map(({ item }) => item));
    focused.focus();
  }

  async function add(files) {
    // Copied, because the list is emptied when the event is over.
    const all = [...files];
    if (all.length === 0) return;
    const given = all.filter((file) => !isInFolder(file) || !file.name.startsWith("."));
    const examined = await Promise.all(given.map(examine));
    const lines = given.flatMap((file, i) => {
      const other = isInFolder(file) && ["unknown", "empty"].includes(examined[i].kind);
      return examined[i].problem && !other ? [`${fileName(file)}: ${examined[i].problem}`] : [];
    });
    const good = given.map((file, i) => [file, examined[i]]).filter(([, { problem }]) => !problem);
    if (good.length === 0 && lines.length === 0) lines.push("This folder contains no photos.");
    const added = good
      .slice(0, settings.maxPhotos - photos.length)
      .map(([file, { kind }]) => new SessionPhoto(file, kind, (photo) => choose(photo, true)));
    if (added.length < good.length) {
      const excess = good.length - added.length;
      lines.push(`This page can show ${settings.maxPhotos} photos, so ${excess} more were left out.`);
    }
    photos.push(...added);
    complain([...lines, ...sameNames()]);
    if (added.length === 0) return;
    cards.append(...added.map(({ item }) => item));
    choose(added[0]);
  }

  function complain(lines) {
    errors.replaceChildren(...lines.map((line) => element("p", {}, line)));
  }

  /** A sentence if several photos have the same name, because `captioner apply` finds photos by name. */
  function sameNames() {
    const names = photos.map(({ name }) => name);
    const twice = names.find((name, i) => names.indexOf(name) < i);
    if (twice === undefined) return [];
    return [
      `Several photos are named ${twice}, so their rows in the downloaded captions cannot be told apart; ` +
        "rename the files, or correct one folder at a time.",
    ];
  }

  function clear() {
    if (unsaved && !confirm("You have not downloaded your corrected captions. Remove all photos and captions?")) return;
    unsaved = false;
    explained?.abort.abort();
    for (const photo of photos) photo.remove();
    photos = [];
    current = explained = null;
    clearResult();
    setStatus("");
    find(".announcement").textContent = "";
    refresh(null);
    find("#file").focus();
  }

  /* --- downloads ------------------------------------------------------------------------------- */

  async function saveAll(format) {
    const done = photos.filter(({ state }) => state === "done");
    if (format !== "html") unsaved = false;
    complain(sameNames());
    if (format === "csv") saveFile(await captionsCsv(done), "captions.csv");
    else if (format === "json") saveFile(captionsJson(done), "captions.json");
    else {
      const drawable = done.filter((photo) => photo.drawable);
      await Promise.all(drawable.map(({ maps }) => maps));
      const entries = drawable.map((photo) => ({ photo, response: photo.result }));
      if (entries.length > 0) saveFile(await galleryPage(entries, settings), "captions.html");
      const left = done.length - drawable.length;
      const note = `The gallery lacks ${left} of ${done.length} photos, because this browser cannot show them.`;
      if (left > 0) complain([note, ...sameNames()]);
    }
  }

  async function saveOverlay(format) {
    const { photo, drawn: response } = shown;
    const name = `${photo.name.split("/").pop().replace(/\.[^.]*$/, "")}_attention.${format}`;
    if (format === "html") {
      saveFile(await galleryPage([{ photo, response }], settings), name);
      return;
    }
    const figure = new Figure(viewer, settings.look);
    saveFile(format === "svg" ? figure.svg() : await figure.png(), name);
  }

  /* --- input ----------------------------------------------------------------------------------- */

  for (const input of [find("#file"), find("#folder"), find("#camera")]) {
    input.addEventListener("change", () => {
      add(input.files);
      input.value = ""; // so that the same file can be chosen again
    });
  }
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
    if (event.dataTransfer) droppedFiles(event.dataTransfer).then(add).catch((error) => complain([`${error.message}`]));
  });
  document.addEventListener("keydown", (event) => {
    const typing = event.target.closest?.("input, button, label, [role='listbox']");
    const leaving = event.key === "Escape";
    if ((leaving || !typing) && !event.altKey && !event.ctrlKey && !event.metaKey) viewer?.key(event, true);
  });
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (photos.length > 0) update(true);
    else {
      const what = "Choose a photo first: press “Choose photos”, or drop or paste a photo on this page.";
      complain([what]);
    }
  });
  form.addEventListener("change", () => update());
  field.addEventListener("change", correct);
  correction.addEventListener("submit", (event) => {
    event.preventDefault();
    correct();
    step(1);
    field.select();
  });
  find(".order input").addEventListener("change", () => {
    arrange();
    refresh(current);
  });
  window.addEventListener("beforeunload", (event) => unsaved && event.preventDefault());
  find(".cancel").addEventListener("click", cancel);
  find(".clear").addEventListener("click", clear);
  find(".previous").addEventListener("click", () => step(-1));
  find(".next").addEventListener("click", () => step(1));
  for (const [selector, save] of [[".session", saveAll], [".overlay", saveOverlay]]) {
    for (const button of document.querySelectorAll(`${selector} [data-format]`)) {
      button.addEventListener("click", () => save(button.dataset.format));
    }
  }
})();
