"""The words of the search options as token ids."""

from __future__ import annotations

import pytest

from captioner.errors import ConfigError
from captioner.options import SearchOptions
from captioner.search.words import encode_search_words
from captioner.text.subwords import Subwords
from captioner.text.vocabulary import Vocabulary


def test_pieces_are_in_the_order_in_which_they_were_learned_so_rare_ones_are_unknown() -> None:
    """The most frequent piece, " a", comes after all letters."""
    subwords = Subwords.train(["a dog on a bed", "a zebra in a zoo"] * 20, 100, 5)
    pieces = Vocabulary(subwords.pieces, (), subwords)
    assert pieces.words.index("▁a") > pieces.words.index("z")

    encode_search_words(SearchOptions(), pieces)
    with pytest.raises(ConfigError, match="rare_words needs a model of whole words"):
        encode_search_words(SearchOptions(rare_words=0.2), pieces)
