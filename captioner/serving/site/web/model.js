/* An exported model that ONNX Runtime runs, as in captioner/inference/onnx_engine.py. */

import { Vocabulary, captionData } from "./captions.js";
import { confidenceOf, familiarityOf } from "./confidence.js";
import { readPhoto } from "./photo.js";
import { PhotoReading } from "./reading.js";
import { continuation, largest, search } from "./search.js";
import { Rewards } from "./worth.js";

const STATE = ["hidden", "cell", "fed"]; // inputs of the decoder; its outputs have the prefix "next_"
const MOST_PHOTOS = 16; // number of photos whose encoding is kept, a megabyte each

export class Model {
  /** `ort` is the module of ONNX Runtime, and `files` contains the model's files as bytes, by name.
      `providers` lists ONNX Runtime's execution providers for the encoder. The decoder always runs on
      the CPU, because its steps are too small for a GPU. */
  static async load(ort, config, files, providers) {
    const make = (name, executionProviders) => ort.InferenceSession.create(files[name], { executionProviders, logSeverityLevel: 3 });
    const encoder = await make("encoder.onnx", providers);
    const decoder = await make("decoder.onnx", ["wasm"]);
    return new Model(ort, config, encoder, decoder);
  }

  constructor(ort, config, encoder, decoder) {
    Object.assign(this, { ort, config, encoder, decoder });
    this.vocabulary = new Vocabulary(config);
    this.encoded = new Map(); // encoded photos by number, the latest last
  }

  /** The response for a photo, as from `captioner serve`.

      number  a number that identifies the file
      query   the parameters of POST /v1/captions that the page sends */
  async captions(number, file, query) {
    const given = new URLSearchParams(query);
    const { photo, memory } = await this.encode(number, file);
    const style = given.get("style") ?? this.config.search.style;
    const start = this.config.tokens.styles[style] ?? this.config.tokens.start;
    const stepper = () => new Stepper(this, memory, start);
    const reading = this.config.reading && new PhotoReading(this.config, memory);
    const method = given.get("method") ?? "attention";
    const count = Number(given.get("alternatives") ?? 0);
    const withTruths = (found) => ({ ...found, truths: this.config.truth && reading.truths(found) });
    const data = (found, more) => captionData(withTruths(found), photo, this.config, this.vocabulary, method, more);
    const { width, height } = photo;
    if (given.has("words")) {
      const found = await score(stepper(), this.vocabulary.encode(given.get("words")), count);
      return { width, height, captions: [data(found)] };
    }
    const options = this.options(given);
    const rewards = this.config.truth && new Rewards(this.config, options, reading.searchTruths());
    const wanted = { alternatives: count, rewards };
    const [best, ...others] = await search(stepper(), options, this.config.words, wanted);
    if (best === undefined) throw new Error("No caption satisfies these options. Choose other options.");
    const rest = options.certainty ? await continuation(stepper(), best.tokens, options, this.config.words) : null;
    const more = { ...this.judged(best, reading, memory, style, options), leftOut: rest && withTruths(rest) };
    return { width, height, captions: [data(best, more), ...others.map((found) => data(found))] };
  }

  /** The confidence of a photo's best caption, and its keywords; null if they are not available. */
  judged(best, reading, memory, style, options) {
    const { confidence: fitted, familiarity: kinds, tokens, truth } = this.config;
    const familiarity = kinds === null ? 1 : familiarityOf(kinds, memory.summary.data);
    const named = style || (Object.keys(tokens.styles)[0] ?? "");
    const confidence = fitted && confidenceOf(fitted, best, truth ? reading.logOdds(best) : [], named, options);
    return {
      confidence: confidence === null ? null : confidence * familiarity,
      keywords: options.keywords ? reading.keywords(options.keywords, options.neutral, familiarity) : null,
    };
  }

  options(given) {
    const options = { ...this.config.search };
    for (const name of ["beam_size", "num_captions", "certainty", "keywords"]) {
      if (given.has(name)) options[name] = Number(given.get(name));
    }
    if (given.has("neutral")) options.neutral = given.get("neutral") === "true";
    if (options.num_captions > options.beam_size) {
      const count = options.num_captions;
      throw new Error(`${count} captions need a beam size of ${count} or more. Raise the beam size.`);
    }
    return options;
  }

  async encode(number, file) {
    let found = this.encoded.get(number);
    if (found === undefined) {
      const photo = await readPhoto(file, this.config.preprocessing);
      const { pixels, ...seen } = photo;
      found = { photo: seen, memory: await this.memory(pixels) };
    }
    this.encoded.delete(number);
    this.encoded.set(number, found);
    for (const oldest of this.encoded.keys()) {
      if (this.encoded.size <= MOST_PHOTOS) break;
      this.encoded.delete(oldest);
    }
    return found;
  }

  memory(pixels) {
    const size = this.config.preprocessing.image_size;
    return this.encoder.run({ pixels: new this.ort.Tensor("uint8", pixels, [1, size, size, 3]) });
  }
}

/** Steps the decoder over the beams of one photo; see search.js. */
export class Stepper {
  constructor(model, memory, startToken) {
    Object.assign(this, { model, memory, startToken });
    this.endToken = model.config.tokens.end;
    this.inputs = new Set(model.decoder.inputNames);
    this.state = Object.fromEntries(STATE.filter((name) => name in memory).map((name) => [name, memory[name]]));
  }

  async advance(tokens) {
    const { ort, decoder, config } = this.model;
    const words = new ort.Tensor("int64", BigInt64Array.from(tokens, BigInt), [1, tokens.length]);
    const given = { ...this.memory, ...this.state, tokens: words };
    const wanted = Object.fromEntries(Object.entries(given).filter(([name]) => this.inputs.has(name)));
    const found = await decoder.run(wanted);
    for (const name of Object.keys(this.state)) this.state[name] = found[`next_${name}`];
    const logProbs = found.log_probs.data;
    const width = logProbs.length / tokens.length;
    for (let k = 0; k < tokens.length; k++) {
      for (const token of config.tokens.never_generated) logProbs[k * width + token] = -Infinity;
    }
    return { logProbs, alphas: found.alphas.data, gates: found.gate.data };
  }

  reorder(parents) {
    for (const [name, { data, dims }] of Object.entries(this.state)) {
      const width = dims[2];
      const kept = new Float32Array(parents.length * width);
      parents.forEach((parent, k) => kept.set(data.subarray(parent * width, (parent + 1) * width), k * width));
      this.state[name] = new this.model.ort.Tensor("float32", kept, [1, parents.length, width]);
    }
  }
}

/** Score the user's own caption. The result has the same form as a result of the search. */
export async function score(stepper, tokens, alternatives) {
  const found = { tokens, logProbs: [], alphas: [], gates: [], alternatives: [], logProb: 0, ended: true };
  let last = stepper.startToken;
  for (const token of [...tokens, stepper.endToken]) {
    const { logProbs, alphas, gates } = await stepper.advance([last]);
    found.logProb += logProbs[token];
    last = token;
    if (token === stepper.endToken) break;
    found.logProbs.push(logProbs[token]);
    found.alphas.push(alphas);
    found.gates.push(gates[0]);
    found.alternatives.push(largest(logProbs, alternatives));
  }
  return found;
}

