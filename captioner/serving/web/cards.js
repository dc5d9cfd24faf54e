"use strict";
/* A photo of the session and its card: thumbnail, caption or problem, file name. */
class SessionPhoto {
  // The name and the caption follow as text. A thumbnail must not be dropped as another photo.
  static THUMBNAIL = { alt: "", decoding: "async", width: "160", height: "120", draggable: "false" };

  static count = 0;

  /** State: waiting, working, done, failed or stopped. */
  constructor(file, kind, onChoose) {
    Object.assign(this, { file, kind, name: file.name || "pasted photo", number: SessionPhoto.count++ });
    this.url = URL.createObjectURL(file);
    this.corrected = null; // the reader's caption
    this.query = null; // of the response, or of the request in flight
    this.response = null;
    this.upload = null; // what is sent, see Upload
    this.image = null; // <img>, and the EXIF orientation that the browser ignores; see `load`
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

  /** The best caption, as corrected by the reader. */
  get text() {
    return this.corrected ?? this.response.captions[0].text;
  }

  /** The captions to download: all of the response, or the corrected one with its keywords. */
  get captions() {
    const { captions } = this.response;
    const { keywords } = captions[0];
    if (this.corrected === null) return captions;
    return [{ text: this.corrected, corrected: true, ...(keywords && { keywords }) }];
  }

  /** Its confidence before the correction; Infinity if there is none. */
  get confidence() {
    const { captions, confidence } = this.response ?? {};
    return captions?.[0].confidence ?? confidence ?? Infinity;
  }

  /** Replace the caption; an empty text restores the model's. */
  correct(text) {
    this.corrected = ["", this.response.captions[0].text].includes(text.trim()) ? null : text.trim();
    this.enter("done");
  }

  /** Load what the upload and the viewer need. */
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
