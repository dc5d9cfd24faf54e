"""Captions of videos: ``captioner caption clip.mp4 --every 5s -o clip.vtt``."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from captioner.cli.arguments import refuse
from captioner.cli.formats import Entry, entry
from captioner.data.progress import photo_bar
from captioner.errors import ConfigError
from captioner.hardware import require_extra
from captioner.options import SearchOptions

if TYPE_CHECKING:
    from captioner.cli.caption import CaptionOptions
    from captioner.inference.captioner import Captioner

_UNITS = {"ms": 0.001, "": 1.0, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}


def interval(options: CaptionOptions) -> float | None:
    """The interval in seconds, None for shots; ConfigError for what videos do not have."""
    require_extra("video", "--every")
    photos = ("sidecar", "embed", "in_place", "resume", "annotations")
    refuse(options, photos, "is for photos; leave it out, or --every")
    if "-" in options.photos:
        raise ConfigError("videos cannot be read from standard input (-); give files")
    if options.every == "shot":
        return None
    found = re.fullmatch(r"(\d+\.?\d*|\.\d+) ?(ms|s|m|min|h|)", str(options.every))
    if not found or not float(found[1]):
        raise ConfigError(f"--every is {options.every!r}; give a time such as 5s or 2m, or shot")
    return float(found[1]) * _UNITS[found[2]]


def video_entries(
    model: Captioner,
    named: Sequence[tuple[Path, str | int]],
    options: CaptionOptions,
    search: SearchOptions,
) -> Iterator[Entry]:
    """Caption frames; yield each caption with start and end (seconds), and what cannot be read."""
    from captioner.data.images import reduced_side
    from captioner.data.video import Video

    every, side = interval(options), reduced_side(model.ensemble.image_size)
    for path, name in named:
        video = Video(path, every, side)
        results = model.stream(video.frames(), batch_size=options.batch_size, **vars(search))
        bar = photo_bar(results, unit="frame", desc=path.name)
        found = (entry(name, one.captions, options) for one in bar)
        for one in merged(found, video.times):
            bar.total = every and int(video.duration / every) + 1
            yield one
        if video.problem:
            yield {"image": name, "error": video.problem}


def merged(entries: Iterable[Entry], times: deque[tuple[float, float]]) -> Iterator[Entry]:
    """The entries with times; of neighbours with equal captions, the most confident."""
    for _, group in groupby(entries, lambda one: [c["text"] for c in one["captions"]]):
        same = list(group)
        spans = [times.popleft() for _ in same]
        start, end = round(spans[0][0], 3), round(spans[-1][1], 3)
        best = max(same, key=lambda one: [c["confidence"] or 0.0 for c in one["captions"]])
        yield {"image": "", "start": start, "end": end} | best
