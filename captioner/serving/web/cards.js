"use strict";
/** A correction as a caption, with the maps of a caption that explains it and without the model's
    doubts. It has the words as the user wrote them, if the model has read as many words. */
function asCorrected(caption, text) {
  const kept = ["log_probs", "gates", "alphas", "geometry", "method"].filter((key) => key in caption);
  const typed = text.split(/\s+/);
  const words = typed.length === caption.words.length ? typed : caption.words;
  return { text, words, corrected: true, ...Object.fromEntries(kept.map((key) => [key, caption[key]])) };
}

/* A photo of the session and its card: thumbnail, caption or problem, file name. */
class SessionPhoto {
  // No alternative text, because name and caption follow as text. Not draggable, because the page
  // would take a dropped thumbnail for a new photo.
  static THUMBNAIL = { alt: "", decoding: "async", width: "160", height: "120", draggable: "false" };

  static count = 0;

  /** State: waiting, working, done, failed or stopped. */
  constructor(file, kind, onChoose) {
    Object.assign(this, { file, kind, name: fileName(file) || "pasted photo", number: SessionPhoto.count++ });
    this.url = URL.createObjectURL(file);
    this.corrected = null; // the user's correction of the caption
    this.revised = null; // the response with the corrected caption, see `correct`
    this.query = null; // options of the response, or of the request in flight
    this.response = null;
    this.upload = null; // the file that is sent, see Upload
    this.image = null; // <img>; `load` also sets the EXIF orientation that the browser ignores
    this.abort = null; // AbortController of the request in flight
    this.caption = element("span", { class: "text" });
    this.button = element(
      "button",
      { type: "button", class: "card", onclick: () => onChoose(this) },
      element("img", { ...SessionPhoto.THUMBNAIL, src: this.url }),
      this.caption,
      element("span", { class: "name" }, this.name),
    );
    this.item = element("li", {}, this.button);
    this.enter("waiting");
  }

  enter(state, error = "") {
    this.state = state;
    this.error = error;
    this.button.dataset.state = state;
    const texts = { waiting: "waiting", working: "captioning …", stopped: "not captioned", failed: error };
    const rest = state === "done" && this.corrected === null ? leftOut(this.response.captions[0]) : [];
    this.caption.replaceChildren(texts[state] ?? this.text, ...rest);
    this.button.toggleAttribute("data-corrected", this.corrected !== null);
  }

  /** The user's correction, or else the best caption. */
  get text() {
    return this.corrected ?? this.response.captions[0].text;
  }

  /** The captions to download: all captions of the response, or the correction with its keywords. */
  get captions() {
    const { captions } = this.response;
    const { keywords } = captions[0];
    if (this.corrected === null) return captions;
    return [{ text: this.corrected, corrected: true, ...(keywords && { keywords }) }];
  }

  /** The confidence of the caption before it was corrected; Infinity if it is not known. */
  get confidence() {
    const { captions, confidence } = this.response ?? {};
    return captions?.[0].confidence ?? confidence ?? Infinity;
  }

  /** Replace the caption; empty text restores the model's caption. The corrected caption has no maps
      until `addMaps`. */
  correct(text) {
    this.corrected = ["", this.response.captions[0].text].includes(text.trim()) ? null : text.trim();
    this.revised = null;
    if (this.corrected !== null) this.revise({ words: [] });
    this.enter("done");
  }

  /** Add the maps of the correction's words, from a response that explains it. */
  addMaps({ captions: [caption] }) {
    this.revise(caption);
  }

  revise(caption) {
    this.revised = { ...this.response, captions: [asCorrected(caption, this.corrected)] };
    const { keywords } = this.response.captions[0];
    if (keywords) this.revised.captions[0].keywords = keywords;
  }

  /** The response to show and to download in pages, with the correction in place of the captions. */
  get result() {
    return this.revised ?? this.response;
  }

  /** Load the image and its orientation, for the upload and the viewer. */
  async load() {
    this.image ??= await loadedImage(this.url);
    this.orientation ??= this.kind === "WebP" ? await webpOrientation(this.file) : 1;
  }

  /** Whether the attention of its captions can be drawn on the photo that the browser shows. */
  get drawable() {
    return this.state === "done" && mismatch(this, this.response) === "";
  }

  remove() {
    this.abort?.abort();
    this.item.remove();
    URL.revokeObjectURL(this.url);
  }
}
