"""Small videos of plain colours."""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction
from pathlib import Path

import numpy as np

COLOURS = {"red": (255, 0, 0), "green": (0, 255, 0), "blue": (0, 0, 255), "white": (255,) * 3}


def write_video(
    path: Path, frames: Iterable[tuple[float, str]], *, keep: int = 12, **options: str
) -> Path:
    """Write frames that are given by their time (seconds) and colour; the left third is black.

    Every ``keep``-th is a key frame. The options are of the format that the extension selects.
    """
    import av

    with av.open(str(path), "w", options=options) as container:
        stream = container.add_stream("mpeg4", rate=25)
        stream.width, stream.height, stream.pix_fmt = 96, 64, "yuv420p"
        stream.codec_context.gop_size = keep
        stream.codec_context.time_base = Fraction(1, 1000)
        for time, colour in frames:
            pixels = np.zeros((64, 96, 3), np.uint8)
            pixels[:, 32:] = COLOURS[colour]
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            frame.pts, frame.time_base = round(time * 1000), Fraction(1, 1000)
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return path


def shots(*colours: str, seconds: float = 2.0) -> list[tuple[float, str]]:
    """Frames of shots of one colour each, 25 per second."""
    count = round(25 * seconds)
    return [(n / 25, colours[n // count]) for n in range(count * len(colours))]
