/* Beam search for the captions of one photo, as in captioner/search; tests compare the two.

   A stepper scores the next words:
     startToken, endToken
     advance(tokens)   feeds the last word of every beam (K); a promise of {logProbs: Float32Array of
                       K x V with -Infinity for words that are never generated, alphas: Float32Array
                       of K x L, gates: Float32Array of K}
     reorder(parents)  lets beam k continue beam parents[k] of the last step

   The site offers only this strategy of the Python search: beam search, with all of its rules. */

const EMPTY = { score: 0, length: 0, ended: false, tokens: [], step: null };

/** Search for the captions of a photo.

     options  search options, named as in Python
     words    token ids: banned, bad_endings and repeatable; rarity of every token, for rare_words;
              people, for neutral
     wanted   alternatives: how many of the most probable words to return for every position, as
              [token, log-probability]; rewards: the `Rewards` of a model that reads photos

   Returns a promise of the captions, best first, in the form of `hypothesis`. If too many words are
   forbidden, there are fewer than num_captions captions. */
export async function search(stepper, options, words, wanted = {}) {
  const { alternatives = 0, rewards = null } = wanted;
  const end = stepper.endToken;
  const rules = rulesOf(options, words);
  let beams = [EMPTY];
  let last = [stepper.startToken];
  for (let t = 0; t < options.max_length; t++) {
    const advance = await stepper.advance(last);
    const rows = beams.map((_, k) => row(advance.logProbs, k, beams.length));
    const seen = beams.map((_, k) => ({
      alternatives: largest(rows[k], alternatives), // before words are merged or forbidden
      alphas: row(advance.alphas, k, beams.length),
      gate: advance.gates[k],
    }));
    rows.forEach((logProbs, k) => {
      mergePeople(logProbs, rules.people);
      rewards?.widen(logProbs, beams[k].tokens);
    });
    const scores = rows.map((logProbs, k) => {
      const preferred = favourRareWords(logProbs, options, words);
      return rewards?.add(preferred, beams[k].tokens) ?? preferred;
    });
    beams.forEach(({ tokens }, k) => forbid(scores[k], tokens, options, rules, end));
    const chosen = choose(beams, scores, options.beam_size, end);
    beams = chosen.map(({ parent, word, score }) => {
      const beam = beams[parent];
      if (beam.ended) return { ...beam, parent };
      const step = { before: beam.step, logProb: rows[parent][word], ...seen[parent] };
      const ended = word === end;
      const tokens = ended ? beam.tokens : [...beam.tokens, word];
      return { score, length: beam.length + 1, ended, tokens, step, parent };
    });
    if (t === options.max_length - 1 || settled(beams, options, rewards?.most ?? 0)) break;
    stepper.reorder(beams.map(({ parent }) => parent));
    last = beams.map(({ ended, tokens }) => (ended ? end : tokens.at(-1)));
  }
  const ranked = beams.map((beam) => [rank(beam.score, beam.length, options), beam]);
  ranked.sort(([one], [other]) => other - one);
  const best = ranked.slice(0, options.num_captions).map(([, beam]) => beam);
  return best.map(hypothesis);
}

/** The words with which the decoder would continue a caption; captioner/search/left_out.py.

    Returns a promise of {tokens, logProbs, alphas, gates}, or of null if the decoder itself would end. */
export async function continuation(stepper, caption, options, words) {
  const rules = rulesOf(options, words);
  const found = { tokens: [], logProbs: [], alphas: [], gates: [] };
  let tokens = [];
  while (tokens.length < options.max_length - 1) {
    const { logProbs, alphas, gates } = await stepper.advance([tokens.at(-1) ?? stepper.startToken]);
    if (tokens.length < caption.length) {
      tokens = caption.slice(0, tokens.length + 1);
      continue;
    }
    mergePeople(logProbs, rules.people);
    const scores = logProbs.slice();
    forbid(scores, tokens, options, rules, stepper.endToken);
    const [[word] = [stepper.endToken]] = largest(scores, 1);
    if (word === stepper.endToken) break;
    tokens = [...tokens, word];
    found.tokens.push(word);
    found.logProbs.push(logProbs[word]);
    found.alphas.push(alphas);
    found.gates.push(gates[0]);
  }
  return found.tokens.length ? found : null;
}

/** The words that `forbid` and `mergePeople` use with these options. */
function rulesOf(options, words) {
  const people = options.neutral ? words.people : null;
  return { ...words, people, banned: [...words.banned, ...(people?.never ?? [])] };
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
    if (ended) offer(score, k, end); // an ended beam stays unchanged
    else rows[k].forEach((logProb, word) => offer(Math.fround(logProb + score), k, word));
  });
  return kept;
}

/** The value that ranks captions. With `certainty`, the score contains the worth of each word, so that
    the length penalty is not needed. */
function rank(score, length, { length_penalty: penalty, certainty }) {
  return certainty ? score : Math.fround(score / Math.fround(length ** penalty));
}

/** Return whether the best captions are final. The score of an unfinished caption can still rise by at
    most `gain`, the reward of true words. */
function settled(beams, options, gain) {
  const { num_captions: count, max_length: longest } = options;
  const unfinished = beams.filter(({ ended }) => !ended);
  if (unfinished.length === 0) return true;
  const ranks = beams.filter(({ ended }) => ended).map((beam) => rank(beam.score, beam.length, options));
  if (ranks.length < count) return false;
  const bound = Math.max(...unfinished.map(({ score }) => rank(Math.fround(score + gain), longest, options)));
  return ranks.sort((one, other) => other - one)[count - 1] > bound;
}

/** Add the probabilities of words with a sex or age to the neutral words, as in search/words.py. */
function mergePeople(logProbs, people) {
  for (const group of people?.groups ?? []) {
    const [neutral, ...members] = group;
    const merged = logSumExp(group.map((word) => logProbs[word]));
    for (const word of members) logProbs[word] = -Infinity;
    logProbs[neutral] = merged;
  }
}

/** The log-probabilities that the search uses. Without rare_words, they are the model's own. */
function favourRareWords(logProbs, { rare_words: strength }, { rarity }) {
  if (!strength) return logProbs;
  return normalized(logProbs.map((value, word) => value + strength * rarity[word]));
}

/** Log-probabilities in proportion to the exponentials of scores. */
function normalized(scores) {
  const total = logSumExp(scores);
  return total === -Infinity ? scores : scores.map((score) => score - total);
}

export function logSumExp(values) {
  const highest = values.reduce((one, other) => Math.max(one, other), -Infinity);
  if (highest === -Infinity) return highest;
  return highest + Math.log(values.reduce((sum, value) => sum + Math.exp(value - highest), 0));
}

/** Set the log-probabilities of forbidden words to -Infinity; captioner/search/rules.py. */
function forbid(logProbs, tokens, options, words, end) {
  const { length } = tokens;
  const { people } = words;
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

/** {tokens, logProbs, alphas, gates, alternatives, logProb, ended} of a caption. */
function hypothesis({ tokens, ended, step: last }) {
  const steps = [];
  for (let step = last; step !== null; step = step.before) steps.unshift(step);
  const part = (name) => steps.slice(0, tokens.length).map((step) => step[name]);
  return {
    tokens,
    logProbs: part("logProb"),
    alphas: part("alphas"),
    gates: part("gate"),
    alternatives: part("alternatives"),
    logProb: steps.reduce((sum, { logProb }) => sum + logProb, 0),
    ended,
  };
}
