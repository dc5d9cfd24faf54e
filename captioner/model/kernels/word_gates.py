"""Table of the words' gate inputs, which replaces a matrix product at every step of a search.

The gate inputs of a word are its contribution to the LSTM's gates, U_y E y + b (see ``decoder``).
They depend on the word alone. In a search for a single photo, most of the time of this product is
spent on reading the weights U_y from memory. The table then saves 11% of the time of captioning (9
to 14% in five pairs of runs in float32, on one thread of an AMD EPYC). In batches, it saves little.

Notation: V words in the vocabulary, E embedding size, N hidden size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class WordGates:
    """Table of the words' gate inputs, which is filled block by block.

    A block of the table is computed when one of its words first occurs, because captions usually
    use only about a tenth of the vocabulary. Blocks are always computed as a whole. The values of a
    word therefore do not depend on the other words that are looked up. On a GPU, the whole table is
    computed at once, because a look-up would have to wait for the GPU to find the missing blocks.
    """

    BLOCK = 64
    """Number of words in a block."""

    def __init__(self, embedding: nn.Embedding, layer: nn.Linear) -> None:
        """Allocate the table.

        Args:
            embedding: Word embeddings, (V, E). Its weights must not change afterwards.
            layer: Layer from E to 4N numbers. Its weights must not change afterwards.
        """
        self.embedding, self.layer = embedding, layer
        words = len(embedding.weight)
        # new_empty does not write to the memory, so blocks that are never computed take no memory.
        with torch.inference_mode(False):  # a tensor from inference mode could not be written later
            self.table = layer.weight.new_empty(words, layer.out_features, requires_grad=False)
        self.missing = set(range(-(-words // self.BLOCK)))
        if self.table.device.type != "cpu":
            self._compute(set(self.missing))

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """Return None, so that a copied decoder has no table, because its weights may change."""
        return

    def look_up(self, tokens: Tensor) -> Tensor:
        """Return the gate inputs, (..., 4N), of tokens of any shape, (...)."""
        if self.missing:
            self._compute({token // self.BLOCK for token in tokens.flatten().tolist()})
        return nn.functional.embedding(tokens, self.table)

    @torch.no_grad()
    def _compute(self, blocks: set[int]) -> None:
        """Compute the blocks with these numbers, except for blocks that are already computed."""
        for block in blocks & self.missing:
            rows = slice(block * self.BLOCK, (block + 1) * self.BLOCK)
            self.table[rows] = self.layer(self.embedding.weight[rows].to(self.layer.weight.dtype))
            # Only now, because other threads use a block once it is not missing any more.
            self.missing.discard(block)
