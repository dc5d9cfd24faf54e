/* The reading of a photo: the probabilities that words are true of it, and its keywords. Explained in
   captioner/inference/truth.py and reading.py. */

import { logSumExp } from "./search.js";

export const sigmoid = (value) => 1 / (1 + Math.exp(-value));

export class PhotoReading {
  /** `config` of the site, and a photo's `memory`: the outputs of encoder.onnx. */
  constructor({ reading, truth }, memory) {
    Object.assign(this, reading, { truth });
    this.words = memory.reading.data;
    this.regions = memory.reading_regions.data;
  }

  /** Log-odds that each word of a caption is true, NaN for function words. */
  logOdds({ tokens, logProbs }) {
    const { scale, log_prob_weight: weight, bias, unknown } = this.truth;
    const z = [...this.words, unknown, NaN];
    return tokens.map((token, i) => scale * z[this.rows[token]] + weight * logProbs[i] + bias);
  }

  /** The probability that each word of a caption is true. */
  truths(caption) {
    return this.logOdds(caption).map((odds) => Math.fround(sigmoid(odds)));
  }

  /** The probability that each row's word is true, without the decoder's log-probability; see `Rewards`. */
  searchTruths() {
    const { search_scale: scale, search_bias: bias, search_unknown: unknown } = this.truth;
    return Float32Array.of(...this.words, unknown, NaN).map((z) => sigmoid(scale * z + bias));
  }

  /** The most probable keywords, best first: {word, probability, map: log-odds of each region}. */
  keywords(count, neutral, familiarity) {
    const size = this.words.length;
    const regions = Array.from({ length: this.regions.length / size }, (_, l) => this.regions.subarray(l * size));
    const all = new Map();
    for (const [word, withoutSex, phrases] of this.keyword_rows) {
      const name = neutral ? withoutSex : word;
      all.set(name, [...(all.get(name) ?? []), ...phrases]);
    }
    const found = [...all]
      .map(([word, phrases]) => {
        const least = phrases.map((phrase) => leastOf(phrase, this.words));
        const best = phrases[least.indexOf(Math.max(...least))];
        return { word, phrases, best: new Set(best), probability: sigmoid(logSumExp(least)) * familiarity };
      })
      .filter(({ probability }) => probability >= this.least_probability);
    const within = (one, other) => one.size < other.size && [...one].every((row) => other.has(row));
    return found
      .filter(({ best }) => !found.some((other) => within(best, other.best)))
      .sort((one, other) => other.probability - one.probability)
      .slice(0, count)
      .map(({ word, probability, phrases }) => {
        const map = regions.map((logOdds) => logSumExp(phrases.map((phrase) => leastOf(phrase, logOdds))));
        return { word, probability, map };
      });
  }
}

const leastOf = (phrase, logOdds) => Math.min(...phrase.map((row) => logOdds[row]));
