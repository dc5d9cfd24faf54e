"use strict";
/* A photo of the session and its card: thumbnail, caption or problem, file name. */
class SessionPhoto {
  /** State: waiting, working, done, failed or stopped. */
  constructor(file, kind, onChoose) {
    Object.assign(this, { file, kind, name: file.name || "pasted photo" });
    this.url = URL.createObjectURL(file);
    this.query = null; // of the response, or of the request in flight
    this.response = null;
    this.upload = null; // what is sent, see Upload
    this.image = null; // <img>, loaded when the photo is shown
    this.abort = null; // AbortController of the request in flight
    this.caption = element("span", { class: "text" });
    this.button = element(
      "button",
      { type: "button", class: "card", onclick: () => onChoose(this) },
      element("img", { src: this.url, alt: "", decoding: "async", width: "160", height: "120" }),
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
    this.caption.textContent = texts[state] ?? this.response.captions[0].text;
  }

  /** Load what the viewer needs. */
  async load() {
    this.image ??= await loadedImage(this.url);
    this.orientation ??= await webpOrientation(this.file);
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
