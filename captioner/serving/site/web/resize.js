/* Pillow's bicubic resampling (Image.resize with Resampling.BICUBIC, 8 bits), to the last bit.

   Every browser resizes a canvas differently, and the caption depends on it. Pillow uses Keys' filter
   with a = -0.5, widened by the scale when it makes a photo smaller. It filters first along the rows,
   then along the columns, with integer weights of 22 bits, and stores bytes in between. Since version
   13, Pillow filters along the columns first if the height shrinks by more than twice as many pixels as
   the width. This order rounds differently. */

const SUPPORT = 2;
const BITS = 22;

function cubic(x) {
  const a = -0.5;
  const d = Math.abs(x);
  if (d < 1) return ((a + 2) * d - (a + 3)) * d * d + 1;
  return d < 2 ? (((d - 5) * d + 8) * d - 4) * a : 0;
}

/** For each output pixel, the index of its first input pixel and the weights of its input pixels. */
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
  // Pillow stores the box in 32-bit floats.
  const [x0, y0, x1, y1] = [left, top, right, bottom].map(Math.fround);
  // Pillow skips an axis that does not change.
  const across = size === width && x0 === 0 && x1 === width ? null : weights(width, x0, x1, size);
  const down = size === height && y0 === 0 && y1 === height ? null : weights(height, y0, y1, size);
  const columnsFirst = across && down && height > size && height - size > 2 * (width - size);
  return columnsFirst
    ? resizeRows(resizeColumns(width, height, rows, down), width, size, across)
    : rowsFirst(width, height, rows, size, across, down);
}

/** Resize along the rows first. Only the rows that the columns need are resized. */
function rowsFirst(width, height, rows, size, across, down) {
  const start = down === null ? 0 : down[0].first;
  const last = down?.[size - 1];
  const stop = down === null ? height : last.first + last.weights.length;
  const narrow = new Uint8Array((stop - start) * size * 3);
  for (const [top, bottom, strip] of strips(rows, start, stop)) {
    const opaque = withoutAlpha(strip, (bottom - top) * width);
    narrow.set(resizeRows(opaque, width, size, across), (top - start) * size * 3);
  }
  if (down === null) return narrow;
  const given = (top, bottom) => narrow.subarray((top - start) * size * 3, (bottom - start) * size * 3);
  return resizeColumns(size, stop, given, down, 3);
}

function* strips(rows, start, stop) {
  const ROWS = 64;
  for (let top = start; top < stop; top += ROWS) {
    const bottom = Math.min(top + ROWS, stop);
    yield [top, bottom, rows(top, bottom)];
  }
}

function withoutAlpha(bytes, pixels) {
  const opaque = new Uint8Array(3 * pixels);
  for (let i = 0; i < pixels; i++) {
    opaque[3 * i] = bytes[4 * i];
    opaque[3 * i + 1] = bytes[4 * i + 1];
    opaque[3 * i + 2] = bytes[4 * i + 2];
  }
  return opaque;
}

/** Resize every row of RGB bytes to `size` pixels. If `across` is null, the rows have this size. */
function resizeRows(from, width, size, across) {
  if (across === null) return from;
  const height = from.length / (3 * width);
  const to = new Uint8Array(height * size * 3);
  for (let y = 0, at = 0; y < height; y++) {
    for (const { first, weights: line } of across) {
      let red = 2 ** (BITS - 1);
      let green = red;
      let blue = red;
      for (let i = 0, pixel = 3 * (y * width + first); i < line.length; i++, pixel += 3) {
        const weight = line[i];
        red += weight * from[pixel];
        green += weight * from[pixel + 1];
        blue += weight * from[pixel + 2];
      }
      to[at++] = byte(red);
      to[at++] = byte(green);
      to[at++] = byte(blue);
    }
  }
  return to;
}

/** Resize a picture along its columns with the weights `down`. A pixel has `channels` bytes. */
function resizeColumns(width, height, rows, down, channels = 4) {
  const size = down.length;
  const sums = down.map(() => null); // sums of the unfinished rows
  const to = new Uint8Array(size * width * 3);
  const start = down[0].first;
  const stop = Math.min(down[size - 1].first + down[size - 1].weights.length, height);
  let open = 0; // the first unfinished row
  for (const [top, bottom, strip] of strips(rows, start, stop)) {
    for (let y = top; y < bottom; y++) {
      const line = strip.subarray((y - top) * width * channels, (y - top + 1) * width * channels);
      for (let row = open; row < size && down[row].first <= y; row++) {
        const { first, weights: column } = down[row];
        if (y >= first + column.length) continue;
        sums[row] ??= new Float64Array(3 * width).fill(2 ** (BITS - 1)); // exact for these integers
        add(sums[row], line, column[y - first], channels);
        if (y < first + column.length - 1) continue;
        for (let i = 0; i < 3 * width; i++) to[row * 3 * width + i] = byte(sums[row][i]);
        sums[row] = null;
      }
      while (open < size && y >= down[open].first + down[open].weights.length - 1) open += 1;
    }
  }
  return to;
}

function add(sums, line, weight, channels) {
  for (let i = 0, at = 0; i < sums.length; i += 3, at += channels) {
    sums[i] += weight * line[at];
    sums[i + 1] += weight * line[at + 1];
    sums[i + 2] += weight * line[at + 2];
  }
}
