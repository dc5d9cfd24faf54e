"use strict";
/* Zooming and moving the photo: by buttons, pinch, Ctrl + wheel, double click, drag and arrow keys.

   No action needs two fingers, dragging or a wheel, because the buttons and a double click on a
   place do the same with one finger or one click. */
class Zoom {
  static MOST = 8; // largest magnification
  static STEP = 1.5; // magnification by one click on a button
  static WHOLE = { x: 0, y: 0, size: 1 };

  /** `changed(view)` receives the visible part: left, top and size as fractions of the photo. */
  constructor(stage, changed) {
    this.stage = stage;
    this.changed = changed;
    this.view = Zoom.WHOLE;
    this.fingers = new Map(); // positions of the pointers on the photo, by id
    this.buttons = this.makeButtons();
    stage.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
    stage.addEventListener("dblclick", (event) => this.doubleClick(event));
    stage.addEventListener("pointerdown", (event) => this.press(event));
    stage.addEventListener("pointermove", (event) => this.move(event));
    for (const kind of ["pointerup", "pointercancel", "lostpointercapture"]) {
      stage.addEventListener(kind, (event) => this.fingers.delete(event.pointerId));
    }
    stage.addEventListener("keydown", (event) => this.key(event));
  }

  /** Return the group of buttons that zoom in and out. */
  makeButtons() {
    const button = (text, name, action) =>
      element("button", { type: "button", "aria-label": name, title: name, onclick: action }, text);
    this.less = button("−", "zoom out", () => this.by(1 / Zoom.STEP));
    this.more = button("+", "zoom in", () => this.by(Zoom.STEP));
    const group = { class: "zoom", role: "group", "aria-label": "Zoom" };
    const made = element("div", group, this.less, this.more);
    this.label();
    return made;
  }

  /** Mark buttons without effect for screen readers only, because a disabled button loses the focus. */
  label() {
    this.less.setAttribute("aria-disabled", `${this.view.size === 1}`);
    this.more.setAttribute("aria-disabled", `${this.view.size <= 1 / Zoom.MOST}`);
  }

  /** Magnify around a point. `across` and `down` are its place as fractions of the stage's sides. */
  by(factor, across = 0.5, down = 0.5) {
    const { x, y, size } = this.view;
    const next = Math.min(Math.max(size / factor, 1 / Zoom.MOST), 1);
    this.show(x + across * (size - next), y + down * (size - next), next);
  }

  /** Move the visible part. `across` and `down` are fractions of the stage's sides. */
  pan(across, down) {
    const { x, y, size } = this.view;
    this.show(x + across * size, y + down * size, size);
  }

  /** Show the part of the photo at this place, or the nearest part that is inside the photo. */
  show(x, y, size) {
    const inside = (at) => Math.min(Math.max(at, 0), 1 - size);
    this.view = { x: inside(x), y: inside(y), size };
    const zoomed = size < 1;
    this.stage.classList.toggle("zoomed", zoomed);
    if (zoomed) this.stage.tabIndex = 0; // the arrow keys move the photo
    else this.stage.removeAttribute("tabindex");
    this.label();
    this.changed(this.view);
  }

  /** Return the place of an event on the stage, as fractions of the stage's sides. */
  at(event) {
    const box = this.stage.getBoundingClientRect();
    return [(event.clientX - box.left) / box.width, (event.clientY - box.top) / box.height];
  }

  wheel(event) {
    if (!event.ctrlKey && !event.metaKey) return; // a plain wheel scrolls the page
    event.preventDefault();
    this.by(Math.exp(-event.deltaY / 200), ...this.at(event));
  }

  /** Magnify around the place, or show the whole photo at the largest magnification. */
  doubleClick(event) {
    if (this.view.size <= 1 / Zoom.MOST) this.show(0, 0, 1);
    else this.by(2, ...this.at(event));
  }

  press(event) {
    this.fingers.set(event.pointerId, this.at(event));
    this.stage.setPointerCapture(event.pointerId); // to get the event of its end too
  }

  /** Move the photo with one finger, and move and magnify it with two fingers. */
  move(event) {
    const before = this.fingers.get(event.pointerId);
    if (before === undefined || event.buttons === 0) return;
    const now = this.at(event);
    this.fingers.set(event.pointerId, now);
    const other = [...this.fingers].find(([id]) => id !== event.pointerId)?.[1];
    if (other === undefined) {
      if (this.view.size < 1) this.pan(before[0] - now[0], before[1] - now[1]);
      return;
    }
    const distance = ([a, b]) => Math.max(Math.hypot(a - other[0], b - other[1]), 0.01);
    const middle = ([a, b]) => [(a + other[0]) / 2, (b + other[1]) / 2];
    const [from, to] = [middle(before), middle(now)];
    this.by(distance(now) / distance(before), ...from);
    this.pan(from[0] - to[0], from[1] - to[1]);
  }

  key(event) {
    const steps = { ArrowLeft: [-0.2, 0], ArrowRight: [0.2, 0], ArrowUp: [0, -0.2], ArrowDown: [0, 0.2] };
    if (event.altKey || event.ctrlKey || event.metaKey) return;
    if (event.key in steps) this.pan(...steps[event.key]);
    else if (event.key === "+" || event.key === "=") this.by(Zoom.STEP);
    else if (event.key === "-") this.by(1 / Zoom.STEP);
    else return;
    event.preventDefault();
    event.stopPropagation(); // elsewhere, arrows select words
  }
}
