"""Vocabulary of a model: the mapping between words and token ids, and the sub-word tokenizer.

The vocabulary contains words from the training captions only. Training and evaluation use the same
tokenizer, so that the metrics can match every word that the model generates. A model with a
sub-word tokenizer has word pieces instead of words.
"""

from __future__ import annotations

import difflib
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Literal

from captioner.errors import ConfigError, ModelError
from captioner.messages import counted, either, first_of
from captioner.text.tokenizer import lacks_spaces, normalize, tokenize

if TYPE_CHECKING:
    from tokenizers import Tokenizer

PAD, START, END, UNKNOWN = range(4)
"""Ids of the special tokens. No word has one of these ids, not even a word spelled ``<end>``."""

NEVER_GENERATED = (PAD, START, UNKNOWN)
"""Tokens that a decoder never generates."""

SPECIAL_NAMES = ("<pad>", "<start>", "<end>", "<unk>")
"""Names of the special tokens, in the order of their ids."""

_NOT_LAST = """
a an the this these those its his their my your our 's very two three four five several many some
of in on at to for with from by into onto upon near beside between among against towards toward
and or but while as than that which who whose where when because before after during
is are am was were be been being has have
"""
_OTHER_FUNCTION_WORDS = """
's n't not no it he she they him her them himself herself itself themselves there here other
another each both all one up down out off over under through around across along top front back
side next
"""

BAD_ENDINGS = frozenset(_NOT_LAST.split())
"""Words that cannot end a complete caption ("... with a")."""

NUMBERS = frozenset(("two", "three", "four", "five"))
"""Content words that two rules treat like function words: they may be repeated in a caption, and
they cannot end a caption."""

FUNCTION_WORDS = (BAD_ENDINGS | frozenset(_OTHER_FUNCTION_WORDS.split())) - NUMBERS
"""Words that are not content words, such as articles, prepositions and pronouns."""

BLANK = "\N{OPEN BOX}"
"""The symbol that is displayed for a piece that consists only of a space."""


def is_content_word(word: str) -> bool:
    """Return whether a word can be true or false for a photo, such as a noun or a number.

    Args:
        word: A lower-case token from ``text.tokenizer``.
    """
    return content_words([word])[0]


def content_words(words: Iterable[str]) -> list[bool]:
    """Return, for each word, whether it is a content word, such as a noun or a number.

    This is faster than a call of `is_content_word` for each word.
    """
    return [word not in FUNCTION_WORDS and any(map(str.isalpha, word)) for word in words]


@dataclass(repr=False)
class Vocabulary:
    """The words of a model and their token ids.

    With a sub-word tokenizer, the words are pieces (see `Subwords`).

    Ids 0 to 3 are the special tokens. The ids of the words follow, the most frequent word first. A
    model with several caption styles has a start token for each style. The ids of these start
    tokens come last. Start tokens are only inputs: the decoder never generates them.

    Raises:
        ConfigError: A word or style is repeated.
    """

    words: Sequence[str]
    """Distinct words in the order of their ids, without the special tokens."""
    styles: Sequence[str] = ()
    """Names of the styles, the default style first. Empty if the model has one unnamed style."""
    subwords: Subwords | None = None
    """Sub-word tokenizer, or None if the words are tokens from ``text.tokenizer``."""

    def __post_init__(self) -> None:
        self.words, self.styles = tuple(self.words), tuple(self.styles)
        if len(set(self.styles)) < len(self.styles):
            names = ", ".join(self.styles)
            raise ConfigError(f"styles lists {names}, but a name occurs twice; use each name once")
        self._ids = {word: token for token, word in enumerate(self.words, len(SPECIAL_NAMES))}
        if len(self._ids) < len(self.words):
            repeated = next(word for word, count in Counter(self.words).items() if count > 1)
            raise ConfigError(f"the vocabulary contains {repeated!r} twice; list each word once")

    @classmethod
    def count(
        cls,
        captions: Iterable[Iterable[str]],
        threshold: int = 5,
        styles: Sequence[str] = (),
    ) -> Vocabulary:
        """Build a vocabulary from the words that occur at least ``threshold`` times in captions.

        The most frequent word comes first. Words of equal frequency are in alphabetical order.
        """
        counts = Counter(word for words in captions for word in words)
        kept = [word for word, count in counts.items() if count >= threshold]
        return cls(sorted(kept, key=lambda word: (-counts[word], word)), styles)

    def extended(self, words: Iterable[str], styles: Iterable[str] = ()) -> Vocabulary:
        """Return a copy with new words and styles added at the end.

        Words and styles that the vocabulary already contains are skipped.
        """
        return Vocabulary(
            tuple(dict.fromkeys([*self.words, *words])),
            tuple(dict.fromkeys([*self.styles, *styles])),
            self.subwords,
        )

    def __len__(self) -> int:
        return len(SPECIAL_NAMES) + len(self.words)

    def __contains__(self, word: str) -> bool:
        return word in self._ids

    @property
    def tokenizer(self) -> Literal["words", "bpe"]:
        """The kind of tokenizer: ``words`` or ``bpe``, as in the option ``data.tokenizer``."""
        return "words" if self.subwords is None else "bpe"

    def tokenize(self, text: str) -> list[str]:
        """Split a caption into words or pieces, even if they are not in the vocabulary."""
        return self.subwords.tokenize(text) if self.subwords else tokenize(normalize(text))

    def known_words(self, text: str) -> list[str]:
        """Split a caption into words, and check that the vocabulary contains them.

        Raises:
            ConfigError: The caption is empty, or the vocabulary lacks one of its words.
        """
        if not isinstance(text, str):
            raise ConfigError(f"the caption to explain is {text!r:.40}; pass a string")
        words = self.tokenize(text)
        unknown = [word for word in words if word not in self]
        if unknown or not words:
            problem = "the text has no words"
            if unknown:
                problem = f"the model does not know {first_of(unknown)}"
            remedy = self.advice(unknown[0] if unknown else "")
            raise ConfigError(f"caption {text!r}: {problem}; {remedy}")
        return words

    def advice(self, word: str) -> str:
        """Return the remedy for an unknown word, as the end of an error message.

        A comparison with the vocabulary takes 10 ms, so this is called for one word per message.
        """
        if close := difflib.get_close_matches(word, self._ids, 2, 0.7):
            return f"use words that the model knows, such as {either(close)}"
        return f"use some of the {counted(len(self._ids), 'word')} in the model's config.json"

    def start(self, style: str = "") -> int:
        """Return the start token of a style, or of the default style if the name is empty.

        Raises:
            ConfigError: The model does not have this style.
        """
        if not style:
            return len(self) if self.styles else START
        if style not in self.styles:
            known = f"use {', '.join(self.styles)}" if self.styles else "leave out the style"
            raise ConfigError(f"the model has no style {style!r}; {known}")
        return len(self) + self.styles.index(style)

    def encode(self, words: Iterable[str]) -> list[int]:
        """Return the token ids of words. Words outside the vocabulary become ``UNKNOWN``."""
        return [self._ids.get(word, UNKNOWN) for word in words]

    def decode(self, tokens: Iterable[int]) -> list[str]:
        """Return the words with these token ids. Special tokens become names such as ``<end>``."""
        offset = len(SPECIAL_NAMES)
        return [self.words[n - offset] if n >= offset else SPECIAL_NAMES[n] for n in tokens]

    def pieces(self, tokens: Iterable[int]) -> tuple[str, ...]:
        """Return the text of each piece with its spaces, or () if the vocabulary has whole words.

        The joined texts form the caption.
        """
        if self.subwords is None:
            return ()
        return tuple(piece.replace(SPACE, " ") for piece in self.decode(tokens))

    def shown(self, tokens: Iterable[int]) -> tuple[str, ...]:
        """Return the words with these token ids for display, without the spaces in pieces."""
        if self.subwords is None:
            return tuple(self.decode(tokens))
        return tuple(piece.strip() or BLANK for piece in self.pieces(tokens))

    def whole_words(self, words: Iterable[str]) -> list[int]:
        """Return the ids of those words that are a single token, in ascending order."""
        prefix = "" if self.subwords is None else SPACE
        return sorted([self._ids[prefix + word] for word in words if prefix + word in self._ids])


# --- sub-words -----------------------------------------------------------------------------------

SPACE = "\u2581"
"""The character that represents a space in a piece."""

_UNKNOWN_PIECE = "<unk>"  # the library's name for a character that is not a piece
_LONGEST_PIECE = 16  # characters, as in SentencePiece
# In scripts without spaces, a frequent phrase would become one piece with one attention map. Most
# words of Chinese, Japanese and Thai are shorter than this limit.
_LONGEST_UNSPACED = 6
# A punctuation character is a piece of its own, but apostrophes and hyphens may be inside a word.
_PUNCTUATION = rf"{SPACE}?[^\P{{P}}'\u2019-]"


@dataclass(frozen=True)
class Subwords:
    """A sub-word tokenizer: byte pair encoding of characters, trained on a model's captions.

    Use it for languages without spaces between words (Chinese, Japanese, Thai, ...). It is also
    useful for languages in which a word has very many forms. Captions keep their case and
    punctuation. A piece may be part of a word, a whole word or several words.

    Training and splitting text require the library `tokenizers`. Captioning does not.

    Source: Sennrich et al. 2016 (arXiv:1508.07909). Kudo and Richardson 2018 (arXiv:1808.06226) for
    spaces inside pieces.
    """

    data: str
    """The content of the library's ``tokenizer.json`` file, which contains no code."""

    @classmethod
    def train(cls, captions: Sequence[str], size: int, threshold: int) -> Subwords:
        """Learn the pieces from captions. Equal arguments always yield the same pieces.

        Args:
            captions: Captions, not tokenized.
            size: Maximum number of pieces. Every character in the captions is always a piece.
            threshold: Minimum number of times that two adjacent pieces must occur before they are
                merged into a new piece.

        Raises:
            ConfigError: The library `tokenizers` is not installed.
        """
        _require_library("data.tokenizer bpe")
        from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
        from tokenizers.trainers import BpeTrainer

        tokenizer = Tokenizer(models.BPE(unk_token=_UNKNOWN_PIECE))
        tokenizer.normalizer = normalizers.Sequence(
            [normalizers.NFC(), normalizers.Replace(Regex(r"\s+"), " "), normalizers.Strip()]
        )
        unspaced = lacks_spaces(captions)
        # With "always", a word has the same pieces at the beginning of a caption as inside it.
        scheme = "never" if unspaced else "always"
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Metaspace(SPACE, prepend_scheme=scheme),
                pre_tokenizers.Split(Regex(_PUNCTUATION), "isolated"),
            ]
        )
        tokenizer.decoder = decoders.Metaspace(SPACE, prepend_scheme=scheme)
        trainer = BpeTrainer(
            vocab_size=size,
            min_frequency=threshold,
            special_tokens=[_UNKNOWN_PIECE],
            max_token_length=_LONGEST_UNSPACED if unspaced else _LONGEST_PIECE,
            show_progress=False,
        )
        tokenizer.train_from_iterator(captions, trainer)
        return cls(tokenizer.to_str(pretty=True))

    @cached_property
    def pieces(self) -> tuple[str, ...]:
        """The pieces, in the order in which they were learned.

        Raises:
            ModelError: The data was not written by `train`.
        """
        try:
            numbers: dict[str, int] = json.loads(self.data)["model"]["vocab"]
            return tuple(sorted(numbers.keys() - {_UNKNOWN_PIECE}, key=numbers.__getitem__))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ModelError(
                f"the sub-word tokenizer has no vocabulary ({error}); copy the whole model "
                "folder again"
            ) from error

    def tokenize(self, text: str) -> list[str]:
        """Split a caption into pieces. Characters that are not a piece are returned unchanged.

        Raises:
            ConfigError: The library `tokenizers` is not installed.
        """
        text = normalize(text)
        found = self._tokenizer.encode(text, add_special_tokens=False)
        spelled = [
            text[start:end].strip() if piece == _UNKNOWN_PIECE else piece
            for piece, (start, end) in zip(found.tokens, found.offsets, strict=True)
        ]
        return [piece for piece in spelled if piece]  # a space that is not a piece is empty

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        """The library's tokenizer.

        Raises:
            ConfigError: The library `tokenizers` is not installed.
            ModelError: The library cannot read the data.
        """
        _require_library("a model with tokenizer bpe")
        from tokenizers import Tokenizer

        try:
            return Tokenizer.from_str(self.data)
        except Exception as error:  # the library raises no narrower class
            raise ModelError(
                f"the sub-word tokenizer cannot be read ({error}); copy the whole model "
                "folder again"
            ) from error


def _require_library(purpose: str) -> None:
    """Check that the library `tokenizers` is installed.

    ``purpose`` is the feature that needs the library, for the error message.

    Raises:
        ConfigError: The library is not installed.
    """
    try:
        import tokenizers  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"{purpose} needs the library 'tokenizers' to split text; run: pip install tokenizers"
        ) from error
