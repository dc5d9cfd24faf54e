/* Beam search for the captions of one photo, as in captioner/decoding; tests compare the two.

   A stepper scores the next words:
     startToken, endToken
     advance(tokens)   feeds the last word of every beam (K); a promise of {logProbs: Float32Array of
                       K x V with -Infinity for words that are never generated, alphas: Float32Array
                       of K x L, gates: Float32Array of K}
     reorder(parents)  lets beam k continue beam parents[k] of the last step

   Of Python's strategies this is beam search, with every rule; the site offers no other. */

const PLAUSIBLE = Math.log(0.1); // relative to the most probable word
const PENALTY = 20; // how far the others stay below plausible words, in nats
const EMPTY = { score: 0, length: 0, ended: false, tokens: [], step: null };

/** Search for the captions of a photo.

     options  search options, named as in Python
     words    token ids: banned, bad_endings and repeatable; rarity of every token, for rare_words;
              people, for neutral
     wanted   evidence: collect what the confidence needs; alternatives: how many of the most probable
              words to return for every position, as [token, log-probability]; blank: a stepper of a
              blank photo, for guidance

   A promise of the best captions, best first, as `hypothesis` returns them; fewer than num_captions if
   there are not as many, none if only forbidden words were left. */
export async function search(stepper, options, words, wanted = {}) {
  const { evidence = false, alternatives = 0, blank = null } = wanted;
  const end = stepper.endToken;
  const people = options.neutral ? words.people : null;
  const forbidden = { ...words, banned: [...words.banned, ...(people?.never ?? [])] };
  let beams = [EMPTY];
  let last = [stepper.startToken];
  for (let t = 0; t < options.max_length; t++) {
    const advance = await stepper.advance(last);
    const rows = beams.map((_, k) => row(advance.logProbs, k, beams.length));
    rows.forEach((logProbs) => mergePeople(logProbs, people));
    const seen = beams.map((_, k) => ({
      // Before words are forbidden.
      entropy: evidence ? entropy(rows[k]) : 0,
      alternatives: largest(rows[k], alternatives),
      alphas: row(advance.alphas, k, beams.length),
      gate: advance.gates[k],
    }));
    const without = blank === null ? null : (await blank.advance(last)).logProbs;
    const guided = (logProbs, k) => {
      if (without === null) return logProbs;
      const unseen = row(without, k, beams.length);
      mergePeople(unseen, people);
      return guide(logProbs, unseen, options);
    };
    const scores = rows.map((logProbs, k) => favourRareWords(guided(logProbs, k), options, words));
    beams.forEach(({ tokens }, k) => forbid(scores[k], tokens, options, forbidden, end, people));
    const chosen = choose(beams, scores, options.beam_size, end);
    beams = chosen.map(({ parent, word, score }) => {
      const beam = beams[parent];
      if (beam.ended) return { ...beam, parent };
      const step = { before: beam.step, logProb: rows[parent][word], ...seen[parent] };
      const ended = word === end;
      const tokens = ended ? beam.tokens : [...beam.tokens, word];
      return { score, length: beam.length + 1, ended, tokens, step, parent };
    });
    if (t === options.max_length - 1 || settled(beams, options)) break;
    for (const each of [stepper, blank]) each?.reorder(beams.map(({ parent }) => parent));
    last = beams.map(({ ended, tokens }) => (ended ? end : tokens.at(-1)));
  }
  const ranked = beams.map((beam) => [rank(beam.score, beam.length, options), beam]);
  ranked.sort(([one], [other]) => other - one);
  const best = ranked.slice(0, options.num_captions).map(([, beam]) => beam);
  const shares = evidence ? beamShares(beams) : null;
  return best.map((beam) => hypothesis(beam, options, evidence && agreement(beam, beams, shares)));
}

/** Row k of a matrix of `count` rows. */
function row(values, k, count) {
  const width = values.length / count;
  return values.subarray(k * width, (k + 1) * width);
}

/** The most probable continuations, best first. */
function choose(beams, rows, size, end) {
  const kept = [];
  const offer = (score, parent, word) => {
    if (score === -Infinity || (kept.length === size && score <= kept[size - 1].score)) return;
    let at = kept.length;
    while (at > 0 && kept[at - 1].score < score) at -= 1;
    kept.splice(at, 0, { score, parent, word });
    if (kept.length > size) kept.pop();
  };
  beams.forEach(({ score, ended }, k) => {
    if (ended) offer(score, k, end); // goes on as it is
    else rows[k].forEach((logProb, word) => offer(Math.fround(logProb + score), k, word));
  });
  return kept;
}

function rank(score, length, { length_penalty: penalty }) {
  return Math.fround(score / Math.fround(length ** penalty));
}

/** Whether the best captions are final: log-probabilities only decrease. */
function settled(beams, options) {
  const { num_captions: count, max_length: longest } = options;
  const unfinished = beams.filter(({ ended }) => !ended);
  if (unfinished.length === 0) return true;
  const ranks = beams.filter(({ ended }) => ended).map((beam) => rank(beam.score, beam.length, options));
  if (ranks.length < count) return false;
  const bound = Math.max(...unfinished.map(({ score }) => rank(score, longest, options)));
  return ranks.sort((one, other) => other - one)[count - 1] > bound;
}

/** Scores that favour what a blank photo makes less probable; captioner/search/rules.py. */
function guide(logProbs, blank, { guidance }) {
  const lowest = logProbs.reduce((one, other) => Math.max(one, other), -Infinity) + PLAUSIBLE;
  const changes = logProbs.map((value, word) =>
    value < lowest || blank[word] === -Infinity ? 0 : guidance * (value - blank[word]),
  );
  const others = changes.reduce((one, other) => Math.min(one, other), 0) - PENALTY;
  return normalized(
    logProbs.map((value, word) => value + (value < lowest ? others : changes[word])),
  );
}

/** Add the probabilities of words with a sex or age to those of neutral words; search/words.py. */
function mergePeople(logProbs, people) {
  for (const group of people?.groups ?? []) {
    const [neutral, ...members] = group;
    const highest = Math.max(...group.map((word) => logProbs[word]));
    if (highest === -Infinity) continue;
    const total = group.reduce((sum, word) => sum + Math.exp(logProbs[word] - highest), 0);
    for (const word of members) logProbs[word] = -Infinity;
    logProbs[neutral] = highest + Math.log(total);
  }
}

/** The log-probabilities that the search uses: the model's own without rare_words. */
function favourRareWords(logProbs, { rare_words: strength }, { rarity }) {
  if (!strength) return logProbs;
  return normalized(logProbs.map((value, word) => value + strength * rarity[word]));
}

/** Log-probabilities in proportion to the exponentials of scores. */
function normalized(scores) {
  const highest = scores.reduce((one, other) => Math.max(one, other), -Infinity);
  if (highest === -Infinity) return scores;
  const total = scores.reduce((sum, score) => sum + Math.exp(score - highest), 0);
  return scores.map((score) => score - highest - Math.log(total));
}

/** Set the log-probabilities of forbidden words to -Infinity; captioner/search/rules.py. */
function forbid(logProbs, tokens, options, words, end, people) {
  const { length } = tokens;
  const refuse = (some) => some.forEach((word) => (logProbs[word] = -Infinity));
  refuse(words.banned);
  if (people?.ages.includes(tokens.at(-1))) refuse(people.not_after_ages);
  if (length < options.min_length) refuse([end]);
  if (length > 0 && words.bad_endings.includes(tokens.at(-1))) refuse([end]);
  if (length === options.max_length - 1) refuse(words.bad_endings); // a truncated caption ends here too
  if (options.block_repeats) refuse(tokens.filter((word) => !words.repeatable.includes(word)));
  const size = options.block_ngrams;
  if (size === 0 || length < size) return;
  const prefix = tokens.slice(length - size + 1);
  for (let at = 0; at + size <= length; at++) {
    if (prefix.every((word, i) => tokens[at + i] === word)) refuse([tokens[at + size - 1]]);
  }
}

export function entropy(logProbs) {
  let sum = 0;
  for (const value of logProbs) {
    if (value > -1e4) sum -= Math.exp(value) * value;
  }
  return sum;
}

/** The `count` largest values as [index, value], largest first. */
export function largest(values, count) {
  const found = [];
  for (let i = 0; count > 0 && i < values.length; i++) {
    const value = values[i];
    if (value === -Infinity || (found.length === count && value <= found[count - 1][1])) continue;
    let at = found.length;
    while (at > 0 && found[at - 1][1] < value) at -= 1;
    found.splice(at, 0, [i, value]);
    if (found.length > count) found.pop();
  }
  return found;
}

/** The beam's captions' shares of their probability. */
function beamShares(beams) {
  const highest = Math.max(...beams.map(({ score }) => score));
  const weights = beams.map(({ score }) => Math.exp(score - highest));
  const total = weights.reduce((sum, weight) => sum + weight, 0);
  return weights.map((weight) => weight / total);
}

/** A caption's share, and the mean share of its words that the captions of the beam contain. */
function agreement(beam, beams, shares) {
  const { tokens } = beam;
  const overlaps = beams.map(({ tokens: others }) => {
    const common = tokens.filter((word) => others.includes(word)).length;
    return common / Math.max(tokens.length, 1);
  });
  const overlap = overlaps.reduce((sum, part, k) => sum + shares[k] * part, 0);
  return { share: shares[beams.indexOf(beam)], overlap };
}

/** {tokens, logProbs, alphas, gates, alternatives, logProb, ended, evidence} of a caption. */
function hypothesis(beam, options, agreed) {
  const steps = [];
  for (let step = beam.step; step !== null; step = step.before) steps.unshift(step);
  const { length } = beam.tokens;
  const part = (name) => steps.slice(0, length).map((step) => step[name]);
  return {
    tokens: beam.tokens,
    logProbs: part("logProb"),
    alphas: part("alphas"),
    gates: part("gate"),
    alternatives: part("alternatives"),
    logProb: options.rare_words || options.guidance ? steps.reduce((sum, step) => sum + step.logProb, 0) : beam.score,
    ended: beam.ended,
    evidence: agreed ? { entropies: part("entropy"), ...agreed } : null,
  };
}
