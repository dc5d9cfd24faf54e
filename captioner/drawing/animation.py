"""A caption as an animation: the heatmap moves from word to word while the sentence grows."""

from __future__ import annotations

import html
import tempfile
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from captioner.caption import Caption
from captioner.data.images import Photo, open_image
from captioner.drawing.document import base64_uri, encoded
from captioner.drawing.frames import Scene, Shot, plan_shots
from captioner.drawing.heatmap import fit_photo
from captioner.drawing.options import (
    ANIMATIONS,
    AnimationOptions,
    check_caption,
    check_size,
    check_suffix,
)
from captioner.errors import ConfigError
from captioner.files import atomic_write
from captioner.option_fields import build_options

_MAX_SIDE = 16_382  # pixels; the largest even side that WebP supports
_MAX_PIXELS = 3840 * 2160  # of a frame; about 80 frames are in memory while a file is written
# Largest error of a GIF pixel, in levels of 255, while the map moves and while it rests.
_MOVING_ERROR, _RESTING_ERROR = 16, 7


class Animation:
    """An animation that can be saved or shown; frames are drawn on demand."""

    def __init__(self, scene: Scene, shots: list[Shot], rate: int) -> None:
        self._scene, self._shots, self._rate = scene, shots, rate

    @property
    def size(self) -> tuple[int, int]:
        """Width and height in pixels, both even."""
        return self._scene.width, self._scene.height

    @property
    def duration(self) -> float:
        """Length of one loop in seconds."""
        return sum(shot.frames for shot in self._shots) / self._rate

    def frames(self) -> Iterator[Image.Image]:
        """Iterate over all frames, RGB, at ``frames_per_second``."""
        for image, count in self._distinct_frames():
            for _ in range(count):
                yield image.copy()

    def save(self, path: str | Path) -> None:
        """Write the animation; GIF and WebP loop forever.

        Args:
            path: A file; its extension selects the format: ``.gif`` (256 colours, plays
                everywhere), ``.webp`` (full colour, small) or ``.mp4`` (H.264, smallest; requires
                PyAV).

        Raises:
            ConfigError: The format is not supported, or PyAV is not installed.
            OSError: The file cannot be written; an existing file is kept.
        """
        check_ending(path)
        writers = {".gif": self._gif, ".webp": self._webp, ".mp4": self._mp4}
        atomic_write(path, writers[Path(path).suffix.lower()]())

    def _repr_html_(self) -> str:
        data = base64_uri("webp", self._webp())
        alt = html.escape(f"Attention for each word of the caption: {self._scene.sentence}")
        return (
            f'<img alt="{alt}" width="{self._scene.width}" height="{self._scene.height}" '
            f'src="{data}">'
        )

    def _distinct_frames(self) -> Iterator[tuple[Image.Image, int]]:
        """Every distinct frame, and how many frames it lasts."""
        for shot in self._shots:
            yield self._scene.draw(shot), shot.frames

    def _durations(self, unit: int) -> list[int]:
        """Milliseconds of every distinct frame in multiples of ``unit``; the sum does not drift."""
        ends = np.cumsum([shot.frames for shot in self._shots]) * 1000 / self._rate
        whole = np.rint(ends / unit).astype(int) * unit
        return [int(length) for length in np.diff(whole, prepend=0)]

    def _webp(self) -> bytes:
        frames = (image for image, _ in self._distinct_frames())
        return _encode_loop("WEBP", frames, self._durations(1), quality=85, method=2)

    def _gif(self) -> bytes:
        durations, palette = self._durations(10), self._palette()  # GIF counts in 1/100 s
        frames = _index_frames(self._distinct_frames(), palette)
        return _encode_loop("GIF", frames, durations, optimize=True, disposal=1)

    def _palette(self) -> Image.Image:
        """One palette for all frames, so that static colours do not flicker."""
        resting = [shot for shot in self._shots if shot.frames > 1] or self._shots
        chosen = [
            resting[round(i)] for i in np.linspace(0, len(resting) - 1, min(12, len(resting)))
        ]
        width, height = self.size
        part = min(1.0, 240 / max(width, height))
        tile = max(1, round(width * part)), max(1, round(height * part))
        samples = [self._scene.draw(shot) for shot in chosen] + self._scene.palette_samples()
        sheet = Image.new("RGB", (tile[0], tile[1] * len(samples)))
        for row, sample in enumerate(samples):
            small = sample.resize(tile, Image.Resampling.NEAREST)
            sheet.paste(small, (0, row * tile[1]))
        fixed = self._scene.fixed_colours()
        found = sheet.quantize(255 - len(fixed), Image.Quantize.MEDIANCUT)
        colours = (found.getpalette() or [])[: 3 * (255 - len(fixed))]
        palette = Image.new("P", (1, 1))
        # One of the 256 entries stays free: GIF marks unchanged pixels with it.
        palette.putpalette([*np.ravel(fixed).tolist(), *colours])
        return palette

    def _mp4(self) -> bytes:
        av = _import_pyav()
        # The index goes to the front, so that browsers start at once; this needs a seekable file.
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "animation.mp4")
            self._encode_mp4(av, str(file))
            return file.read_bytes()

    def _encode_mp4(self, av: Any, path: str) -> None:
        with av.open(path, "w", options={"movflags": "+faststart"}) as container:
            stream = container.add_stream("libx264", rate=self._rate)
            stream.width, stream.height = self.size
            stream.pix_fmt = "yuv420p"
            stream.options = {"crf": "18", "preset": "fast", "tune": "animation"}
            context = stream.codec_context
            context.colorspace = context.color_primaries = context.color_trc = 1  # BT.709
            context.color_range = 1  # limited range, 16 to 235
            context.time_base = Fraction(1, self._rate)
            for image in self.frames():
                frame = av.VideoFrame.from_image(image)
                frame = frame.reformat(format="yuv420p", dst_colorspace="ITU709")
                container.mux(stream.encode(frame))
            container.mux(stream.encode(None))


def animate(photo: Photo, caption: Caption, **options: Any) -> Animation:
    """Animate the attention of a caption, word by word.

    Args:
        photo: The captioned photo: a path, bytes, PIL image, array or binary file.
        caption: The caption; all its maps share one colour scale.
        **options: Fields of ``AnimationOptions``, e.g. ``seconds_per_word=2``.

    Returns:
        The animation; frames are drawn when it is used.

    Raises:
        ConfigError: An option or the caption is invalid.
        ImageError: The photo cannot be read.
    """
    wanted = build_options(AnimationOptions, options)
    check_caption(caption)
    scene = Scene(fit_photo(open_image(photo), wanted.panel_size), caption, wanted)
    check_size("animation", scene.width, scene.height, _MAX_SIDE, _MAX_PIXELS)
    rate = wanted.frames_per_second
    return Animation(scene, plan_shots(len(caption.words), wanted.seconds_per_word, rate), rate)


def check_ending(path: str | Path) -> None:
    """Raise ConfigError if the file extension is not supported, or needs a missing package."""
    if check_suffix("an animation", path, ANIMATIONS) == ".mp4":
        _import_pyav()


def _index_frames(
    frames: Iterator[tuple[Image.Image, int]], palette: Image.Image
) -> Iterator[Image.Image]:
    """Convert frames to the palette.

    A pixel keeps its colour while the error is small, which makes the file three times smaller.
    There is no dithering, as its noise would move.
    """
    colours = np.asarray(palette.getpalette(), dtype=np.int16).reshape(-1, 3)
    shown: NDArray[np.uint8] | None = None
    for image, count in frames:
        indices = np.array(image.quantize(palette=palette, dither=Image.Dither.NONE))
        if shown is not None:
            allowed = _RESTING_ERROR if count > 1 else _MOVING_ERROR
            far = np.abs(colours[shown] - np.asarray(image, dtype=np.int16)).max(axis=2) > allowed
            indices = np.where(far, indices, shown)
        shown = indices
        frame = Image.fromarray(indices)
        frame.putpalette(palette.getpalette() or [])
        yield frame


def _encode_loop(
    kind: str, frames: Iterator[Image.Image], durations: list[int], **options: Any
) -> bytes:
    first = next(frames)
    given = {"save_all": True, "append_images": frames, "loop": 0, "duration": durations}
    return encoded(first, kind, **given, **options)


def _import_pyav() -> Any:
    try:
        import av
    except ImportError:
        raise ConfigError(
            "writing .mp4 requires PyAV: pip install 'captioner[video]' (.gif and .webp need no "
            "extra package)"
        ) from None
    return av
