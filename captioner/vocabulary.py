"""Words and their numbers.

The vocabulary is counted over the training captions alone, with the tokenizer that the evaluation
uses, so that a word the model can say is a word the metrics can match.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from captioner.errors import ConfigError

PAD, START, END, UNKNOWN = range(4)
"""Numbers of the special tokens. They are numbers only: no word of a caption can collide with
them, not even a caption that holds the text ``<end>``."""

UNSPOKEN = (PAD, START, UNKNOWN)
"""What a decoder is never asked to say."""

SPECIAL_NAMES = ("<pad>", "<start>", "<end>", "<unk>")

_ASKING = """
a an the this these those its his their my your our 's very two three four five several many some
of in on at to for with from by into onto upon near beside between among against towards toward
and or but while as than that which who whose where when because before after during
is are am was were be been being has have
"""
BAD_ENDINGS = frozenset(_ASKING.split())
"""Words that ask for another one: a sentence that ends with one was cut short."""


class Vocabulary:
    """Maps words to numbers and back.

    Numbers 0 to 3 are the special tokens; the words follow, most frequent first. A model that has
    learned several styles has a start token for each; their numbers come last and are inputs only:
    a decoder has no output for them.
    """

    def __init__(self, words: Sequence[str], styles: Sequence[str] = ()) -> None:
        """Number the words in the order given.

        Args:
            words: Distinct words, without the special tokens.
            styles: Names of the styles, the default first; empty: one style without a name.

        Raises:
            ConfigError: A word or a style is there twice.
        """
        self.words = tuple(words)
        self.styles = tuple(styles)
        if len(set(self.styles)) < len(self.styles):
            raise ConfigError(f"styles {', '.join(styles)} repeat a name; name each style once")
        self._numbers = {word: number for number, word in enumerate(words, len(SPECIAL_NAMES))}
        if len(self._numbers) != len(self.words):
            twice = [word for word, count in Counter(words).items() if count > 1]
            raise ConfigError(f"the vocabulary holds {twice[0]!r} twice; give every word once")

    @classmethod
    def count(
        cls,
        captions: Iterable[Sequence[str]],
        threshold: int = 5,
        styles: Sequence[str] = (),
    ) -> Vocabulary:
        """Count words and keep those seen ``threshold`` times or more.

        Args:
            captions: Tokenized training captions.
            threshold: Fewest occurrences of a word that is kept.
            styles: See the constructor.

        Returns:
            The vocabulary, most frequent first and alphabetical among equals, whatever the order
            of the captions.
        """
        counts = Counter(word for words in captions for word in words)
        kept = [word for word, count in counts.items() if count >= threshold]
        return cls(sorted(kept, key=lambda word: (-counts[word], word)), styles)

    def __len__(self) -> int:
        return len(SPECIAL_NAMES) + len(self.words)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Vocabulary)
            and self.words == other.words
            and self.styles == other.styles
        )

    __hash__ = None  # type: ignore[assignment]

    def __contains__(self, word: str) -> bool:
        return word in self._numbers

    def start(self, style: str = "") -> int:
        """Number of the start token of a style.

        Args:
            style: One of ``styles``; empty: the default style.

        Raises:
            ConfigError: The model has no such style.
        """
        if not style:
            return len(self) if self.styles else START
        if style not in self.styles:
            known = f"use {', '.join(self.styles)}" if self.styles else "it has one style only"
            raise ConfigError(f"the model has no style {style!r}; {known}")
        return len(self) + self.styles.index(style)

    def encode(self, words: Iterable[str]) -> list[int]:
        """Number each word; a word outside the vocabulary becomes ``UNKNOWN``."""
        return [self._numbers.get(word, UNKNOWN) for word in words]

    def decode(self, numbers: Iterable[int]) -> list[str]:
        """Give each number's word; special tokens appear as ``<pad>``, ``<start>``, ..."""
        offset = len(SPECIAL_NAMES)
        return [self.words[n - offset] if n >= offset else SPECIAL_NAMES[n] for n in numbers]
