/* Captions in the form that the page shows, as in captioner/caption_types.py and vocabulary.py. */

const round = (value, digits) => Math.round(value * 10 ** digits) / 10 ** digits;

export class Vocabulary {
  /** `config` of the site: model/config.json. */
  constructor({ vocabulary, tokens, text }) {
    Object.assign(this, { words: vocabulary, special: tokens, text });
    this.ids = new Map(vocabulary.map((word, index) => [word, index + tokens.first_word]));
    this.clitics = new Set(text.clitics);
    this.functionWords = new Set(text.function_words);
  }

  word(token) {
    return this.words[token - this.special.first_word];
  }

  /** The pieces of a sub-word tokenizer, with their spaces. */
  pieces(tokens) {
    return tokens.map((token) => this.word(token).replaceAll(this.text.space, " "));
  }

  /** Words as captions show them. */
  shown(tokens) {
    if (!this.text.space) return tokens.map((token) => this.word(token));
    return this.pieces(tokens).map((piece) => piece.trim() || this.text.blank);
  }

  sentence(tokens) {
    if (this.text.space) return this.pieces(tokens).join("").trim();
    let text = "";
    for (const token of tokens) {
      const sign = this.text.brackets[this.word(token)] ?? this.word(token);
      const joined = text === "" || this.clitics.has(this.word(token)) || ")]}".includes(sign) || "([{".includes(text.at(-1));
      text += joined ? sign : ` ${sign}`;
    }
    return text;
  }

  /** Words that are true or false together, each with the product of their truths; captioner/caption_types.py. */
  phrases(tokens, truths) {
    const shown = this.shown(tokens);
    const content = tokens.map((token) => !this.functionWords.has(token));
    const begins = (at) =>
      at === 0 ||
      (content[at - 1] &&
        !content[at] &&
        !this.clitics.has(shown[at]) &&
        !(this.text.conjunctions.includes(shown[at]) && content[at + 1]));
    const starts = [...tokens.keys()].filter(begins);
    return starts.map((start, i) => {
      const known = truths.slice(start, starts[i + 1]).filter((truth) => !Number.isNaN(truth));
      const text = this.sentence(tokens.slice(start, starts[i + 1]));
      return { text, truth: known.length ? round(known.reduce((one, other) => one * other, 1), 4) : null };
    });
  }

  /** Token ids of text; throws Error if the model does not know a word. */
  encode(text) {
    const words = splitWords(text, this.text.brackets);
    const unknown = words.filter((word) => !this.ids.has(word));
    if (words.length === 0) throw new Error("This text has no words. Enter a caption.");
    if (unknown.length > 0) throw new Error(`The model does not know ${[...new Set(unknown)].join(", ")}. Use other words.`);
    return words.map((word) => this.ids.get(word));
  }
}

/** The words of plain text, in lower case, with clitics split off and without punctuation. For other
    text, captioner/text/tokenizer.py has more rules. */
export function splitWords(text, brackets = {}) {
  const names = Object.fromEntries(Object.entries(brackets).map(([name, sign]) => [sign, name]));
  const plain = text.normalize("NFC").toLowerCase().replaceAll(/[‘’]/g, "'");
  const found = plain.match(/[()[\]{}&#]|[\p{L}\p{N}'][\p{L}\p{M}\p{N}'-]*/gu) ?? [];
  return found.flatMap((word) => (word in names ? [names[word]] : withoutClitics(word.replace(/['-]+$/, ""))));
}

/** A word and the clitics at its end, such as "is" and "n't" for "isn't". */
function withoutClitics(word) {
  const parts = /^(.*)(n't|'(?:s|re|ve|ll|d|m))$/.exec(word) ?? /^(can)(not)$/.exec(word);
  if (parts === null) return word === "" ? [] : [word];
  return [...withoutClitics(parts[1]), parts[2]];
}

/** A caption with the same fields as `Caption.to_dict(attention=True)`.

    found       a hypothesis of the search, with the truths of its words, or null
    photo       {box} from readPhoto
    config      of the site
    method      attention or attention_gate
    more        confidence: a number or null; leftOut: {tokens, ...} like a hypothesis, or null;
                keywords, or null */
export function captionData(found, photo, config, vocabulary, method, more = {}) {
  const { confidence = null, leftOut = null, keywords = null } = more;
  const [left, top, right, bottom] = photo.box;
  const size = config.preprocessing.image_size;
  const { truths, logProbs } = found;
  const doubtful = (_, i) => (truths ? truths[i] < config.doubtful_truth : Math.exp(logProbs[i]) < config.doubtful_below);
  return {
    ...wordsData(found, config, vocabulary, method),
    log_prob: round(found.logProb, 4),
    confidence: confidence === null ? null : round(confidence, 4),
    doubtful: [...found.tokens.keys()].filter(doubtful),
    ...(leftOut && { left_out: wordsData(leftOut, config, vocabulary, method) }),
    ...(keywords && { keywords: keywords.map((one) => keywordData(one, config)) }),
    alternatives: found.alternatives.map((words) =>
      words.map(([token, value]) => ({ word: alternative(token, vocabulary), log_prob: round(value, 4) })),
    ),
    region: photo.box.map((side) => round(side, 6)),
    geometry: {
      x: mapped(config.geometry.x, (right - left) / size, left),
      y: mapped(config.geometry.y, (bottom - top) / size, top),
    },
    ...(method === "attention" ? {} : { method }),
  };
}

/** The words of a caption, or its left-out words. */
function wordsData({ tokens, logProbs, gates, alphas, truths }, config, vocabulary, method) {
  const map = (shares, gate) =>
    inRows(shares, config.grid, (share) => round(method === "attention" ? share : share * gate, 6));
  return {
    text: vocabulary.sentence(tokens),
    words: vocabulary.shown(tokens),
    log_probs: logProbs.map((value) => round(value, 4)),
    ...(truths && {
      truth: truths.map((value) => (Number.isNaN(value) ? null : round(value, 4))),
      phrases: vocabulary.phrases(tokens, truths),
    }),
    gates: gates.map((value) => round(value, 4)),
    alphas: alphas.map((shares, i) => map(shares, gates[i])),
  };
}

/** Values of the regions, in rows of the grid. */
function inRows(values, [rows, columns], change) {
  return Array.from({ length: rows }, (_, y) => Array.from(values.slice(y * columns, (y + 1) * columns), change));
}

function keywordData({ word, probability, map }, { grid }) {
  return { word, probability: round(probability, 4), map: inRows(map, grid, (value) => round(value, 3)) };
}

function alternative(token, vocabulary) {
  return token === vocabulary.special.end ? vocabulary.text.end_name : vocabulary.shown([token])[0];
}

/** The place of an axis of the encoder's input in the photo; `placed` in geometry.py. */
function mapped({ first, pitch, start, stop }, scale, offset) {
  const place = (x) => round(scale * x + offset, 6);
  return { first: place(first), pitch: round(scale * pitch, 6), start: place(start), stop: place(stop) };
}
