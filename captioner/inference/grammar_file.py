"""The file ``grammar.safetensors`` of a model folder (see ``search.grammar``)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save

from captioner.inference.confidence import read_arrays
from captioner.inference.names import GRAMMAR
from captioner.search.grammar import Grammar

FORMAT_VERSION = 1


def grammar_bytes(grammar: Grammar) -> bytes:
    """Return a grammar as the content of ``grammar.safetensors``."""
    arrays: dict[str, NDArray[Any]] = {
        "endings": grammar.endings.astype(np.float16),
        "not_ending": grammar.not_ending.astype(np.int32),
        "not_following": grammar.not_following.astype(np.int32),
        "not_third": grammar.not_third,
    }
    return save(arrays, metadata={"grammar": json.dumps({"format_version": FORMAT_VERSION})})


def read_grammar(folder: Path, size: int) -> Grammar | None:
    """Read the grammar of a model folder, or return None if it has no grammar.

    Args:
        folder: The model folder.
        size: Number of tokens in the model's vocabulary, V.

    Raises:
        ModelError: The file is damaged, was written by a later version or belongs to another
            vocabulary.
    """
    path = folder / GRAMMAR
    if not path.is_file():
        return None
    with read_arrays(path, FORMAT_VERSION, "copy the whole folder again") as (_, arrays):
        grammar = Grammar(
            arrays["endings"].astype(np.float32),
            arrays["not_ending"].astype(np.int64),
            arrays["not_following"].astype(np.int64),
            arrays["not_third"].astype(np.int64),
        )
        pairs = np.concatenate([grammar.not_ending, grammar.not_following])
        triples = grammar.not_third
        fits = (pairs >= 0) & (pairs < size**2), (triples >= 0) & (triples < size**3)
        if grammar.endings.shape != (size,) or not all(part.all() for part in fits):
            raise ValueError("the grammar does not match the vocabulary in config.json")
        return grammar
