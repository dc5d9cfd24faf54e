"use strict";
/* A photo of the session and its card: thumbnail, caption or problem, file name. */
class SessionPhoto {
  // No alternative text, because name and caption follow as text. Not draggable, because the page
  // would take a dropped thumbnail for a new photo.
  static THUMBNAIL = { alt: "", decoding: "async", width: "160", height: "120", draggable: "false" };

  static count = 0;

  /** State: waiting, working, done, failed or stopped. */
  constructor(file, kind, onChoose) {
    Object.assign(this, { file, kind, name: file.name || "pasted photo", number: SessionPhoto.count++ });
    this.url = URL.createObjectURL(file);
    this.corrected = null; // the user's correction of the caption
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

  /** Replace the caption; empty text restores the model's caption. */
  correct(text) {
    this.corrected = ["", this.response.captions[0].text].includes(text.trim()) ? null : text.trim();
    this.enter("done");
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
