"""Captions that leave out their last words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from captioner.caption_types import Caption, LeftOut


def cut(caption: Caption, count: int, truth: Sequence[float]) -> Caption:
    """The caption as one that says its first ``count`` words only; ``truth`` is that of all."""
    known = np.array(truth, np.float32)
    first, rest = slice(count), slice(count, None)
    left_out = LeftOut(
        caption.words[rest],
        caption.log_probs[rest],
        caption.alphas[rest],
        caption.gates[rest],
        known[rest],
        caption.pieces[rest],
    )
    return replace(
        caption,
        words=caption.words[first],
        log_probs=caption.log_probs[first],
        alphas=caption.alphas[first],
        gates=caption.gates[first],
        pieces=caption.pieces[first],
        alternatives=caption.alternatives[first],
        truth=known[first],
        left_out=left_out,
    )
