/* The calibrated confidence of a caption; captioner/inference/confidence.py. */

/** The tensors and the metadata of a .safetensors file. */
export function readSafetensors(bytes) {
  const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
  const length = Number(view.getBigUint64(0, true));
  const header = JSON.parse(new TextDecoder().decode(bytes.subarray(8, 8 + length)));
  const { __metadata__: metadata = {}, ...entries } = header;
  const read = {
    F16: [2, (at) => half(view.getUint16(at, true)), Float32Array],
    F32: [4, (at) => view.getFloat32(at, true), Float32Array],
    U32: [4, (at) => view.getUint32(at, true), Uint32Array],
  };
  const tensors = {};
  for (const [name, { dtype, shape, data_offsets: [from, to] }] of Object.entries(entries)) {
    const [size, value, Kind] = read[dtype];
    const values = Kind.from({ length: (to - from) / size }, (_, i) => value(8 + length + from + i * size));
    tensors[name] = { shape, values };
  }
  return { metadata, tensors };
}

/** A 16-bit floating-point number. */
function half(bits) {
  const sign = bits & 0x8000 ? -1 : 1;
  const exponent = (bits >> 10) & 31;
  const fraction = bits & 1023;
  if (exponent === 0) return sign * fraction * 2 ** -24;
  if (exponent === 31) return fraction ? NaN : sign * Infinity;
  return sign * (1 + fraction / 1024) * 2 ** (exponent - 15);
}

const CRC = Uint32Array.from({ length: 256 }, (_, n) => {
  let c = n;
  for (let k = 0; k < 8; k++) c = c & 1 ? 0xedb88320 ^ (c >>> 1) : c >>> 1;
  return c;
});

/** CRC-32 of a text in UTF-8, as zlib computes it. */
export function crc32(text) {
  let c = 0xffffffff;
  for (const byte of new TextEncoder().encode(text)) c = CRC[(c ^ byte) & 255] ^ (c >>> 8);
  return (c ^ 0xffffffff) >>> 0;
}

export class Calibrator {
  /** `bytes` of confidence.safetensors. */
  constructor(bytes) {
    const { metadata, tensors } = readSafetensors(bytes);
    this.header = JSON.parse(metadata.confidence);
    this.mean = tensors["space.mean"].values;
    this.components = tensors["space.components"].values;
    this.kinds = tensors.kinds?.values ?? null;
    this.hashes = tensors["phrases.hashes"].values;
    this.rarities = tensors["phrases.rarities"].values;
    this.rows = new Map(this.header.words.map((word, row) => [word, row]));
    this.weights = tensors["reading.weights"].values;
    this.biases = tensors["reading.biases"].values;
  }

  /** The confidence of a caption, 0 to 1; null if captions of these options have none.

      caption    of the search, with its evidence
      words      of the caption, as the metrics split it
      photo      the encoder's summary
      style      "" for a model without styles
      beam_size  of the search; any from 2 up is the same */
  confidence(caption, words, photo, style, beamSize) {
    const { intercepts, search } = this.header;
    const other = beamSize !== search.beam_size && Math.min(beamSize, search.beam_size) < 2;
    if (other || !(style in intercepts)) return null;
    const { familiar: [start, end] } = this.header;
    const familiarity = (end - this.strangeness(photo)) / (end - start);
    return this.probability(this.features(caption, words, photo), style) * Math.min(Math.max(familiarity, 0), 1);
  }

  /** The features by name; captioner/inference/confidence.py's `features`. */
  features({ logProb, logProbs, evidence }, words, photo) {
    const { length } = logProbs;
    const { entropies, share, overlap } = evidence;
    const [strength, unfamiliarity] = this.measure(photo);
    const support = this.support(words, photo);
    return {
      mean_log_prob: logProb / (length + 1),
      min_log_prob: length ? Math.min(...logProbs) : logProb,
      mean_entropy: length ? entropies.reduce((sum, one) => sum + one, 0) / length : 0,
      max_entropy: length ? Math.max(...entropies) : 0,
      beam_share: Math.log(Math.max(share, 1e-6)),
      beam_overlap: overlap,
      length,
      rare_words: this.meanRarity(words, 1),
      rare_phrases: this.meanRarity(words, 3),
      photo_strength: strength,
      photo_unfamiliarity: unfamiliarity,
      least_support: support.length ? Math.min(...support) : 0,
      joint_support: support.reduce((sum, odds) => sum - Math.log1p(Math.exp(-odds)), 0),
    };
  }

  /** Log-odds of the words that the reading knows; `WordReading`. */
  support(words, photo) {
    const rows = words.map((word) => this.rows.get(word)).filter((row) => row !== undefined);
    return rows.map((row) =>
      photo.reduce((sum, value, i) => sum + value * this.weights[row * photo.length + i], this.biases[row]),
    );
  }

  probability(features, style) {
    const { weights, mean, scale, lowest, highest, intercepts } = this.header;
    let sum = intercepts[style];
    for (const name of Object.keys(weights)) {
      const limited = Math.min(Math.max(features[name], lowest[name]), highest[name]);
      sum += (weights[name] * (limited - mean[name])) / scale[name];
    }
    return 1 / (1 + Math.exp(-sum));
  }

  /** How unlike photos an image is; `Calibrator.strangeness`. */
  strangeness(photo) {
    if (this.kinds === null) return this.measure(photo)[1];
    return photo.reduce((sum, value, i) => sum + value * this.kinds[i], this.kinds.at(-1));
  }

  /** Strength and unfamiliarity of a photo; `PhotoSpace.measure`. */
  measure(photo) {
    const away = photo.map((value, i) => value - this.mean[i]);
    const size = away.length;
    const strength = norm(away);
    const inside = Array.from({ length: this.components.length / size }, (_, k) =>
      away.reduce((sum, value, i) => sum + value * this.components[k * size + i], 0),
    );
    const outside = Math.sqrt(Math.max(strength ** 2 - norm(inside) ** 2, 0));
    return [strength, outside / Math.max(strength, 1e-12)];
  }

  meanRarity(words, order) {
    const { unknown_rarity: unknown } = this.header;
    const count = words.length - order + 1;
    let sum = 0;
    for (let at = 0; at < count; at++) {
      const index = indexOf(this.hashes, crc32(words.slice(at, at + order).join(" ")));
      sum += index < 0 ? unknown : this.rarities[index];
    }
    return count > 0 ? sum / count : unknown;
  }
}

function norm(values) {
  return Math.sqrt(values.reduce((sum, value) => sum + value * value, 0));
}

/** Index of a value in sorted values; -1 if it is missing. */
function indexOf(sorted, value) {
  let [low, high] = [0, sorted.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (sorted[middle] < value) low = middle + 1;
    else high = middle;
  }
  return sorted[low] === value ? low : -1;
}
