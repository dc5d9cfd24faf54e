"use strict";
/* A figure of the viewer's selection, for download: the photo with its heatmap, the caption with the
   selected words in bold, and the scale. Without a selection, it has a panel for every word. Left-out
   words and their maps are grey.

   The figure is a list of shapes, {picture} or {text} with their places in pixels. It is drawn on a
   canvas (PNG) or written as SVG. */
class Figure {
  static FONT = 'system-ui, "Segoe UI", Roboto, "DejaVu Sans", sans-serif';
  static GAP = 16;

  constructor(viewer, look) {
    Object.assign(this, { viewer, look, shapes: [], pen: document.createElement("canvas").getContext("2d") });
    const { selected } = viewer;
    const caption = selected?.caption ?? 0;
    const { words } = viewer.captions[caption];
    this.method = viewer.method?.(caption) ?? "attention"; // the method of the maps
    this.most = viewer.common ? `≥ ${percent(viewer.scale(this.method))}` : "strongest tenth";
    const each = words.map((_, index) => ({ caption, start: index, end: index }));
    const all = selected === null;
    this.columns = all ? Math.min(4, words.length) : 1;
    this.panel = this.panelSize(all ? 360 : 1000);
    this.width = this.columns * (this.panel.width + Figure.GAP) + Figure.GAP;
    this.y = Figure.GAP;
    this.text = viewer.captions[caption].text;
    if (all) this.sheet(each);
    else this.picture(Figure.GAP, this.y, this.render(selected));
    this.y += all ? 0 : this.panel.height + Figure.GAP;
    this.sentence(each, selected);
    this.scale();
    this.height = Math.ceil(this.y);
  }

  /** Size of a panel with a longer side of `side` pixels. */
  panelSize(side) {
    const { naturalWidth: width, naturalHeight: height } = this.viewer.photo;
    // A small photo is enlarged, so that the text fits below it.
    const scale = side / Math.max(width, height);
    return { width: Math.round(width * scale), height: Math.round(height * scale) };
  }

  /** The photo with the heatmap of some words. */
  render(where) {
    const { viewer } = this;
    const canvas = document.createElement("canvas");
    const heatmap = new Heatmap(canvas, viewer.photo, this.look, Math.max(this.panel.width, this.panel.height));
    const map = viewer.map(where);
    const top = viewer.top(map, where.caption);
    const levels = Float32Array.from(map, (value) => value / top);
    const { geometry } = viewer.captions[where.caption];
    heatmap.draw(levels, viewer.grid(where.caption), geometry, viewer.smooth, viewer.isLeftOut(where));
    return canvas;
  }

  sheet(each) {
    each.forEach((where, index) => {
      const x = Figure.GAP + (index % this.columns) * (this.panel.width + Figure.GAP);
      this.picture(x, this.y, this.render(where));
      const focus = `focus ${percent(Heatmap.tenth(this.viewer.map(where)).focus)}`;
      this.label(x, this.y + this.panel.height + 22, this.viewer.words(where), 16, true, this.colour(where));
      const left = x + this.panel.width - this.measure(focus, 13, false);
      this.label(left, this.y + this.panel.height + 22, focus, 13, false, "#5b5b67");
      const last = index % this.columns === this.columns - 1 || index === each.length - 1;
      if (last) this.y += this.panel.height + 22 + Figure.GAP;
    });
  }

  picture(x, y, canvas) {
    this.shapes.push({ picture: canvas, x, y, ...this.panel });
  }

  label(x, y, text, size, bold = false, fill = "#14141b") {
    this.shapes.push({ text, x, y, size, weight: bold ? "700" : "400", fill });
  }

  /** The colour of words: grey if the caption leaves them out. */
  colour(where) {
    return this.viewer.isLeftOut(where) ? "#5b5b67" : "#14141b";
  }

  measure(text, size, bold) {
    this.pen.font = `${bold ? 700 : 400} ${size}px ${Figure.FONT}`;
    return this.pen.measureText(text).width;
  }

  /** The words of the caption, wrapped. */
  sentence(each, selected) {
    const size = 20;
    let x = Figure.GAP;
    this.y += size;
    const caption = this.viewer.captions[each[0].caption];
    const written = writtenOtherwise(caption) ? caption.text.split(/\s+/) : null;
    (written ?? each).forEach((part, index) => {
      const word = written ? part : this.viewer.words(part);
      const bold = !written && selected !== null && index >= selected.start && index <= selected.end;
      const wide = this.measure(word, size, bold);
      const joined = index > 0 && /^('|n't$)/.test(word); // such as 's
      if (joined) x -= this.measure(" ", size, false);
      if (!joined && x > Figure.GAP && x + wide > this.width - Figure.GAP) {
        x = Figure.GAP;
        this.y += 1.4 * size;
      }
      this.label(x, this.y, word, size, bold, bold ? "#b8430f" : this.colour(written ? each[0] : part));
      x += wide + this.measure(" ", size, false);
    });
    this.y += Figure.GAP;
  }

  scale() {
    const size = 13;
    const wide = Math.min(240, this.width - 2 * Figure.GAP - 80);
    const kind = this.method === "attention" ? "attention" : "relevance";
    this.label(Figure.GAP, this.y + 12, "0", size, false, "#5b5b67");
    const x = Figure.GAP + 14;
    this.shapes.push({ picture: this.viewer.heatmap.bar(), x, y: this.y, width: wide, height: 12 });
    this.label(x + wide + 6, this.y + 12, this.most, size, false, "#5b5b67");
    const note = this.viewer.common
      ? `share of ${kind} per region`
      : `each word on its own scale; focus: share of ${kind} on the strongest tenth`;
    this.label(Figure.GAP, this.y + 34, note, size, false, "#5b5b67");
    this.y += 34 + Figure.GAP;
  }

  async png() {
    const canvas = document.createElement("canvas");
    canvas.width = this.width;
    canvas.height = this.height;
    const context = canvas.getContext("2d");
    context.fillStyle = "#fff";
    context.fillRect(0, 0, this.width, this.height);
    context.imageSmoothingQuality = "high";
    for (const shape of this.shapes) {
      if (shape.picture) {
        context.drawImage(shape.picture, shape.x, shape.y, shape.width, shape.height);
        continue;
      }
      context.font = `${shape.weight} ${shape.size}px ${Figure.FONT}`;
      context.fillStyle = shape.fill;
      context.fillText(shape.text, shape.x, shape.y);
    }
    return new Promise((resolve) => canvas.toBlob(resolve, "image/png"));
  }

  svg() {
    const { width, height } = this;
    const make = (tag, attributes, text = "") => {
      const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
      for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
      made.textContent = text;
      return made;
    };
    const frame = { viewBox: `0 0 ${width} ${height}`, width, height, "font-family": Figure.FONT };
    const root = make("svg", { ...frame, role: "img" });
    root.append(make("title", {}, this.text), make("rect", { width, height, fill: "#fff" }));
    for (const { picture, text, size, weight, ...place } of this.shapes) {
      const href = picture?.toDataURL(picture.height === 1 ? "image/png" : "image/jpeg", 0.92);
      root.append(
        picture
          ? make("image", { ...place, href, preserveAspectRatio: "none" })
          : make("text", { ...place, "font-size": size, "font-weight": weight }, text),
      );
    }
    return new Blob([new XMLSerializer().serializeToString(root)], { type: "image/svg+xml" });
  }
}
