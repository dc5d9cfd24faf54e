"""Frames of a video, read with PyAV (FFmpeg) at a fixed interval or at the start of each shot."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import av
import av.filter
from PIL import Image

from captioner.data.images import open_file
from captioner.errors import ImageError
from captioner.messages import clock

MAX_PIXELS = 1 << 26
"""Limit on the pixels of a video frame, because a decoder keeps dozens of frames in memory."""

_NEW_SHOT = 0.3
"""The scene score above which a frame begins a new shot. FFmpeg computes the score, 0 to 1."""
_SEEK = 10.0
"""Shortest interval between frames at which the decoder skips to key frames (seconds)."""


class Video:
    """A video with frames that can be read once, in order.

    Damaged frames are skipped. After the last frame, ``problem`` describes the damage.
    """

    def __init__(self, path: str | Path, every: float | None, min_side: int) -> None:
        """Open a video.

        Args:
            path: The file.
            every: Interval between frames (seconds). None selects the first frame of each shot.
            min_side: Length to which the shorter side of larger frames is scaled (pixels).
        """
        self.path, self.every, self.min_side = path, every, min_side
        self.problem = ""
        """One line about damage, starting with the path. Empty if all frames were read."""
        self.duration = 0.0
        """Duration according to the header (seconds), or 0 if it is unknown."""
        self._end = self._read_to = 0.0  # end of the frames, and of the packets (seconds)
        self._damage = math.inf  # time of the first damage (seconds)

    def frames(self) -> Iterator[Image.Image]:
        """Yield the frames as upright RGB images.

        The ``info`` of each image has its start and end (seconds).
        """
        end_of_last = ((self._end, None) for _ in range(1))  # known after the last frame
        try:
            with open_file(self.path) as file, self._opened(file):
                found = self._shots() if self.every is None else self._sampled()
                for (start, frame), (end, _) in pairwise(chain(found, end_of_last)):
                    image = self._image(frame)
                    image.info |= {"start": round(start, 3), "end": round(max(start, end), 3)}
                    yield image
        except ImageError as error:
            self.problem = f"{self.path}: {error}"
            return
        except Exception:  # damaged files make PyAV raise nearly anything
            self._damage = min(self._damage, self._end)
        if max(self._read_to, self._end) + 1 < self.duration:
            self._damage = min(self._damage, self._end)
        if self._damage < math.inf:
            where = f"{self.path}: the video is damaged or truncated at {clock(self._damage)}"
            self.problem = f"{where}; the readable frames are captioned"

    def _opened(self, file: Any) -> Any:
        """Open the video in a file, and return its container, which the caller has to close.

        Raises:
            ImageError: The file is not a video, or its frames are too large.
        """
        try:
            # No protocols, because a playlist could name other files and addresses.
            container = av.open(file, "r", options={"protocol_whitelist": "none"})
            stream: Any = container.streams.best("video") or container.streams.video[0]
        except Exception as error:
            reason = getattr(error, "strerror", None) or "it has no video stream"
            raise ImageError(
                f"the file is damaged or not a video ({reason}); use a complete video file"
            ) from error
        if "image2" in container.format.name or container.format.name.endswith("_pipe"):
            raise ImageError("the file is a photo, not a video; leave out --every to caption it")
        if stream.width * stream.height > MAX_PIXELS:
            raise ImageError(
                f"the video is {stream.width} x {stream.height} pixels, but the limit is "
                f"{MAX_PIXELS:,} pixels per frame; scale the video down"
            )
        stream.codec_context.options = {"max_pixels": str(MAX_PIXELS)}
        stream.thread_type = "AUTO"
        self._container, self._stream = container, stream
        self._start = (container.start_time or 0) / av.time_base
        self.duration = (container.duration or 0) / av.time_base
        return container

    def _sampled(self) -> Iterator[tuple[float, Any]]:
        """Yield the time (seconds) and the visible frame for each multiple of the interval.

        A frame that is visible at several multiples is yielded only once.
        """
        every = self.every or 1.0
        due, before, shown, seeking = 0.0, 0.0, None, every >= _SEEK
        for time, frame in self._decoded():
            if time < before:  # seeking went back: key frames are farther apart than `every`
                seeking = False
            if shown is not None and time > due:
                yield due, shown
                due = every * math.ceil(time / every)
                if seeking and time < due < self.duration:  # to the key frame before `due`
                    with suppress(av.FFmpegError, OSError):
                        self._container.seek(round((due + self._start) * av.time_base))
            shown, before = frame, time
        if shown is not None and due < self._end:
            yield due, shown

    def _shots(self) -> Iterator[tuple[float, Any]]:
        """Yield the first frame of each shot with its time (seconds)."""
        graph = av.filter.Graph()
        source = graph.add_buffer(template=self._stream)
        select = graph.add("select", f"eq(n,0)+gt(scene,{_NEW_SHOT})")
        graph.link_nodes(source, select, graph.add("buffersink")).configure()
        for time, frame in self._decoded():
            graph.vpush(frame)
            try:
                graph.vpull()
            except (av.BlockingIOError, av.EOFError):  # not a new shot
                continue
            yield time, frame

    def _decoded(self) -> Iterator[tuple[float, Any]]:
        """Yield all undamaged frames with their times (seconds), from the current position on."""
        packets = self._container.demux()
        while True:
            try:
                if (packet := next(packets, None)) is None:
                    return
                if packet.pts is not None:
                    after = float((packet.pts + (packet.duration or 0)) * packet.time_base)
                    self._read_to = max(self._read_to, after - self._start)
                frames: Any = packet.decode() if packet.stream == self._stream else []
            except (av.FFmpegError, OSError):  # a damaged packet, or the end of the readable part
                self._damage = min(self._damage, self._end)
                continue
            for frame in frames:
                if frame.is_corrupt or frame.time is None:
                    self._damage = min(self._damage, self._end)
                    continue
                time = max(0.0, frame.time - self._start)
                yield time, frame
                length = float((frame.duration or 0) * frame.time_base)
                self._end = max(self._end, time + max(length, 0.001))

    def _image(self, frame: Any) -> Image.Image:
        """Return a frame as an upright RGB image, scaled down to ``min_side``."""
        scale = min(1.0, self.min_side / min(frame.width, frame.height))
        width, height = (max(1, round(side * scale)) for side in (frame.width, frame.height))
        image: Image.Image = frame.to_image(width=width, height=height, interpolation="AREA")
        return image.rotate(frame.rotation, expand=True) if frame.rotation else image
