"""Captions for videos (``captioner caption --every``)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from captioner.cli.rows import Name, Row, Wording, make_row
from captioner.data.reading import photo_bar
from captioner.errors import ConfigError
from captioner.options import SearchOptions

if TYPE_CHECKING:
    from captioner.inference.captioner import Captioner

_UNITS = {"ms": 0.001, "": 1.0, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}


def read_interval(every: str) -> float | None:
    """Return the interval of ``--every`` in seconds, or None for shots.

    Raises:
        ConfigError: ``every`` is neither a time nor ``shot``.
    """
    if every == "shot":
        return None
    found = re.fullmatch(r"(\d+\.?\d*|\.\d+) ?(ms|s|m|min|h|)", every)
    if not found or not float(found[1]):
        raise ConfigError(f"--every is {every!r}; use a time such as 5s or 2m, or the word 'shot'")
    return float(found[1]) * _UNITS[found[2]]


def video_rows(
    model: Captioner,
    names: Mapping[Path, Name],
    every: float | None,
    *,
    batch_size: int,
    search: SearchOptions,
    wording: Wording,
) -> Iterator[Row]:
    """Caption one frame of each video per interval (seconds), or per shot if ``every`` is None.

    Yield each caption with its start and end. If a video is damaged, yield its error too.
    """
    from captioner.data.images import reduced_side
    from captioner.data.video import Video

    side = reduced_side(model.ensemble.image_size)
    for path, name in names.items():
        video = Video(path, every, side)
        results = model.stream(
            video.frames(), batch_size=batch_size, keep_photos=False, **vars(search)
        )
        bar = photo_bar(results, unit="frame", desc=path.name)
        found = (one.photo.info | make_row(name, one.captions, wording) for one in bar)
        for row in merged(found):
            bar.total = every and int(video.duration / every) + 1
            yield row
        if video.problem:
            yield {"image": name, "error": video.problem}


def merged(rows: Iterable[Row]) -> Iterator[Row]:
    """Merge consecutive rows with the same captions into one row.

    The row has the start of the first row, the end of the last row, and the captions of the row
    with the highest confidence.
    """
    for _, group in groupby(rows, lambda row: [c["text"] for c in row["captions"]]):
        same = list(group)
        best = max(same, key=lambda row: [c["confidence"] or 0.0 for c in row["captions"]])
        span = {"start": same[0]["start"], "end": same[-1]["end"]}
        yield {"image": best["image"], **span, "captions": best["captions"]}
