"""Captions of videos: ``captioner caption clip.mp4 --every 5s -o clip.vtt``."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from captioner.cli.arguments import flag
from captioner.cli.formats import Entry, entry
from captioner.cli.outputs import warn
from captioner.data.progress import photo_bar
from captioner.errors import ConfigError, counted
from captioner.hardware import require_extra
from captioner.option_fields import Shown
from captioner.options import SearchOptions

if TYPE_CHECKING:
    from PIL import Image

    from captioner.cli.caption import CaptionOptions
    from captioner.data.video import Video
    from captioner.inference.captioner import Captioner

_UNITS = {"ms": 0.001, "": 1.0, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}


@dataclass(frozen=True, kw_only=True)
class VideoOptions:
    """Videos."""

    every: Annotated[str, Shown("TIME")] | None = None
    """Caption videos instead of photos: a frame at this interval (5s, 0.5s, 2m), or the first of
    each shot (shot). Equal captions that follow each other become one."""


def interval(options: CaptionOptions) -> float | None:
    """The interval in seconds, None for shots; ConfigError for what videos do not have."""
    require_extra("video", "--every")
    for name in ("sidecar", "embed", "in_place", "resume", "annotations"):
        if getattr(options, name):
            raise ConfigError(f"{flag(name)} is for photos; leave it out, or --every")
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
        video, places = Video(path, every, side), deque[Entry]()
        results = model.stream(
            _images(video, places), batch_size=options.batch_size, **vars(search)
        )
        bar, captions = photo_bar(results, unit="frame", desc=path.name), 0
        for one in merged(places.popleft() | entry(name, r.captions, options) for r in bar):
            bar.total = every and int(video.duration / every) + 1
            captions += bool(one["captions"])
            yield one
        if captions:
            warn(f"{name}: {counted(captions, 'caption')}")
        if video.problem:
            yield {"image": name, "error": video.problem}


def _images(video: Video, places: deque[Entry]) -> Iterator[Image.Image]:
    """The images of frames; their places are appended."""
    for start, end, image in video.frames():
        places.append({"image": video.path, "start": round(start, 3), "end": round(end, 3)})
        yield image


def merged(entries: Iterable[Entry]) -> Iterator[Entry]:
    """The entries; of those that follow each other with equal captions, the most confident."""

    def confidence(one: Entry) -> float:
        return one["captions"][0]["confidence"] or 0.0 if one["captions"] else 0.0

    for _, group in groupby(entries, lambda one: [c["text"] for c in one["captions"]]):
        same = list(group)
        yield max(same, key=confidence) | {"start": same[0]["start"], "end": same[-1]["end"]}
