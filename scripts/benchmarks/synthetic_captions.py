"""Captions of made-up words with the length and word statistics of COCO's, for benchmarks."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np

# Number of COCO captions by length in tokens, without start and end (3,431 of train2017).
LENGTHS = {7: 29, 8: 563, 9: 754, 10: 721, 11: 518, 12: 367, 13: 185, 14: 106, 15: 60, 16: 41,
           17: 33, 18: 10, 19: 12, 20: 5, 21: 7, 22: 6, 23: 3, 24: 3, 25: 4, 26: 1}  # fmt: skip

CAPTIONS = 5  # per photo
WORDS = 25_000  # as in COCO; frequencies follow Zipf's law
FOLLOWERS = 300  # number of words that may follow a given word


def captions(photos: int, seed: int = 0) -> Iterator[str]:
    """Yield ``CAPTIONS`` captions for each photo in turn."""
    generator = np.random.default_rng(seed)
    names = ["".join(letters) for letters in itertools.product("bdfgklmn", "aeiou", repeat=3)]
    names = [f"{name}{'s' if n >= len(names) // 2 else ''}" for n, name in enumerate(names)][:WORDS]
    words = len(names)
    shares = 1 / np.arange(1, words + 1)
    followers = generator.choice(words, (words, FOLLOWERS), p=shares / shares.sum())
    pool = np.repeat(list(LENGTHS), list(LENGTHS.values()))
    for start in range(0, photos, 1000):
        lengths = generator.choice(pool, (min(1000, photos - start) * CAPTIONS))
        steps = np.minimum(generator.zipf(1.3, (len(lengths), int(pool.max()))), FOLLOWERS) - 1
        rows = np.empty_like(steps)
        rows[:, 0] = steps[:, 0]
        for t in range(1, rows.shape[1]):
            rows[:, t] = followers[rows[:, t - 1], steps[:, t]]
        for row, length in zip(rows.tolist(), lengths.tolist(), strict=True):
            yield " ".join([names[word] for word in row[:length]]).capitalize() + "."


def write_annotations(path: Path, photos: int) -> None:
    """Write a COCO captions file."""
    images = [{"id": n, "file_name": f"{n:012}.jpg"} for n in range(1, photos + 1)]
    annotations = [
        {"id": n, "image_id": 1 + n // CAPTIONS, "caption": text}
        for n, text in enumerate(captions(photos))
    ]
    content = {"images": images, "annotations": annotations}
    path.write_text(json.dumps(content), encoding="utf-8")
