"""Sub-word tokenizer: byte pair encoding of characters, trained on the captions of a model.

For languages that do not separate words by spaces (Chinese, Japanese, Thai, ...) or that have more
forms of a word than a vocabulary can hold. Captions keep their case and punctuation. A piece may be
a part of a word, a word or several words; `SPACE` in a piece stands for the space before it.

Training and splitting use the `tokenizers` library, and the result is its ``tokenizer.json``, which
is data only. Captioning needs neither: pieces are joined by `piece_text`.

Source: Sennrich et al. 2016 (arXiv:1508.07909); spaces inside pieces as in Kudo and Richardson 2018
(arXiv:1808.06226).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from captioner.errors import ConfigError, ModelError
from captioner.text.tokenizer import lacks_spaces, normalize

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SPACE = "\u2581"
"""Stands for a space in a piece."""

_UNKNOWN = "<unk>"
_LONGEST_PIECE = 16  # characters, as in SentencePiece
# Without spaces, frequent phrases would become one piece with one attention map; most words of
# Chinese, Japanese and Thai are shorter than this.
_LONGEST_UNSPACED = 6
# A punctuation character is a piece of its own, but apostrophes and hyphens may be inside a word.
_PUNCTUATION = rf"{SPACE}?[^\P{{P}}'\u2019-]"


class Subwords:
    """A trained sub-word tokenizer."""

    def __init__(self, data: str) -> None:
        """Keep the content of a ``tokenizer.json``, which is read when it is first needed."""
        self.data = data

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Subwords) and json.loads(self.data) == json.loads(other.data)

    __hash__ = None  # type: ignore[assignment]

    @classmethod
    def train(cls, captions: Sequence[str], size: int, threshold: int) -> Subwords:
        """Learn pieces from captions; the same captions give the same pieces.

        Args:
            captions: Captions, not tokenized.
            size: Maximum number of pieces; every character of the captions is one in any case.
            threshold: How often two adjacent pieces must occur to be joined to a new one.

        Raises:
            ConfigError: The library `tokenizers` is missing.
        """
        _require_library("data.tokenizer bpe")
        from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
        from tokenizers.trainers import BpeTrainer

        tokenizer = Tokenizer(models.BPE(unk_token=_UNKNOWN))
        tokenizer.normalizer = normalizers.Sequence(
            [normalizers.NFC(), normalizers.Replace(Regex(r"\s+"), " "), normalizers.Strip()]
        )
        unspaced = lacks_spaces(captions)
        # With spaces, a word has the same pieces at the beginning of a caption and inside it.
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
            special_tokens=[_UNKNOWN],
            max_token_length=_LONGEST_UNSPACED if unspaced else _LONGEST_PIECE,
            show_progress=False,
        )
        tokenizer.train_from_iterator(captions, trainer)
        return cls(tokenizer.to_str(pretty=True))

    @cached_property
    def pieces(self) -> tuple[str, ...]:
        """All pieces, in the order in which they were learned.

        Raises:
            ModelError: The data are not those of a tokenizer written by `train`.
        """
        try:
            numbers: dict[str, int] = json.loads(self.data)["model"]["vocab"]
            return tuple(sorted(numbers.keys() - {_UNKNOWN}, key=numbers.__getitem__))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ModelError(f"no vocabulary in the tokenizer ({error})") from error

    def tokenize(self, text: str) -> list[str]:
        """Split a caption into pieces; a character that is no piece is returned as it is.

        Raises:
            ConfigError: The library `tokenizers` is missing.
        """
        text = normalize(text)
        found = self._tokenizer.encode(text, add_special_tokens=False)
        spelled = [
            text[start:end].strip() if piece == _UNKNOWN else piece
            for piece, (start, end) in zip(found.tokens, found.offsets, strict=True)
        ]
        return [piece for piece in spelled if piece]  # without spaces that no caption has

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        _require_library("a model with tokenizer bpe")
        from tokenizers import Tokenizer

        try:
            return Tokenizer.from_str(self.data)
        except Exception as error:  # the library raises no narrower class
            raise ModelError(f"the tokenizer cannot be read ({error})") from error


def piece_text(piece: str) -> str:
    """The text of a piece, with its space."""
    return piece.replace(SPACE, " ")


def _require_library(purpose: str) -> None:
    try:
        import tokenizers  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"{purpose} needs the library tokenizers to split text; pip install tokenizers"
        ) from error
