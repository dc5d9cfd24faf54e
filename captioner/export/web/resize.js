/* Pillow's bicubic resampling (Image.resize with Resampling.BICUBIC, 8 bits), to the last bit.

   A canvas resizes otherwise in every browser, and the caption depends on it. Pillow's filter is
   Keys' with a = -0.5, widened by the scale when it makes a photo smaller; first along the rows, then
   along the columns, with integer weights of 22 bits and bytes in between. */

const SUPPORT = 2;
const BITS = 22;

function cubic(x) {
  const a = -0.5;
  const d = Math.abs(x);
  if (d < 1) return ((a + 2) * d - (a + 3)) * d * d + 1;
  return d < 2 ? (((d - 5) * d + 8) * d - 4) * a : 0;
}

/** For every output pixel where its inputs start, and their weights. */
function weights(inputs, from, to, outputs) {
  const scale = (to - from) / outputs;
  const wide = Math.max(scale, 1);
  const support = SUPPORT * wide;
  return Array.from({ length: outputs }, (_, i) => {
    const centre = from + (i + 0.5) * scale;
    const first = Math.max(Math.trunc(centre - support + 0.5), 0);
    const count = Math.min(Math.trunc(centre + support + 0.5), inputs) - first;
    const raw = Array.from({ length: count }, (_, x) => cubic((x + first - centre + 0.5) * (1 / wide)));
    const total = raw.reduce((sum, weight) => sum + weight, 0);
    const rounded = raw.map((weight) => {
      const scaled = (total !== 0 ? weight / total : weight) * 2 ** BITS;
      return Math.trunc(scaled + (scaled < 0 ? -0.5 : 0.5));
    });
    return { first, weights: Int32Array.from(rounded) };
  });
}

const byte = (sum) => Math.min(Math.max(sum >> BITS, 0), 255);

/** Resize a part of a picture to `size` x `size` pixels.

    width, height  of the picture
    rows           (top, bottom) => RGBA bytes of these rows; called from top to bottom
    box            left, top, right and bottom of the part, in pixels

    Returns RGB bytes, row by row. */
export function resize(width, height, rows, size, [left, top, right, bottom]) {
  // As Pillow stores the box.
  const [x0, y0, x1, y1] = [left, top, right, bottom].map(Math.fround);
  const across = weights(width, x0, x1, size);
  const down = weights(height, y0, y1, size);
  const start = down[0].first;
  const stop = down[size - 1].first + down[size - 1].weights.length;
  const same = size === width && x0 === 0 && x1 === width; // Pillow leaves out what changes nothing
  const narrow = new Uint8Array((stop - start) * size * 3);
  const STRIP = 64;
  for (let y = start; y < stop; y += STRIP) {
    const end = Math.min(y + STRIP, stop);
    const strip = rows(y, end);
    for (let line = 0; line < end - y; line++) {
      const from = strip.subarray(4 * line * width, 4 * (line + 1) * width);
      const to = narrow.subarray((y - start + line) * size * 3, (y - start + line + 1) * size * 3);
      if (same) copyLine(from, to);
      else resizeLine(from, to, across);
    }
  }
  if (size === height && y0 === 0 && y1 === height) return narrow;
  const result = new Uint8Array(size * size * 3);
  const sums = new Float64Array(size * 3); // exact for these integers
  down.forEach(({ first, weights: column }, y) => {
    sums.fill(2 ** (BITS - 1));
    column.forEach((weight, i) => {
      const at = (first - start + i) * size * 3;
      for (let x = 0; x < sums.length; x++) sums[x] += weight * narrow[at + x];
    });
    for (let x = 0; x < sums.length; x++) result[y * size * 3 + x] = byte(sums[x]);
  });
  return result;
}

function copyLine(from, to) {
  for (let x = 0; 3 * x < to.length; x++) to.set(from.subarray(4 * x, 4 * x + 3), 3 * x);
}

function resizeLine(from, to, across) {
  for (let x = 0; x < across.length; x++) {
    const { first, weights: line } = across[x];
    let red = 2 ** (BITS - 1);
    let green = red;
    let blue = red;
    for (let i = 0, at = 4 * first; i < line.length; i++, at += 4) {
      const weight = line[i];
      red += weight * from[at];
      green += weight * from[at + 1];
      blue += weight * from[at + 2];
    }
    to[3 * x] = byte(red);
    to[3 * x + 1] = byte(green);
    to[3 * x + 2] = byte(blue);
  }
}
