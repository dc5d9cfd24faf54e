"""Penn Treebank tokenizer for captions, without Java.

Published caption scores use the tokens of pycocoevalcap. It runs the Java tokenizer of Stanford
CoreNLP 3.4.1 (options ``-preserveLines -lowerCase``), called "the jar" here, and removes
punctuation tokens. This module produces the same tokens without Java. Its rules are regular
expressions. At each position, the rule with the longest match wins. If two matches are equally
long, the earlier rule wins. Plain words between spaces make up most of a caption, so they skip the
rules.

``tokenize(text)`` returns the same tokens as pycocoevalcap's ``PTBTokenizer`` for a caption in the
middle of a batch, if Java writes UTF-8 (``-Dfile.encoding=UTF-8``). With other encodings, Java
prints ``?`` for unsupported letters. Brackets are kept in forms such as ``-lrb-``, because
pycocoevalcap removes only the forms in capitals.

``tests/unit/text/test_tokenizer.py`` compares the tokens with stored output of the jar and, if Java
is available, with the jar itself. The rules were derived from the jar's
output for probe sentences and from public knowledge of the Penn Treebank conventions.

Deviations:
* Deviation: line breaks (``\\r``, ``\\v``, ``\\f``, U+0085, U+2028, U+2029) count as spaces, as
  ``\\n`` does in pycocoevalcap. The jar starts a new line at these characters, so pycocoevalcap
  assigns the wrong lines to all later captions in the batch.
* Deviation: captions are independent. Each caption is tokenized as if a line "x" followed. The jar
  looks past the end of a line: "plan B." loses its period if the next caption starts with a word
  like "The". At the end of a batch, the jar splits a final emoticon or year (":)", "'90").
* Deviation: vowel signs and other marks in Indic and South-East Asian scripts continue a word. The
  jar supports only the marks of Devanagari and Thai. It drops all other marks (Bengali, Tamil,
  Khmer, ...) and so breaks words apart.
* Deviation: letters in scripts newer than the jar may be split or dropped differently. The same is
  true of soft hyphens and wide spaces inside file names and URLs. All common scripts and emoji
  follow the jar, except for a few rare letters.

Scripts without spaces between words (Chinese, Japanese, Thai, ...) need a different tokenizer,
because `tokenize` and the jar return a whole sentence as one token. Metrics and statistics use
`caption_tokens`, which splits such scripts into characters. Models use
`captioner.text.vocabulary.Subwords`.
"""

from __future__ import annotations

import json
import re
import sys
import unicodedata
from collections.abc import Iterable
from pathlib import Path

from captioner.hints import hinted

# --- building blocks ---------------------------------------------------------------------------

# Ranges of characters, words before or after which a period has a special meaning, and the tokens
# that the jar writes for single characters.
_LISTS = json.loads(Path(__file__).with_name("ptb.json").read_text(encoding="utf-8"))

# Letters in the jar: Unicode letters of the basic plane, without the number-like characters that
# Python counts as word characters.
_NOT_LETTERS = "".join(_LISTS["not_letters"])
_BASIC = rf"[^\W\d_{_NOT_LETTERS}]"
_ALNUM = rf"[^\W_{_NOT_LETTERS}]"
# Combining accents, vowel signs, soft hyphens and entities like "&eacute;" continue a word. The
# marks of Devanagari and Thai come from the jar, all other marks from the categories Mn and Mc of
# Unicode 15.
_MARKS = "".join(_LISTS["marks"])
# A zero-width (non-)joiner after a virama selects the shape of a conjunct.
_VIRAMAS = r"\u094d\u09cd\u0a4d\u0acd\u0b4d\u0bcd\u0c4d\u0ccd\u0d4d\u0dca"
_JOINER = rf"(?<=[{_VIRAMAS}])[\u200c\u200d]"
_LETTER = rf"(?:{_BASIC}|[{_MARKS}]|{_JOINER}|&[aeiouAEIOU](?:acute|grave|uml);)"
_WORD_PART = rf"{_LETTER}(?:{_LETTER}|\d)*"
_WORD = rf"{_WORD_PART}(?:[.!?]{_WORD_PART})*"
_SPACE = r"(?:[ \t\u00a0\u2000-\u200a\u3000]|&nbsp;)"
_APOSTROPHE = r"(?:['\u0092\u2019]|&apos;)"
_CURLY_APOSTROPHE = r"(?:[\u0092\u2019]|&apos;)"
_APOSTROPHE_OR_TICK = r"(?:['\u0092\u2019`\u0091\u2018\u201b]|&apos;)"
_QUOTES = r"`\u0091-\u0094\u00ab\u00bb\u2018-\u201f\u2039\u203a"
_CLITIC = rf"{_APOSTROPHE}(?i:[msd]|re|ve|ll)"
_NOT_CLITIC = rf"[nN]{_APOSTROPHE_OR_TICK}[tT]"
_NUMBER = r"(?:\d*(?:[.:,\u00ad\u066b\u066c]\d+)+|\d+)"
_PIECE = rf"(?:[dDoOlL]{_APOSTROPHE_OR_TICK}{_ALNUM})?{_ALNUM}+"
_THING = rf"{_PIECE}(?:[-_\u2010\u2011]{_PIECE})*"
_INITIALS = r"[A-Za-z](?:\.[A-Za-z])+"
_HYPHENATED = rf"[A-Za-z0-9][A-Za-z0-9.,\u00ad]*(?:-(?:{_INITIALS}\.|[A-Za-z0-9\u00ad]+))+"
_ACRONYM = r"[A-Z]+(?:(?:[+&]|&amp;)[A-Z]+)+"
_NAME = r"[A-Za-z][A-Za-z0-9_:.-]*"
_TAG = (
    rf"<(?:[!?][A-Za-z-][^>]*|/{_NAME}|{_NAME}(?: +{_NAME}"
    rf"(?: *= *(?:'[^']*'|\"[^\"]*\"))?)* */?) *>"
)
_URL_TAIL = r"(?:/[^ \t\n\"<>|(){}]+[^ \t\n\"<>|.!?(){},-])?"

# Abbreviations that always keep their period, in upper or lower case.
_MAY_END_A_SENTENCE = "|".join(_LISTS["may_end_a_sentence"])
# Abbreviations that are also words. They keep their period only if they start with a capital.
_CAPITALIZED = "|".join(_LISTS["capitalized"])
# Titles and similar abbreviations, which do not end a sentence.
_TITLES = "|".join(_LISTS["titles"])
# Abbreviations that keep their period only before a number ("no. 5").
_BEFORE_NUMBERS = "|".join(_LISTS["before_numbers"])
# Words that start a sentence. A single letter before such a word loses its period ("plan B. The").
_SENTENCE_STARTS = "|".join(_LISTS["sentence_starts"])
_FILE_ENDINGS = "|".join(_LISTS["file_endings"])
_PHONE = (
    r"(?:\(\d{2,3}\)[ \u00a0]?|(?:\+\+?)?(?:\d{2,4}[- \u00a0])?\d{2,4}[- \u00a0])"
    r"\d{3,4}[- \u00a0]?\d{3,5}"
    r"|(?:(?:\+\+?)?\d{2,4}\.)?\d{2,4}\.\d{3,4}\.\d{3,5}"
)

# Each of these characters is a token. All other characters, such as emoji, are dropped.
_SYMBOLS = "".join(_LISTS["symbols"])

# --- rules -------------------------------------------------------------------------------------

# Each rule has three parts:
# 1. the kinds of character that it can start with ("a": letter, "0": digit, ".": anything else);
# 2. its pattern;
# 3. its token. None: the token is group 1 of the match. Text that is matched after group 1 is not
#    consumed, but counts when the longest match is chosen. "": the token is dropped, as
#    pycocoevalcap drops punctuation.
_RULES: tuple[tuple[str, str, str | None], ...] = (
    # Words that are split in two, and words that keep their apostrophe.
    ("a", r"(?i:(can)not|(gon|wan)na|(got)ta|(lem|gim)me)", None),
    (".", r"(?i:('t)(?:is|was))", None),
    (".", rf"({_APOSTROPHE}[nN]{_APOSTROPHE}|{_CURLY_APOSTROPHE}[nN])", None),
    (".", r"('[nN])[ \t\n\u00a0]", None),
    (".", rf"({_APOSTROPHE}(?i:em|till?|cause))", None),
    (".", rf"({_APOSTROPHE}[2-9]0[sS])", None),
    (".", rf"({_APOSTROPHE}\d\d)[ \t\n\u00a0\u2000-\u200a\u3000]", None),
    ("a", rf"((?i:ol|somethin|dunkin|[dlj]){_APOSTROPHE})", None),
    ("a", r"((?i:c'mon|e'er|s'mores|li'l))", None),
    ("a", rf"((?i:cap{_APOSTROPHE}n))", None),
    ("a", rf"([yY]{_APOSTROPHE}){_BASIC}", None),
    # Contractions: man's -> man 's, don't -> do n't.
    ("a.", rf"({_WORD}){_CLITIC}", None),
    ("a.", rf"([A-Za-z\u00ad]*[A-MO-Za-mo-z\u00ad]){_NOT_CLITIC}", None),
    ("a", rf"([A-HJ-XZn]{_APOSTROPHE_OR_TICK}{_BASIC}{_BASIC}+)", None),
    ("a", rf"({_BASIC}+[aeiouyAEIOUY]{_APOSTROPHE_OR_TICK}[aeiouA-Z]{_BASIC}*)", None),
    ("a.", rf"({_CLITIC}|{_NOT_CLITIC})[^A-Za-z]", None),
    (".", rf"(?!')({_CLITIC})", None),
    # Markup and entities.
    (".", rf"({_TAG})", None),
    (".", r"&(?:MD|mdash|ndash);|[\u0096\u0097\u2013-\u2015]", ""),
    (".", r"(?i:&amp;)", "&"),
    (".", r"&lt;", "<"),
    (".", r"&gt;", ">"),
    (".", r"(&(?:HT|TL|UR|LR|QC|QL|QR|odq|cdq|#\d+);)", None),
    # Addresses.
    ("a", r"((?i:https?)://[^ \t\n\"<>|(){}]+[^ \t\n\"<>|.!?(){},-])", None),
    (
        "a0.",
        r"((?i:www)\.(?:[^ \t\n\"<>|.!?(){},]+\.)+[a-zA-Z]{2,4}" + _URL_TAIL + ")",
        None,
    ),
    (
        "a.",
        r"((?:[^ \t\n\u2000-\u200a\u3000!\"$'(),-_`{|}]+\.)+(?i:com|net|org|edu)" + _URL_TAIL + ")",
        None,
    ),
    (
        "a0.",
        r"((?:&lt;|<)?[a-zA-Z0-9][^ \t\n\"<>|(){}\u00a0]*@(?:[^ \t\n\"<>|(){}.\u00a0]+\.)*"
        r"[^ \t\n\"<>|(){}.\u00a0]+(?:&gt;|>)?)",
        None,
    ),
    (".", rf"(@[A-Za-z_][A-Za-z_0-9]*|#{_LETTER}+)", None),
    # Numbers, dates, fractions, money, phone numbers.
    ("0", r"(\d{1,2}[-/]\d{1,2}[-/]\d{2,4})", None),
    ("0.", rf"([-+]?{_NUMBER})", None),
    (
        ".",
        r"([\u207a\u207b\u208a\u208b]?(?:[\u2070\u00b9\u00b2\u00b3\u2074-\u2079]+|[\u2080-\u2089]+))",
        None,
    ),
    ("0", r"((?:\d{1,4}[- \u00a0])?\d{1,4}(?:\\?/|\u2044)\d{1,4})", None),
    (".", r"([\u00bc-\u00be\u2153-\u215e])", None),
    ("a0", r"([A-Za-z0-9]+(?:-[A-Za-z]+){0,2}(?:\\?/[A-Za-z0-9]+(?:-[A-Za-z]+){0,2}){1,2})", None),
    ("a.", r"([A-Z]*\$|#)", None),
    (".", r"([\u0080\u00a2-\u00a5\u20a0\u20a4\u20ac])", None),
    ("0.", rf"({_PHONE})", None),
    # Words, abbreviations and initials.
    ("a.", rf"({_WORD})", None),
    # The next two rules look two characters ahead, so that they win over longer words: "etc.-x" ->
    # etc. - x.
    ("a", rf"((?i:{_MAY_END_A_SENTENCE})\.)[\s\S]{{2}}", None),
    ("a", rf"((?:{_CAPITALIZED})\.)[\s\S]{{2}}", None),
    ("a", rf"((?i:{_MAY_END_A_SENTENCE}|{_TITLES}|[a-z])\.|(?:{_CAPITALIZED})\.)", None),
    ("a", rf"((?i:{_BEFORE_NUMBERS})\.){_SPACE}?\d", None),
    (
        "a",
        rf"([A-Za-z])\.(?:{_SPACE}|\n)+(?:{_SENTENCE_STARTS}|{_TAG})(?:{_SPACE}|\n)",
        None,
    ),
    ("a", rf"({_INITIALS}\.?)", None),
    ("a", r"((?:Canada|Sino|Korean|EU|Japan|non)-U\.S\.?|U\.S\.-(?:U\.K|U\.S\.S\.R)\.?)", None),
    ("a0", rf"((?:{_WORD}|{_THING}|{_HYPHENATED}|{_ACRONYM})\.)[,;:\u3001]", None),
    # Emoticons.
    (".", r"([<>]?[:;=]['o*-]?[()DPdpO\\{@|\[\]])[^A-Za-z0-9]", None),
    (
        "a.",
        r"([\^x=~<>]\.\[\^x=~<>]|[-\^x=~<>']_[-\^x=~<>']|\([-\^x=~<>'][_.]?[-\^x=~<>']\))",
        None,
    ),
    # Words of letters and digits, with the characters allowed inside them.
    ("a0.", rf"({_THING})", None),
    ("a0", rf"({_HYPHENATED})", None),
    ("a", rf"({_ACRONYM})", None),
    ("a0", rf"({_ALNUM}+(?:\.{_ALNUM}+)*\.(?i:{_FILE_ENDINGS}))(?:{_SPACE}|[\n!,.?])", None),
    ("a", r"([cC]\+\+|[cCfF]#)", None),
    (".", rf"{_SPACE}", ""),
    # Punctuation. The first rule drops what pycocoevalcap drops; the others keep their token.
    (".", r"\.{3,5}|(?:\.[ \u00a0]){2,4}\.|''|``|[.,;:\"'`?!\u2026]|-{1,4}|&quot;|&apos;", ""),
    (".", rf"([{_QUOTES}]{{1,2}})", None),
    (".", r"(-{5,}|[?!]{2,}|@+|#+|_+|\*+|(?:\\\*){1,3}|<<|>>)", None),
    (".", rf"([{_SYMBOLS}])", None),
)

# Characters that the jar writes in ASCII. A token of several such characters is dropped as a quote
# only if it becomes "``" or "''".
_REWRITTEN = str.maketrans(
    {
        **dict.fromkeys("\u0091\u2018\u201b\u2039", "`"),
        **dict.fromkeys("\u0092\u2019\u203a", "'"),
        **dict.fromkeys("\u0093\u201c\u00ab", "``"),
        **dict.fromkeys("\u0094\u201d\u00bb", "''"),
    }
)
_WHOLE_TOKENS: dict[str, str] = _LISTS["whole_tokens"]
_DROPPED = frozenset(("", "'", "''", "`", "``"))

_COMPILED = [(first, re.compile(pattern), token) for first, pattern, token in _RULES]
_BY_FIRST = {
    kind: [(pattern.match, token) for first, pattern, token in _COMPILED if kind in first]
    for kind in "a0."
}
_QUOTES_OR_CLITIC = re.compile(rf"[{_QUOTES}]+$|(?:{_CLITIC}|{_NOT_CLITIC})$").match
_ADDRESS = re.compile(r"(?i:https?://|www\.|.*\.(?:com|net|org|edu)(?:/|$))").match
_PLAIN_WORDS = re.compile(r" *([A-Za-z]+)(?=[ \n])").match
_SPLIT_WORDS = frozenset(("cannot", "gonna", "wanna", "gotta", "lemme", "gimme"))
# Skips spaces, and also commas and periods that stand alone: they are dropped anyway, and no rule
# joins them to the text that follows.
_BLANKS = re.compile(r"(?:[ \n]|,(?=[ \n])|\.(?=\n| [A-Za-z]))+").match
_LINE_BREAKS = re.compile(r"[\r\n\v\f\u0085\u2028\u2029]")

# --- scripts without spaces ----------------------------------------------------------------------

# Letters of Thai, Lao, Myanmar, Khmer, Japanese and Chinese, and the marks that follow a letter.
_UNSPACED = "".join(_LISTS["unspaced"])
_UNSPACED_MARKS = "".join(_LISTS["unspaced_marks"])
# The punctuation of these scripts, and wide forms of ASCII punctuation.
_UNSPACED_PUNCTUATION = "".join(_LISTS["unspaced_punctuation"])
# Captions with more letters per word than this, on average, are not split into words. Captions that
# were split into words have 2 to 4.
_LONGEST_WORDS = 6
_HAS_UNSPACED = re.compile(f"[{_UNSPACED}]").search
_CHARACTERS = re.compile(
    f"([{_UNSPACED}][{_UNSPACED_MARKS}]*)|[{_UNSPACED_PUNCTUATION}\u200b]"
).split


def normalize(text: str) -> str:
    """Return the text in Unicode normalization form C. Equal letters then become equal strings."""
    return unicodedata.normalize("NFC", text)


def caption_tokens(text: str) -> list[str]:
    """Split a caption in any script into tokens, for metrics and statistics.

    The text is normalized and then split by `tokenize`. Chinese, Japanese, Thai, Lao, Khmer and
    Myanmar have no spaces between words. In these scripts, every character with its marks is a
    token, and punctuation is dropped. All systems are scored on these tokens, whatever tokenizer
    they use, so that scores are comparable.

    Source: sacrebleu's tokenizer ``zh``. Deviation: this tokenizer covers more scripts.
    """
    text = normalize(text)
    if not _HAS_UNSPACED(text):
        return tokenize(text)
    tokens: list[str] = []
    # The result of split alternates: text between matches, then the group of a match, which is None
    # for punctuation.
    for position, part in enumerate(_CHARACTERS(text)):
        if part:
            tokens += [part] if position % 2 else tokenize(part)
    return tokens


def has_unspaced(text: str) -> bool:
    """Return whether a text contains letters from a script without spaces between words."""
    return _HAS_UNSPACED(text) is not None


def lacks_spaces(captions: Iterable[str]) -> bool:
    """Return whether most captions lack spaces between words, as in Chinese, Japanese or Thai.

    Captions in these scripts do have spaces if they were split into words beforehand.
    """
    balance = 0
    for caption in captions:
        if not has_unspaced(caption):
            balance -= 1
            continue
        sizes = [sum(map(has_unspaced, word)) for word in caption.split()]
        balance += 1 if sum(sizes) > _LONGEST_WORDS * sum(map(bool, sizes)) else -1
    return balance > 0


# --- the tokenizer -------------------------------------------------------------------------------


@hinted
def tokenize(text: str) -> list[str]:
    """Split a caption into lower-case tokens without punctuation, as caption metrics need them.

    For example, ``tokenize("The dogs' T-shirt isn't $5.")`` returns
    ``["the", "dogs", "t-shirt", "is", "n't", "$", "5"]``.
    """
    # Some rules look ahead to the line end, which follows every caption in the jar's input.
    text = _LINE_BREAKS.sub(" ", text).rstrip() + "\n"
    tokens: list[str] = []
    position, end = 0, len(text)
    while position < end:
        plain = _PLAIN_WORDS(text, position)
        if plain and (word := plain[1].lower()) not in _SPLIT_WORDS:
            tokens.append(word)
            position = plain.end()
            continue
        if blanks := _BLANKS(text, position):
            position = blanks.end()
            continue
        position = _take_token(text, position, tokens)
    return list(map(sys.intern, tokens))  # so that millions of equal tokens share their strings


def _take_token(text: str, position: int, tokens: list[str]) -> int:
    """Append the token that starts at a position to ``tokens``, and return the next position.

    If the Java tokenizer drops the character at the position, no token is appended.
    """
    first = text[position]
    kind = "a" if first.isalpha() else "0" if first.isdecimal() else "."
    longest, best, token = 0, None, None
    for match, fixed in _BY_FIRST[kind]:
        found = match(text, position)
        if found and found.end() > longest:
            longest, best, token = found.end(), found, fixed
    if best is None:
        return position + 1  # a character that the jar drops, such as an emoji
    if token is not None:
        if token:
            tokens.append(token)
        return longest
    group = best.lastindex or 0
    token = _as_written(best[group])
    if token not in _DROPPED:
        tokens.append(token)
    return best.end(group)


def _as_written(token: str) -> str:
    """Convert a matched token to the form that the Java tokenizer writes."""
    if token in _WHOLE_TOKENS:
        return _WHOLE_TOKENS[token]
    if _QUOTES_OR_CLITIC(token):
        token = token.replace("&apos;", "'").translate(_REWRITTEN)
    elif token[-1] != ">" and ("(" in token or ")" in token):  # an emoticon or a phone number
        token = token.replace("(", "-LRB-").replace(")", "-RRB-")
    if "@" in token or token[0] == "#" or _ADDRESS(token):  # addresses and tags are unchanged
        return token.lower()
    # A space inside a token (a tag, "1 1/2", a phone number) becomes a non-breaking one.
    return token.replace("\u00ad", "").replace(" ", "\u00a0").replace("&amp;", "&").lower()
