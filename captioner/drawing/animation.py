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
from PIL import Image, ImageColor

from captioner.caption import Caption
from captioner.data.images import Photo, open_image
from captioner.drawing.document import base64_uri, encoded
from captioner.drawing.frames import Scene, plan_shots
from captioner.drawing.heatmap import attention_image, fit_photo
from captioner.drawing.options import (
    ANIMATIONS,
    AnimationOptions,
    check_captions,
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

    def __init__(self, scene: Scene) -> None:
        options, words = scene.options, len(scene.caption.words)
        self._scene, self._rate = scene, options.frames_per_second
        self._shots = plan_shots(words, options.seconds_per_word, self._rate)

    @property
    def size(self) -> tuple[int, int]:
        """Width and height in pixels, both even."""
        return self._scene.size

    @property
    def duration(self) -> float:
        """Length of one loop in seconds."""
        return sum(shot.frames for shot in self._shots) / self._rate

    def frames(self) -> Iterator[Image.Image]:
        """Iterate over all frames, RGB, at ``frames_per_second``."""
        for shot in self._shots:
            image = self._scene.draw(shot)
            for _ in range(shot.frames):
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
        writers = {".gif": self._gif, ".webp": self._webp, ".mp4": self._mp4}
        atomic_write(path, writers[check_ending(path)]())

    def _repr_html_(self) -> str:
        data, (width, height) = base64_uri("webp", self._webp()), self.size
        sentence = self._scene.caption.text or "no words"
        alt = html.escape(f"Attention for each word of the caption: {sentence}")
        return f'<img alt="{alt}" width="{width}" height="{height}" src="{data}">'

    def _loop(self, kind: str, frames: Iterator[Image.Image], unit: int, **options: Any) -> bytes:
        """Encode the distinct frames, whose durations are multiples of ``unit`` milliseconds."""
        ends = np.cumsum([shot.frames for shot in self._shots]) * 1000 / self._rate
        whole = np.rint(ends / unit).astype(int) * unit  # rounded ends do not drift
        durations = np.diff(whole, prepend=0).tolist()
        first = next(frames)
        given = {"save_all": True, "append_images": frames, "loop": 0, "duration": durations}
        return encoded(first, kind, **given, **options)

    def _webp(self) -> bytes:
        return self._loop("WEBP", map(self._scene.draw, self._shots), 1, quality=85, method=2)

    def _gif(self) -> bytes:
        # GIF counts in 1/100 s.
        return self._loop("GIF", self._indexed_frames(), 10, optimize=True, disposal=1)

    def _indexed_frames(self) -> Iterator[Image.Image]:
        """The distinct frames, converted to the palette.

        A pixel keeps its colour while the error is small, which makes the file three times smaller.
        There is no dithering, as its noise would move.
        """
        palette = self._palette()
        colours = np.asarray(palette.getpalette(), dtype=np.int16).reshape(-1, 3)
        shown: NDArray[np.uint8] | None = None
        for shot in self._shots:
            image = self._scene.draw(shot)
            indices = np.array(image.quantize(palette=palette, dither=Image.Dither.NONE))
            if shown is not None:
                allowed = _RESTING_ERROR if shot.frames > 1 else _MOVING_ERROR
                error = np.abs(colours[shown] - np.asarray(image, dtype=np.int16)).max(axis=2)
                indices = np.where(error > allowed, indices, shown)
            shown = indices
            frame = Image.fromarray(indices)
            frame.putpalette(palette.getpalette() or [])
            yield frame

    def _palette(self) -> Image.Image:
        """One palette for all frames, so that static colours do not flicker."""
        scene, theme = self._scene, self._scene.theme
        resting = [shot for shot in self._shots if shot.frames > 1] or self._shots
        places = np.linspace(0, len(resting) - 1, min(12, len(resting)))
        samples = [scene.draw(resting[round(place)]) for place in places]
        # High levels of attention, which are rare in frames, need colours too.
        samples += [
            attention_image(
                scene.photo, np.full((1, 1), level), scale_max=1.0, colormap=scene.options.colormap
            )
            for level in (0.4, 0.65, 0.9)
        ]
        part = min(1.0, 240 / max(self.size))
        tile = max(1, round(self.size[0] * part)), max(1, round(self.size[1] * part))
        sheet = Image.new("RGB", (tile[0], tile[1] * len(samples)))
        for row, sample in enumerate(samples):
            sheet.paste(sample.resize(tile, Image.Resampling.NEAREST), (0, row * tile[1]))
        names = (theme.background, theme.text, theme.muted, theme.track, theme.gate)
        fixed = [ImageColor.getrgb(name)[:3] for name in (*names, theme.highlight)]
        count = 255 - len(fixed)  # one of 256 stays free: GIF marks unchanged pixels with it
        found = sheet.quantize(count, Image.Quantize.MEDIANCUT).getpalette() or []
        palette = Image.new("P", (1, 1))
        palette.putpalette([*np.ravel(fixed).tolist(), *found[: 3 * count]])
        return palette

    def _mp4(self) -> bytes:
        av = _import_pyav()
        # The index goes to the front, so that browsers start at once; this needs a seekable file.
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "animation.mp4")
            with av.open(str(file), "w", options={"movflags": "+faststart"}) as container:
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
            return file.read_bytes()


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
    check_captions(caption)
    scene = Scene(fit_photo(open_image(photo), wanted.panel_size), caption, wanted)
    check_size("animation", *scene.size, _MAX_SIDE, _MAX_PIXELS)
    return Animation(scene)


def check_ending(path: str | Path) -> str:
    """The file extension; ConfigError if it is not supported, or needs a missing package."""
    suffix = check_suffix("an animation", path, ANIMATIONS)
    if suffix == ".mp4":
        _import_pyav()
    return suffix


def _import_pyav() -> Any:
    try:
        import av
    except ImportError:
        raise ConfigError(
            "writing .mp4 requires PyAV: pip install 'captioner[video]' (.gif and .webp need no "
            "extra package)"
        ) from None
    return av
