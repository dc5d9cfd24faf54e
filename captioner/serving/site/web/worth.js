/* The worth of a word for a photo's caption; explained in captioner/search/worth.py. */

import { logSumExp } from "./search.js";

export class Rewards {
  /** The site's `config`, and the `truths` of the reading's rows, see `PhotoReading.searchTruths`. */
  constructor({ worth, reading, tokens, vocabulary }, { certainty }, truths) {
    const { grammar, wide } = worth; // pairs and triples of tokens are numbers, see search/grammar.py
    const weight = certainty ? worth.weight : worth.whole_weight;
    const least = certainty || worth.whole_certainty;
    const valueOf = (truth) => Math.max(weight * Math.log(truth / least), worth.least_worth);
    Object.assign(this, worth, { rows: reading.rows, end: tokens.end });
    this.size = vocabulary.length + tokens.first_word;
    this.most = weight * Math.log(1 / least);
    this.values = Float32Array.from(truths, (truth) => (Number.isNaN(truth) ? 0 : valueOf(truth)));
    this.nothing = truths.length - 1; // the row of function words
    this.shares = new Map(wide.map(([word]) => [word, worth.wide_share]));
    this.certain = certainty > 0;
    this.wide = certainty ? wide : [];
    this.forbidden = [grammar?.not_following, grammar?.not_third].map((keys) => byContext(keys ?? [], this.size));
    this.endings = certainty && grammar ? grammar.endings.map((share) => Math.log(share) + worth.ending_gain) : null;
    this.notEnding = new Set(grammar?.not_ending);
  }

  /** Add to each wide word the probability of the words that it covers, unless the caption contains one. */
  widen(logProbs, tokens) {
    for (const group of this.wide) {
      if (tokens.some((word) => group.includes(word))) continue;
      logProbs[group[0]] = logSumExp(group.map((word) => logProbs[word]));
    }
  }

  /** Scores for the search: log-probabilities with the worth of the words and endings. */
  add(logProbs, tokens) {
    const said = tokens.map((word) => this.rows[word]);
    const values = this.values.slice();
    for (const row of said) values[row] = Math.min(values[row], 0); // a stem is rewarded once
    const highest = logProbs.reduce((one, other) => Math.max(one, other), -Infinity);
    const least = Math.fround(highest - this.plausible);
    const scores = logProbs.map((value, word) => {
      const reward = values[this.rows[word]] * (this.shares.get(word) ?? 1);
      const implausible = value < least;
      const score = implausible && reward > 0 ? value : value + reward;
      return implausible && this.certain ? score - this.penalty : score;
    });
    if (this.certain) scores[this.end] = tokens.length ? logProbs[this.end] : -Infinity; // not empty
    if (tokens.length === 0) return scores;
    if (this.endings) scores[this.end] = this.ending(logProbs[this.end], tokens, said);
    const contexts = [tokens.at(-1), (tokens.at(-2) ?? NaN) * this.size + tokens.at(-1)];
    this.forbidden.forEach((words, which) => {
      for (const word of words.get(contexts[which]) ?? []) scores[word] = -Infinity;
    });
    return scores;
  }

  /** The log-probability of ending the caption after these words. `own` is the decoder's. */
  ending(own, tokens, said) {
    const [before, last] = [tokens.at(-2) ?? -1, tokens.at(-1)];
    const least = this.notEnding.has(before * this.size + last) ? -Infinity : this.endings[last];
    if (least === -Infinity && own <= this.sure_ending) return -Infinity;
    const content = new Set(said.filter((row) => row !== this.nothing));
    return Math.max(own, least) - this.too_short * Math.max(this.enough - content.size, 0);
  }
}

/** The tokens that must not follow, by context: the number that encodes the one or two tokens before. */
function byContext(keys, size) {
  const words = new Map();
  for (const key of keys) {
    const context = Math.floor(key / size);
    if (!words.has(context)) words.set(context, []);
    words.get(context).push(key % size);
  }
  return words;
}
