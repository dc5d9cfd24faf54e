/* Captions as the page shows them; captioner/caption.py and vocabulary.py. */

const round = (value, digits) => Math.round(value * 10 ** digits) / 10 ** digits;

export class Vocabulary {
  /** `config` of the site: model/config.json. */
  constructor({ vocabulary, tokens, text }) {
    Object.assign(this, { words: vocabulary, special: tokens, text });
    this.ids = new Map(vocabulary.map((word, index) => [word, index + tokens.first_word]));
    this.clitics = new Set(text.clitics);
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

  /** The words of a caption as the metrics split its text. */
  counted(tokens) {
    return tokens.flatMap((token) => this.text.split[this.word(token)] ?? [this.word(token)]);
  }

  /** Token ids of a text; throws Error if the model does not know a word. */
  encode(text) {
    const words = splitWords(text, this.text.brackets);
    const unknown = words.filter((word) => !this.ids.has(word));
    if (words.length === 0) throw new Error("This has no words; give a caption.");
    if (unknown.length > 0) throw new Error(`The model does not know ${[...new Set(unknown)].join(", ")}; use other words.`);
    return words.map((word) => this.ids.get(word));
  }
}

/** The words of a plain text: in lower case, clitics apart, without punctuation; captioner/text/tokenizer.py
    has the rules for everything else. */
export function splitWords(text, brackets = {}) {
  const names = Object.fromEntries(Object.entries(brackets).map(([name, sign]) => [sign, name]));
  const plain = text.normalize("NFC").toLowerCase().replaceAll(/[‘’]/g, "'");
  const found = plain.match(/[()[\]{}&#]|[\p{L}\p{N}'][\p{L}\p{M}\p{N}'-]*/gu) ?? [];
  return found.flatMap((word) => (word in names ? [names[word]] : withoutClitics(word.replace(/['-]+$/, ""))));
}

/** A word and the clitics at its end: isn't, is and n't. */
function withoutClitics(word) {
  const parts = /^(.*)(n't|'(?:s|re|ve|ll|d|m))$/.exec(word) ?? /^(can)(not)$/.exec(word);
  if (parts === null) return word === "" ? [] : [word];
  return [...withoutClitics(parts[1]), parts[2]];
}

/** A caption as `Caption.as_dict(attention=True)` has it.

    found       a hypothesis of the search
    photo       {box} from readPhoto
    config      of the site
    method      attention or attention_gate
    confidence  a number or null */
export function captionData(found, photo, config, vocabulary, method, confidence) {
  const [rows, columns] = config.grid;
  const [left, top, right, bottom] = photo.box;
  const size = config.preprocessing.image_size;
  const logProbs = found.logProbs.map((value) => round(value, 4));
  const map = (alphas, gate) =>
    Array.from({ length: rows }, (_, y) =>
      Array.from({ length: columns }, (_, x) => {
        const share = alphas[y * columns + x];
        return round(method === "attention" ? share : share * gate, 6);
      }),
    );
  return {
    text: vocabulary.sentence(found.tokens),
    words: vocabulary.shown(found.tokens),
    log_prob: round(found.logProb, 4),
    log_probs: logProbs,
    confidence: confidence === null ? null : round(confidence, 4),
    doubtful: found.logProbs.flatMap((value, i) => (Math.exp(value) < config.doubtful_below ? [i] : [])),
    alternatives: found.alternatives.map((words) =>
      words.map(([token, value]) => ({ word: alternative(token, vocabulary), log_prob: round(value, 4) })),
    ),
    gates: found.gates.map((value) => round(value, 4)),
    alphas: found.alphas.map((alphas, i) => map(alphas, found.gates[i])),
    region: photo.box.map((side) => round(side, 6)),
    geometry: {
      x: mapped(config.geometry.x, (right - left) / size, left),
      y: mapped(config.geometry.y, (bottom - top) / size, top),
    },
    ...(method === "attention" ? {} : { method }),
  };
}

function alternative(token, vocabulary) {
  return token === vocabulary.special.end ? vocabulary.text.end_name : vocabulary.shown([token])[0];
}

/** An axis of the encoder's input in the photo; geometry.py's `placed`. */
function mapped({ first, pitch, start, stop }, scale, offset) {
  const place = (x) => round(scale * x + offset, 6);
  return { first: place(first), pitch: round(scale * pitch, 6), start: place(start), stop: place(stop) };
}
