"use strict";
/* The attention viewer. It shows one photo, its captions, and where the model looked for each word.

   new CaptionViewer(root, entry, look) fills the element `root`.
     entry  {title, image, captions: [caption.to_dict(attention=True), ...], labels: [...],
             actions: (caption) => [elements next to the caption],
             methods: {name: title}, onMethod: (name) => ...}
            `image` is a loaded <img>, and `actions` is optional. With `methods`, the reader can
            choose how the maps are computed: `onMethod` gets the maps and calls `replaceMaps`.
     look   {palette: "rrggbb" x 256 (empty: the photo's own colours), heatmap: {...},
             scale: "word" or "common", smooth: true, plain: false}
            With `plain`, the viewer shows no numbers and no legend.

   Left-out words follow the words of their caption in grey, with grey maps.
   Heatmaps are drawn exactly as in captioner/drawing/heatmap.py. Needs zoom.js. */

/** A heatmap over a photo, on a canvas. */
class Heatmap {
  static MAX_SIDE = 800; // pixels of the canvas, which CSS scales to the photo

  constructor(canvas, image, look, maxSide = Heatmap.MAX_SIDE) {
    const { naturalWidth: width, naturalHeight: height } = image;
    const shrink = Math.min(1, maxSide / Math.max(width, height));
    canvas.width = Math.max(1, Math.round(width * shrink));
    canvas.height = Math.max(1, Math.round(height * shrink));
    this.context = canvas.getContext("2d", { willReadFrequently: true });
    this.context.imageSmoothingQuality = "high";
    this.image = image;
    this.look({ x: 0, y: 0, size: 1 });
    this.frame = this.context.createImageData(canvas.width, canvas.height);
    this.frame.data.fill(255);
    this.style = look.heatmap;
    this.own = look.palette === "";
    this.colours = new Float32Array(768).fill(1);
    for (let i = 0; i < look.palette.length / 2; i++) {
      this.colours[i] = parseInt(look.palette.slice(2 * i, 2 * i + 2), 16) / 255;
    }
  }

  /** Show a part of the photo. `view` has its left, top and size as fractions of the photo. */
  look(view) {
    const { context, image } = this;
    const { width, height } = context.canvas;
    const [w, h] = [image.naturalWidth, image.naturalHeight];
    const part = [view.x * w, view.y * h, view.size * w, view.size * h];
    context.fillStyle = "#fff"; // transparent pixels are blended with white, as for the model
    context.fillRect(0, 0, width, height);
    context.drawImage(image, ...part, 0, 0, width, height);
    this.photo = context.getImageData(0, 0, width, height);
    this.view = view;
  }

  /** Return the regions along an axis as fractions of the visible part, which begins at `from`. */
  inView({ first, pitch, start, stop }, from) {
    const { size } = this.view;
    const to = (at) => (at - from) / size;
    return { first: to(first), pitch: pitch / size, start: to(start), stop: to(stop) };
  }

  /** Draw levels (Gh x Gw, 0 to 1, row-major) over the photo. `geometry` has the regions' places. */
  draw(levels, [rows, columns], geometry, smooth, grey = false) {
    const { width, height } = this.frame;
    const { view } = this;
    const down = Heatmap.sampleAxis(height, this.inView(geometry.y, view.y), rows, smooth);
    const across = Heatmap.sampleAxis(width, this.inView(geometry.x, view.x), columns, smooth);
    const line = new Float32Array(columns);
    for (let y = 0; y < height; y++) {
      const upper = down.lower[y] * columns;
      const lower = Math.min(down.lower[y] + 1, rows - 1) * columns;
      for (let c = 0; c < columns; c++) {
        line[c] = levels[upper + c] * (1 - down.part[y]) + levels[lower + c] * down.part[y];
      }
      this.drawLine(y, down.seen[y] ? line : null, across, columns);
    }
    if (grey) this.removeColours();
    this.context.putImageData(this.frame, 0, 0);
  }

  /** Draw the pixels of row y. `line` has the levels of the columns, or null outside the model's view. */
  drawLine(y, line, across, columns) {
    const { rest, lift, dim, saturation, heat, floor, outside, hatch } = this.style;
    const { width, height } = this.frame;
    const from = this.photo.data;
    const to = this.frame.data;
    const period = Math.max(4, Math.round(Math.max(width, height) / 50));
    const thick = Math.max(1, Math.floor(period / 5));
    for (let x = 0, at = 4 * y * width; x < width; x++, at += 4) {
      const r = from[at] / 255;
      const g = from[at + 1] / 255;
      const b = from[at + 2] / 255;
      const grey = 0.299 * r + 0.587 * g + 0.114 * b;
      if (line === null || !across.seen[x]) {
        const value = outside * grey + ((x + y) % period < thick ? hatch : 0);
        to[at] = to[at + 1] = to[at + 2] = (value * 255 + 0.5) | 0;
        continue;
      }
      const left = across.lower[x];
      const part = across.part[x];
      const level = line[left] * (1 - part) + line[Math.min(left + 1, columns - 1)] * part;
      let s = Math.min(Math.max(level, 0), 1);
      const entry = 3 * ((s * 255 + 0.5) | 0);
      if (this.own) s *= Math.sqrt(s);
      const added = this.own ? lift * s : heat * (floor + (1 - floor) * grey);
      const light = this.own ? rest + (1 - rest) * s : dim;
      const colour = light * (saturation + (1 - saturation) * s);
      const shade = light * grey;
      const red = shade + colour * (r - grey);
      const green = shade + colour * (g - grey);
      const blue = shade + colour * (b - grey);
      to[at] = ((red + added * this.colours[entry] * (1 - red)) * 255 + 0.5) | 0;
      to[at + 1] = ((green + added * this.colours[entry + 1] * (1 - green)) * 255 + 0.5) | 0;
      to[at + 2] = ((blue + added * this.colours[entry + 2] * (1 - blue)) * 255 + 0.5) | 0;
    }
  }

  /** Convert the drawn map to grey, like `greyed` in heatmap.py. */
  removeColours() {
    const { data } = this.frame;
    for (let at = 0; at < data.length; at += 4) {
      const grey = 0.299 * data[at] + 0.587 * data[at + 1] + 0.114 * data[at + 2];
      data[at] = data[at + 1] = data[at + 2] = (grey + 0.5) | 0;
    }
  }

  /** Return the colour scale as an element, drawn over grey. */
  bar() {
    const canvas = element("canvas", { class: "bar", width: "256", height: "1", "aria-hidden": "true" });
    const context = canvas.getContext("2d");
    context.fillStyle = this.own ? "rgb(208, 208, 208)" : "rgb(128, 128, 128)";
    context.fillRect(0, 0, 256, 1);
    const { photo, frame } = this;
    this.photo = context.getImageData(0, 0, 256, 1);
    this.frame = context.createImageData(256, 1);
    this.frame.data.fill(255);
    const levels = Float32Array.from({ length: 256 }, (_, x) => x / 255);
    const even = { first: 1 / 512, pitch: 1 / 256, start: 0, stop: 1 };
    this.drawLine(0, levels, Heatmap.sampleAxis(256, even, 256, false), 256);
    context.putImageData(this.frame, 0, 0);
    Object.assign(this, { photo, frame });
    return canvas;
  }

  /** Return the least value and the share of the strongest tenth, like `most_attended` in heatmap.py. */
  static tenth(map) {
    const most = [...map].sort((a, b) => b - a).slice(0, Math.max(1, Math.round(map.length / 10)));
    return { level: most.at(-1), focus: total(most) / (total(map) || 1) };
  }

  /** Return the place of each pixel's centre among the regions of an axis, like `samples` in geometry.py. */
  static sampleAxis(pixels, { first, pitch, start, stop }, cells, smooth) {
    const lower = new Int32Array(pixels);
    const part = new Float32Array(pixels);
    const seen = new Uint8Array(pixels);
    for (let i = 0; i < pixels; i++) {
      const point = (i + 0.5) / pixels;
      let sample = Math.min(Math.max((point - first) / pitch, 0), cells - 1);
      if (!smooth) sample = Math.floor(sample + 0.5);
      lower[i] = Math.floor(sample);
      part[i] = sample - lower[i];
      seen[i] = point >= start && point < stop ? 1 : 0;
    }
    return { lower, part, seen };
  }
}

/** Create an element with attributes and children. Strings become text, never markup. */
function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value !== null && value !== false) made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children);
  return made;
}

function total(values) {
  return values.reduce((a, b) => a + b, 0);
}

function percent(share) {
  const value = 100 * share;
  if (value > 0 && value < 0.01) return "<0.01%";
  return `${value >= 9.95 || value === 0 ? value.toFixed(0) : value.toPrecision(2)}%`;
}

const END_NAME = "<end>"; // captioner.caption_types.END_NAME
const wordName = (word) => (word === END_NAME ? "end of the sentence" : word);

/** Return the left-out words of a caption, in grey, like `_left_out` in pages.py. */
function leftOut({ left_out: rest }) {
  if (!rest) return [];
  const name = element("span", { class: "hidden-text" }, "left out: ");
  return [" ", element("span", { class: "left-out" }, name, rest.text)];
}

/** Return whether a person has corrected the caption, and it differs from the words with maps. */
const writtenOtherwise = ({ corrected, text, words }) => Boolean(corrected) && words.join(" ") !== text;

/** Return the caption with its left-out words after the first `said` words, like `Caption.whole`. */
function whole(caption) {
  const said = caption.words.length;
  const rest = caption.left_out;
  if (!rest?.alphas) return { ...caption, said };
  const lists = ["words", "log_probs", "gates", "alphas"].map((key) => [key, [...caption[key], ...rest[key]]]);
  const truth = [...(caption.truth ?? caption.words.map(() => null)), ...rest.truth];
  return { ...caption, ...Object.fromEntries(lists), truth, said };
}

/** Return each caption with its left-out words, then its keywords, like `Caption.of_keywords`. */
function shownCaptions(captions) {
  return captions.flatMap((caption, number) => {
    const first = { ...whole(caption), number };
    const found = (caption.keywords ?? []).filter(({ map }) => map);
    if (found.length === 0) return [first];
    const words = found.map(({ word }) => word);
    const keywords = {
      text: words.join(", "),
      words,
      said: words.length,
      log_probs: found.map(({ probability }) => Math.log(probability)),
      gates: [],
      alphas: found.map(({ map }) => shares(map)),
      geometry: caption.geometry,
      method: "keywords",
    };
    return [first, keywords];
  });
}

/** Convert a map of log-odds to shares of the odds. */
function shares(map) {
  const largest = Math.max(...map.flat());
  const odds = map.map((row) => row.map((value) => Math.exp(value - largest)));
  const sum = total(odds.flat());
  return odds.map((row) => row.map((value) => value / sum));
}

class CaptionViewer {
  static WORD_MS = 900; // milliseconds per word while playing
  static TRANSITION_MS = 350; // milliseconds from one map to the next

  constructor(root, entry, look) {
    const shown = shownCaptions(entry.captions);
    this.captions = shown.filter((caption) => caption.words.length > 0);
    this.smooth = look.smooth;
    this.plain = look.plain;
    this.common = look.scale === "common"; // one scale for all words of a method
    this.closedGate = look.closed_gate;
    this.doubtfulBelow = look.doubtful_below;
    this.doubtfulTruth = look.doubtful_truth;
    this.selected = null; // {caption, start, end} for words start to end inclusive, or null: the photo
    this.timer = null;
    this.reducedMotion = matchMedia("(prefers-reduced-motion: reduce)");
    this.build(root, entry, shown);
    this.heatmap = new Heatmap(this.canvas, entry.image, look);
    this.fillLegend();
    this.select(null, false);
  }

  /* --- elements -------------------------------------------------------------------------------- */

  build(root, entry, shown) {
    const { naturalWidth: width, naturalHeight: height } = entry.image;
    this.canvas = element("canvas", { "aria-hidden": "true" });
    const { src, alt } = entry.image;
    this.photo = element("img", { src, alt, width, height, draggable: "false" });
    const stage = { class: "stage", role: "group", "aria-label": "Photo" };
    this.stage = element("div", stage, this.photo, this.canvas);
    this.zoom = new Zoom(this.stage, (view) => this.look(view));
    for (const kind of ["pointermove", "pointerdown"]) {
      this.stage.addEventListener(kind, (event) => this.probeAt(event));
    }
    this.stage.addEventListener("pointerleave", () => this.clearProbe());
    this.lists = this.captions.map((caption, number) => this.wordList(caption, number));
    const sentences = shown.map((caption) => {
      const { number } = caption; // undefined for keywords
      const own = entry.labels?.[number] ?? (entry.captions.length > 1 ? `${number + 1}` : "");
      const label = number === undefined ? "keywords" : own;
      const sum = element("span", { class: "total" }, this.figures(caption));
      const actions = entry.actions?.(caption) ?? [];
      const head = element("div", { class: "label" }, element("span", {}, label), sum, ...actions);
      const list = this.lists[this.captions.indexOf(caption)];
      const nothing = caption.corrected ? [] : [element("p", { class: "quiet" }, "No words, so no attention to show.")];
      const words = list ? [list] : nothing;
      const text = writtenOtherwise(caption) ? [element("p", { class: "chosen" }, caption.text)] : [];
      return element("div", { class: "sentence" }, head, ...text, ...words, ...this.phrases(caption));
    });
    this.details = element("div", { class: "details" });
    this.announcement = element("div", { class: "hidden-text", "aria-live": "polite" });
    this.probe = element("p", { class: "probe" });
    this.legend = element("div", { class: "legend" });
    this.side = element(
      "div",
      { class: "side" },
      ...sentences,
      this.controls(entry),
      this.details,
      this.legend,
      this.announcement,
    );
    const under = element("div", { class: "under" }, this.probe, this.zoom.buttons);
    const view = element("div", { class: "view" }, this.stage, under);
    root.replaceChildren(view, this.side);
    root.classList.add("viewer");
    root.classList.toggle("wide", width > 1.9 * height);
    root.style.setProperty("--aspect", `${width / height}`);
    root.style.setProperty("--photo-width", `${width}px`);
  }

  /** Return how sure the model is, with the `confidence` (0 to 1) if the caption has one. */
  figures({ confidence, log_prob: log }) {
    const sure = typeof confidence === "number" ? `${percent(confidence)} likely to be right, ` : "";
    if (log === undefined) return ""; // keywords have no log-probability
    return `${sure}log p ${log.toFixed(1)}`;
  }

  /** Return one line with the chance of each phrase to be true, or nothing if it is unknown. */
  phrases({ phrases = [], left_out: rest }) {
    const known = [...phrases, ...(rest?.phrases ?? [])].filter(({ truth }) => truth !== null);
    const texts = known.map(({ text, truth }) => `${text} ${percent(truth)}`);
    return texts.length > 0 ? [element("p", { class: "quiet" }, `chance of being true: ${texts.join(" · ")}`)] : [];
  }

  /** Return the lowest chance to be true of some words, as in `phrases_of`, or null if it is unknown. */
  truth({ caption, start, end }) {
    const known = (this.captions[caption].truth ?? []).slice(start, end + 1).filter((truth) => truth !== null);
    return known.length > 0 ? Math.min(...known) : null;
  }

  /** Return the list of a caption's words, from which the user selects. */
  wordList(caption, number) {
    const { said: count } = caption;
    const list = element("div", {
      role: "listbox",
      class: "words",
      "aria-label": `Words of the caption: ${caption.text}`,
      "aria-multiselectable": "true",
      "aria-orientation": "horizontal",
    });
    const option = (text, label, where, extra = "", title = null) =>
      element(
        "span",
        {
          role: "option",
          class: `word ${extra}`,
          tabindex: "-1",
          "aria-label": label,
          "aria-selected": "false",
          title,
          onpointerenter: (event) => event.pointerType === "mouse" && this.show(where),
          onpointerdown: (event) => this.press(event, where),
        },
        text,
      );
    caption.words.forEach((word, index) => {
      const left = index >= count;
      const doubtful = caption.doubtful?.includes(index);
      const where = { caption: number, start: index, end: index };
      const chance = caption.truth?.[index] ?? null;
      const notes = [...(left ? ["left out"] : []), ...(chance === null ? [] : [`${percent(chance)} likely to be true`])];
      const place = left ? [] : [`word ${index + 1} of ${count}`];
      const probability = this.plain ? [] : [`probability ${percent(Math.exp(caption.log_probs[index]))}`];
      const label = [word, ...place, ...probability, ...notes, ...(doubtful ? ["doubtful"] : [])].join(", ");
      const kind = left ? "left-out" : doubtful ? "doubtful" : "";
      list.append(option(word, label, where, kind, notes.join(", ") || null));
    });
    list.append(option("all words", "all words together", this.all(caption, number), "all"));
    list.addEventListener("pointerleave", () => this.show(this.selected));
    list.addEventListener("pointermove", (event) => this.drag(event, list, number));
    list.addEventListener("keydown", (event) => this.key(event));
    return list;
  }

  /** Return the selection of all words of a caption, or of its left-out words if it has no others. */
  all({ said, words }, number) {
    return { caption: number, start: 0, end: (said || words.length) - 1, all: true };
  }

  /** Show maps of the same captions that another method has computed. */
  replaceMaps(captions) {
    this.captions = shownCaptions(captions).filter((caption) => caption.words.length > 0);
    this.fillLegend();
    this.nameMethod(this.method(0));
    this.show(this.selected);
    this.announcement.textContent = `maps: ${this.chosen.selectedOptions[0].textContent}`;
  }

  /** Show a method in the selector of methods. */
  nameMethod(method) {
    this.chosen.value = method;
  }

  methodSelector({ methods, onMethod }) {
    const options = Object.entries(methods).map(([value, title]) => element("option", { value }, title));
    this.chosen = element("select", { onchange: () => onMethod(this.chosen.value) }, ...options);
    this.nameMethod(this.method(0));
    return element("label", {}, "Maps ", this.chosen);
  }

  controls(entry) {
    this.button = element("button", { type: "button", class: "play", onclick: () => this.toggle() });
    this.label(false);
    this.opacity = element("input", { type: "range", min: "0", max: "100", value: "100" });
    this.opacity.addEventListener("input", () => {
      this.canvas.style.opacity = `${Number(this.opacity.value) / 100}`;
    });
    const smooth = element("input", { type: "checkbox", checked: this.smooth });
    smooth.addEventListener("change", () => {
      this.smooth = smooth.checked;
      this.draw();
    });
    const common = element("input", { type: "checkbox", checked: this.common });
    common.addEventListener("change", () => {
      this.common = common.checked;
      this.fillLegend();
      if (this.shown) this.show(this.shown);
    });
    this.several = element("input", { type: "checkbox" });
    return element(
      "div",
      { class: "controls", hidden: this.captions.length === 0 },
      ...(entry.methods && this.captions.length > 0 ? [this.methodSelector(entry)] : []),
      this.button,
      element("label", {}, "Heatmap ", this.opacity),
      element("label", {}, smooth, " Smooth"),
      element("label", {}, common, " One scale for all words"),
      element("label", { class: "by-touch" }, this.several, " Select several words"),
    );
  }

  /** Write the legend: the scale of the maps (for each word, or for each method) and notes. */
  fillLegend() {
    const methods = this.methods();
    this.tops = Object.fromEntries(methods.map((method) => [method, this.scale(method)]));
    const kind = methods.every((method) => method === "attention") ? "attention" : "relevance";
    const each = (share) => [...new Set(this.captions.map((_, n) => percent(share(this.cells(n)))))].join(", ");
    this.legend.replaceChildren();
    if (this.plain) return;
    const add = (text, end) => {
      const bar = element("div", {}, this.heatmap.bar());
      this.legend.append(element("span", {}, text), element("div", { class: "scale" }, "0", bar, end));
    };
    for (const method of this.common ? methods : []) {
      const name = methods.length > 1 ? `${method.replaceAll("_", " ")}: ` : "";
      const uniform = each((cells) => 1 / cells);
      const text = `${name}share of ${kind} per region, one scale for all words (spread evenly: ${uniform})`;
      add(text, `≥ ${percent(this.tops[method])}`);
    }
    if (!this.common && methods.length > 0) {
      const even = each((cells) => Heatmap.tenth(new Array(cells).fill(1 / cells)).focus);
      const focus = `focus: share of ${kind} on the strongest tenth of the map (spread evenly: ${even})`;
      add(`each word on its own scale; ${focus}`, "strongest tenth");
    }
    const doubtful = this.captions.filter(({ doubtful }) => doubtful?.length);
    const note = (text) => this.legend.append(element("div", {}, text));
    if (doubtful.some(({ truth }) => !truth)) {
      note(`wavy underline: doubtful word (probability below ${percent(this.doubtfulBelow)})`);
    }
    if (doubtful.some(({ truth }) => truth)) {
      note(`wavy underline: doubtful word (less than ${percent(this.doubtfulTruth)} likely to be true)`);
    }
    if (this.captions.some(({ said, words }) => said < words.length)) {
      note("grey words: left out of the caption, as they may not be true");
    }
  }

  /* --- numbers --------------------------------------------------------------------------------- */

  grid(caption) {
    const { alphas } = this.captions[caption];
    return [alphas[0].length, alphas[0][0].length];
  }

  cells(caption) {
    const [rows, columns] = this.grid(caption);
    return rows * columns;
  }

  /** Return the method that computed the maps of a caption, as in `Caption.method`. */
  method(number) {
    return this.captions[number].method ?? "attention";
  }

  methods() {
    return [...new Set(this.captions.map((_, number) => this.method(number)))];
  }

  /** Return the value of a map that is drawn brightest, like `shared_scale` in heatmap.py. */
  top(map, caption) {
    if (this.common) return this.tops[this.method(caption)];
    return Math.max(Heatmap.tenth(map).level, Math.min(1, 2 / map.length));
  }

  /** Return the value that is drawn brightest in all maps of a method, like `shared_scale` in heatmap.py. */
  scale(method) {
    let top = 0;
    for (const [number, { alphas }] of this.captions.entries()) {
      if (this.method(number) !== method) continue;
      top = Math.max(top, Math.min(1, 2 / this.cells(number)));
      const closed = this.closed(number);
      const open = alphas.filter((_, i) => !closed[i]);
      for (const map of open) top = Math.max(top, Heatmap.tenth(map.flat()).level);
    }
    return top || 1;
  }

  /** Return which words have a nearly closed gate, like `closed_words` in heatmap.py. */
  closed(number) {
    const attention = this.method(number) === "attention";
    const closed = this.captions[number].gates.map((gate) => attention && gate < this.closedGate);
    return closed.every(Boolean) ? closed.map(() => false) : closed;
  }

  /** Return the mean map of the words, row-major. */
  map({ caption, start, end }) {
    const maps = this.captions[caption].alphas.slice(start, end + 1).map((alpha) => alpha.flat());
    return maps[0].map((_, i) => maps.reduce((sum, map) => sum + map[i], 0) / maps.length);
  }

  /** Return whether the caption leaves out all of these words. */
  isLeftOut({ caption, start }) {
    return start >= this.captions[caption].said;
  }

  /** Describe where the map of the selected words is strongest. */
  peak(where) {
    const map = this.map(where);
    const [rows, columns] = this.grid(where.caption);
    const most = Math.max(...map);
    if (most === 0) return "no region supports the word";
    if (most * map.length < 1.8 * total(map)) return "spread evenly over the photo";
    const at = map.indexOf(most);
    const { geometry } = this.captions[where.caption];
    const third = (index, { first, pitch, start, stop }) =>
      Math.min(Math.max(Math.floor((3 * (first + index * pitch - start)) / (stop - start)), 0), 2);
    const row = third(Math.floor(at / columns), geometry.y);
    const down = ["at the top", "in the middle", "at the bottom"][row];
    const across = ["left", "centre", "right"][third(at % columns, geometry.x)];
    const area = down === "in the middle" && across === "centre" ? "in the centre" : `${down} ${across}`;
    return this.plain ? `strongest ${area}` : `strongest ${area}, focus ${percent(Heatmap.tenth(map).focus)}`;
  }

  /* --- display --------------------------------------------------------------------------------- */

  /** Select words. With `announce`, screen readers announce the selection. */
  select(where, announce = true) {
    this.selected = where;
    this.lists.forEach((list, number) => {
      [...list.children].forEach((option, index) => {
        const all = index === list.children.length - 1;
        const inside = where?.caption === number && index >= where.start && index <= where.end;
        const selected = Boolean(where?.all ? all && where.caption === number : !all && inside);
        option.setAttribute("aria-selected", `${selected}`);
        option.tabIndex = this.focusable(where, number, index, all) ? 0 : -1;
      });
    });
    this.show(where);
    if (announce) {
      this.announcement.textContent = where === null ? "photo without heatmap" : this.summary(where);
    }
  }

  /** Return whether the Tab key reaches this option. It reaches one option in each list. */
  focusable(where, number, index, all) {
    if (where?.caption !== number) return index === 0;
    return where.all ? all : index === (where.other ?? where.end) && !all;
  }

  /** Show the map of words without selecting them, for example under the pointer. */
  show(where) {
    this.shown = where;
    this.lists.flatMap((list) => [...list.children]).forEach((o) => o.classList.remove("shown"));
    if (where !== null) this.option(where).classList.add("shown");
    this.stage.classList.toggle("plain", where === null);
    this.showDetails(where);
    if (where !== null) this.moveTo(this.map(where), where);
  }

  /** Return the option that has the focus when these words are selected. */
  option({ caption, end, other, all }) {
    const { children } = this.lists[caption];
    return children[all ? children.length - 1 : (other ?? end)];
  }

  words({ caption, start, end, all }) {
    return all ? "all words" : this.captions[caption].words.slice(start, end + 1).join(" ");
  }

  summary(where) {
    return `${this.words(where)}: ${this.note(where)}`;
  }

  note(where) {
    return `${this.isLeftOut(where) ? "left out of the caption; " : ""}${this.peak(where)}`;
  }

  showDetails(where) {
    if (where === null) {
      if (this.captions.length === 0) return;
      const how = matchMedia("(pointer: coarse)").matches
        ? "Tap a word, or slide over several words,"
        : "Hover over a word, or use the arrow keys (Shift extends the selection, Space plays),";
      const hint = `${how} to see where the model looked.`;
      this.details.replaceChildren(element("p", { class: "quiet" }, hint));
      return;
    }
    if (this.plain) {
      this.details.replaceChildren(element("p", { class: "chosen" }, this.words(where)));
      return;
    }
    const caption = this.captions[where.caption];
    const log = total(caption.log_probs.slice(where.start, where.end + 1));
    const gates = caption.gates.slice(where.start, where.end + 1);
    const gate = total(gates) / gates.length;
    const several = where.end > where.start;
    const truth = this.truth(where);
    this.details.replaceChildren(
      element("p", { class: "chosen" }, this.words(where), element("small", {}, this.note(where))),
      ...(gates.length > 0 || !several // keywords have no gates, and no joint probability
        ? [this.meter(several ? "joint probability" : "probability", Math.exp(log), "p")]
        : []),
      ...(gates.length > 0 ? [this.meter(several ? "mean gate" : "gate (use of photo)", gate, "β")] : []),
      ...(truth === null ? [] : [this.meter("likely to be true", truth, "p")]),
    );
    const others = several ? undefined : caption.alternatives?.[where.start];
    if (others?.length) this.details.append(this.choices(others, caption.words[where.start]));
  }

  meter(name, value, letter) {
    const fill = element("i");
    fill.style.width = `${100 * Math.min(Math.max(value, 0), 1)}%`;
    return element(
      "div",
      { class: `meter ${letter === "p" ? "probability" : "gate"}` },
      element("span", {}, name),
      element("span", { class: "track" }, fill),
      element("b", {}, letter === "p" ? percent(value) : `β ${value.toFixed(2)}`),
    );
  }

  /** Return a list of the most probable words at this position. */
  choices(others, chosen) {
    const rows = others.map(({ word, log_prob: log }) => {
      const fill = element("i");
      fill.style.width = `${100 * Math.exp(log)}%`;
      return element(
        "li",
        { class: word === chosen ? "current" : null },
        element("span", {}, wordName(word)),
        element("span", { class: "track" }, fill),
        element("b", {}, percent(Math.exp(log))),
      );
    });
    const title = element("p", { class: "quiet" }, "most probable words at this position");
    return element("div", { class: "choices" }, title, element("ol", {}, ...rows));
  }

  /** Change the heatmap gradually from the current map to this map. */
  moveTo(map, where) {
    const { caption } = where;
    const top = this.top(map, caption);
    const target = Float32Array.from(map, (value) => value / top);
    const from = this.levels?.length === target.length ? this.levels : null;
    this.caption = caption;
    this.grey = this.isLeftOut(where);
    cancelAnimationFrame(this.moving);
    if (from === null || this.reducedMotion.matches) {
      this.levels = target;
      this.draw();
      return;
    }
    const started = performance.now();
    const step = (now) => {
      const part = Math.min(Math.max((now - started) / CaptionViewer.TRANSITION_MS, 0), 1);
      const eased = part * part * (3 - 2 * part);
      this.levels = target.map((value, i) => from[i] + (value - from[i]) * eased);
      this.draw();
      if (part < 1) this.moving = requestAnimationFrame(step);
    };
    this.moving = requestAnimationFrame(step);
  }

  /** Show the part of the photo that `Zoom` selects. */
  look({ x, y, size }) {
    this.photo.style.transform = `scale(${1 / size}) translate(${-100 * x}%, ${-100 * y}%)`;
    this.heatmap.look({ x, y, size });
    this.draw();
  }

  draw() {
    if (!this.levels) return;
    const { geometry } = this.captions[this.caption];
    this.heatmap.draw(this.levels, this.grid(this.caption), geometry, this.smooth, this.grey);
  }

  /* --- input ----------------------------------------------------------------------------------- */

  press(event, where) {
    event.preventDefault();
    event.target.releasePointerCapture?.(event.pointerId); // so that a finger can slide on to other words
    this.stop();
    const { selected } = this;
    this.pressed = where.start;
    this.slid = false;
    const extend = event.shiftKey || this.several.checked;
    if (extend && selected && !selected.all && selected.caption === where.caption && !where.all) {
      const anchor = selected.anchor ?? selected.start;
      where = this.span(where.caption, anchor, where.start);
    }
    this.select(where);
    this.option(where).focus({ preventScroll: true });
  }

  /** Select one or several words by sliding a finger over them. A mouse hovers instead. */
  drag(event, list, caption) {
    if (event.pointerType === "mouse" || event.buttons === 0) return;
    const under = document.elementFromPoint(event.clientX, event.clientY);
    const index = [...list.children].indexOf(under);
    if (index < 0 || index >= this.captions[caption].words.length) return;
    const { selected } = this;
    const at = this.several.checked ? this.span(caption, this.pressed, index) : null;
    if (at && !this.slid && index === this.pressed) return; // still the word that was tapped
    if (selected?.caption === caption && (selected.other ?? selected.end) === index) return;
    this.slid = true;
    this.select(at ?? { caption, start: index, end: index });
  }

  /** Return the selection from the word where it began (`anchor`) to another word. */
  span(caption, anchor, other) {
    return { caption, anchor, start: Math.min(anchor, other), end: Math.max(anchor, other), other };
  }

  /** Handle a key. Outside the words (`elsewhere`), keys that scroll are left to the page. */
  key(event, elsewhere = false) {
    if (event.altKey || event.ctrlKey || event.metaKey) return;
    const sideways = { ArrowLeft: -1, ArrowRight: 1 };
    const steps = elsewhere ? sideways : { ...sideways, ArrowUp: -1, ArrowDown: 1, Home: -1e9, End: 1e9 };
    if (event.key in steps) this.move(steps[event.key], event.shiftKey);
    else if (event.key === " ") this.toggle();
    else if (event.key === "Escape" && this.selected !== null) this.select(null);
    else return;
    event.preventDefault();
    event.stopPropagation();
    this.stop(event.key === " ");
  }

  /** Move the selection by `step` words, or extend it. */
  move(step, extend) {
    if (this.captions.length === 0) return;
    const at = this.selected ?? { caption: 0, start: 0, end: 0 };
    const last = this.captions[at.caption].words.length - 1;
    const clip = (index, most) => Math.min(Math.max(index, 0), most);
    let where;
    if (this.selected === null) where = at;
    else if (extend && !at.all) {
      const anchor = at.anchor ?? at.start;
      where = this.span(at.caption, anchor, clip((at.other ?? at.end) + step, last));
    } else {
      const index = clip((at.all ? last + 1 : at.other ?? at.end) + step, last + 1);
      const all = index > last;
      where = all
        ? this.all(this.captions[at.caption], at.caption)
        : { caption: at.caption, start: index, end: index };
    }
    this.select(where);
    this.option(where).focus({ preventScroll: true });
  }

  toggle() {
    if (this.timer !== null) this.stop();
    else this.play();
  }

  /** Select word after word, from the selected word on. If it is the last word, begin with the first. */
  play() {
    if (this.captions.length === 0) return;
    const caption = this.selected?.caption ?? 0;
    const last = this.captions[caption].words.length - 1;
    const at = this.selected;
    let index = at === null || at.all || at.end === last ? 0 : at.end;
    const next = () => {
      this.select({ caption, start: index, end: index }, false);
      index += 1;
      if (index > last) {
        this.stop();
        this.announcement.textContent = this.captions[caption].text;
      }
    };
    this.label(true);
    this.timer = setInterval(next, CaptionViewer.WORD_MS);
    next();
  }

  stop(keep = false) {
    if (keep || this.timer === null) return;
    clearInterval(this.timer);
    this.timer = null;
    this.label(false);
  }

  label(playing) {
    this.button.textContent = playing ? "❚❚" : "▶";
    this.button.setAttribute("aria-label", playing ? "pause" : "play the sentence word by word");
    this.button.title = playing ? "pause" : "play";
  }

  /** Show which words attend to the region under the pointer. */
  probeAt(event) {
    if (this.captions.length === 0) return;
    const box = this.stage.getBoundingClientRect();
    const { view } = this.zoom;
    const x = view.x + (view.size * (event.clientX - box.left)) / box.width;
    const y = view.y + (view.size * (event.clientY - box.top)) / box.height;
    const number = this.shown?.caption ?? 0;
    const { geometry, alphas } = this.captions[number];
    const [rows, columns] = this.grid(number);
    const nearest = (at, { first, pitch, start, stop }, cells) =>
      at < start || at >= stop
        ? null
        : Math.min(Math.max(Math.floor((at - first) / pitch + 0.5), 0), cells - 1);
    const row = nearest(y, geometry.y, rows);
    const column = nearest(x, geometry.x, columns);
    if (row === null || column === null) {
      this.clearProbe();
      this.probe.textContent = "not seen by the model";
      return;
    }
    const most = Math.max(...alphas.map((alpha) => alpha[row][column]));
    [...this.lists[number].children].forEach((option, index) => {
      const share = alphas[index]?.[row]?.[column] ?? 0;
      option.style.setProperty("--share", `${share / (most || 1)}`);
      option.classList.toggle("probed", index < alphas.length);
    });
    const best = alphas.findIndex((alpha) => alpha[row][column] === most);
    const left = this.isLeftOut({ caption: number, start: best });
    const word = `“${this.captions[number].words[best]}”${left ? " (left out)" : ""}`;
    const [verb, kind] =
      this.method(number) === "attention"
        ? ["attends most here", "attention"]
        : ["depends most on this region", "relevance"];
    this.probe.textContent = `${word} ${verb}${this.plain ? "" : ` (${percent(most)} of its ${kind})`}`;
  }

  clearProbe() {
    this.probe.textContent = "";
    this.lists.flatMap((list) => [...list.children]).forEach((o) => o.classList.remove("probed"));
  }
}
