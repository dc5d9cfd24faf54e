"""A caption as a moving picture: the map glides over the photo while the sentence grows.

    ┌─────────────────────┐
    │ ▒▒▒▒▒▒▒▓▓▓▒▒▒▒▒▒▒▒▒ │  the photo under the map
    │ a brown [dog]       │  what was said so far; room for the whole sentence from the start
    │ β ▬▬▬▬ 0.91  p 0.42 │  gate and probability of the word; the scale of the colours
    └─────────────────────┘

A word's map fades into the next one's: every frame shows a true map, on the scale of the whole
caption. At the end the coverage, the mean of all maps, stays for a while with the whole sentence.
"""

from __future__ import annotations

import base64
import html
import io
import math
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from captioner.caption import Caption, join_words
from captioner.data.images import open_image
from captioner.errors import ConfigError
from captioner.files import atomic_write
from captioner.visualization import lettering
from captioner.visualization.heatmap import (
    attention_image,
    check_colormap,
    fit_photo,
    scale_bar,
    shared_scale,
)
from captioner.visualization.maps import between, check_caption, coverage, ease
from captioner.visualization.theme import Theme, theme_of

ANIMATIONS = (".gif", ".webp", ".mp4")
"""File name endings of animations."""

_MAX_SIDE = 16_382  # pixels; what WebP can hold, even
_MAX_PIXELS = 3840 * 2160  # of a frame; some 80 of them are in memory while a file is written
_GLIDE = 0.55  # of a word's time: the map moves, then it rests
_PAUSE = 2.0  # seconds of the whole sentence at the end
_MOVING, _STILL = 16, 7  # levels of 255 that a pixel of a GIF may be off while the map moves, rests
_MIN_WIDTH = 280  # pixels of the text below the photo


class Animation:
    """A moving picture that can be saved or shown; it is drawn frame by frame when it is used."""

    def __init__(self, scene: _Scene, shots: list[_Shot], rate: int) -> None:
        self._scene, self._shots, self._rate = scene, shots, rate

    @property
    def size(self) -> tuple[int, int]:
        """Width and height in pixels; both even, as video wants them."""
        return self._scene.width, self._scene.height

    @property
    def duration(self) -> float:
        """Seconds until it starts again."""
        return sum(shot.frames for shot in self._shots) / self._rate

    def frames(self) -> Iterator[Image.Image]:
        """Every frame in turn, RGB, ``frames_per_second`` a second; one is in memory at a time."""
        for image, count in self._held():
            for _ in range(count):
                yield image.copy()

    def save(self, path: str | Path) -> None:
        """Write the animation, looping for ever where the format can.

        Args:
            path: A file whose ending says the format: ``.gif`` (256 colours, plays everywhere),
                ``.webp`` (true colours, small) or ``.mp4`` (H.264, smallest; needs PyAV).

        Raises:
            ConfigError: No such format, or PyAV is missing.
            OSError: It cannot be written; the old file stays.
        """
        check_ending(path)
        writers = {".gif": self._gif, ".webp": self._webp, ".mp4": self._mp4}
        atomic_write(path, writers[Path(path).suffix.lower()]())

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        data = base64.b64encode(self._webp()).decode()
        about = html.escape(f"Where the model looked while it said: {self._scene.sentence}")
        return (
            f'<img alt="{about}" width="{self._scene.width}" height="{self._scene.height}" '
            f'src="data:image/webp;base64,{data}">'
        )

    def _held(self) -> Iterator[tuple[Image.Image, int]]:
        """Every different frame, and how many frames long it stays."""
        for shot in self._shots:
            yield self._scene.draw(shot), shot.frames

    def _durations(self, unit: int) -> list[int]:
        """Milliseconds of every different frame, whole units; the sum does not drift."""
        ends = np.cumsum([shot.frames for shot in self._shots]) * 1000 / self._rate
        whole = np.rint(ends / unit).astype(int) * unit
        return [int(length) for length in np.diff(whole, prepend=0)]

    def _webp(self) -> bytes:
        images = (image for image, _ in self._held())
        first = next(images)
        durations = self._durations(1)
        return _saved(first, "WEBP", durations, append_images=images, quality=85, method=2)

    def _gif(self) -> bytes:
        durations = self._durations(10)  # GIF counts hundredths of a second
        palette = self._palette()
        indexed = _indexed(self._held(), palette)
        first = next(indexed)
        return _saved(first, "GIF", durations, append_images=indexed, optimize=True, disposal=1)

    def _palette(self) -> Image.Image:
        """One palette for all frames: colours that stay do not flicker."""
        resting = [shot for shot in self._shots if shot.frames > 1] or self._shots
        chosen = [
            resting[round(i)] for i in np.linspace(0, len(resting) - 1, min(12, len(resting)))
        ]
        width, height = self.size
        part = min(1.0, 240 / max(width, height))
        tile = max(1, round(width * part)), max(1, round(height * part))
        samples = [self._scene.draw(shot) for shot in chosen] + self._scene.lit()
        sheet = Image.new("RGB", (tile[0], tile[1] * len(samples)))
        for place, sample in enumerate(samples):
            small = sample.resize(tile, Image.Resampling.NEAREST)
            sheet.paste(small, (0, place * tile[1]))
        fixed = self._scene.fixed_colours()
        found = sheet.quantize(255 - len(fixed), Image.Quantize.MEDIANCUT)
        colours = (found.getpalette() or [])[: 3 * (255 - len(fixed))]
        palette = Image.new("P", (1, 1))
        # One of the 256 places stays free: GIF marks with it what did not change.
        palette.putpalette([*np.ravel(fixed).tolist(), *colours])
        return palette

    def _mp4(self) -> bytes:
        av = _pyav()
        # The index goes to the front, so that a browser can start at once: that needs a real file.
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "animation.mp4")
            self._encode(av, str(file))
            return file.read_bytes()

    def _encode(self, av: Any, path: str) -> None:
        with av.open(path, "w", options={"movflags": "+faststart"}) as container:
            stream = container.add_stream("libx264", rate=self._rate)
            stream.width, stream.height = self.size
            stream.pix_fmt = "yuv420p"
            stream.options = {"crf": "18", "preset": "fast", "tune": "animation"}
            context = stream.codec_context
            context.colorspace = context.color_primaries = context.color_trc = 1  # BT.709
            context.color_range = 1  # 16 to 235, as televisions have it
            context.time_base = Fraction(1, self._rate)
            for image in self.frames():
                frame = av.VideoFrame.from_image(image)
                frame = frame.reformat(format="yuv420p", dst_colorspace="ITU709")
                container.mux(stream.encode(frame))
            container.mux(stream.encode(None))


def animate(
    photo: Image.Image | str | Path,
    caption: Caption,
    *,
    seconds_per_word: float = 1.0,
    frames_per_second: int = 15,
    panel_size: int = 480,
    smooth: bool = True,
    colormap: str = "inferno",
    theme: Literal["light", "dark"] = "light",
) -> Animation:
    """Let the map glide over the photo while the sentence grows.

    Args:
        photo: The photo that was captioned, or its path.
        caption: The caption; all its maps are drawn on one scale.
        seconds_per_word: How long a word stays, the way to it included.
        frames_per_second: Frames a second, 1 to 50.
        panel_size: Longest side of the photo in pixels: a larger one is scaled down, a smaller one
            never up. 0 leaves every photo at its own size.
        smooth: Interpolate the maps; False shows the regions as the blocks they are.
        colormap: One of ``COLORMAPS``.
        theme: ``light`` or ``dark`` paper.

    Returns:
        The animation, not drawn yet.

    Raises:
        ConfigError: An option that cannot be, or what is no caption.
        ImageError: The photo cannot be read.
    """
    check_colormap(colormap)
    check_caption(caption)
    colours = theme_of(theme)
    if not 0.05 <= seconds_per_word <= 60:
        raise ConfigError(f"seconds_per_word is {seconds_per_word}; give 0.05 to 60")
    if frames_per_second not in range(1, 51):
        raise ConfigError(f"frames_per_second is {frames_per_second}; give a whole number, 1 to 50")
    shown = fit_photo(open_image(photo), panel_size)
    scene = _Scene(shown, caption, colours, smooth=smooth, colormap=colormap)
    if max(scene.width, scene.height) > _MAX_SIDE or scene.width * scene.height > _MAX_PIXELS:
        raise ConfigError(
            f"the animation would have {scene.width} x {scene.height} pixels; give a smaller "
            f"panel_size ({_MAX_PIXELS:,} pixels and a side of {_MAX_SIDE:,} at most)"
        )
    shots = _shots(len(caption.words), seconds_per_word, frames_per_second)
    return Animation(scene, shots, frames_per_second)


def check_ending(path: str | Path) -> None:
    """Refuse a file name whose ending is no format of an animation, or whose writer is missing."""
    ending = Path(path).suffix.lower()
    if ending not in ANIMATIONS:
        raise ConfigError(
            f"{path}: an animation cannot be saved as {ending or 'a file without ending'}; "
            f"give one of {', '.join(ANIMATIONS)}"
        )
    if ending == ".mp4":
        _pyav()


@dataclass(frozen=True)
class _Shot:
    """A frame and how long it stays. ``word`` T is the whole caption after its T words."""

    word: int
    part: float
    """Of the way from the word before, 0 to 1."""
    frames: int


def _shots(words: int, seconds_per_word: float, rate: int) -> list[_Shot]:
    """The frames of T words and of the pause at the end."""
    last = max(1, round(_PAUSE * rate))
    if not words:
        return [_Shot(0, 1.0, last)]
    shots = []
    for word in range(words + 1):
        # Counted from the start, so that rounding to frames does not add up.
        length = round((word + 1) * seconds_per_word * rate) - round(word * seconds_per_word * rate)
        length = max(1, length) if word < words else last
        glide = 0 if word == 0 else min(length - 1, round(_GLIDE * seconds_per_word * rate))
        shots += [_Shot(word, (step + 1) / (glide + 1), 1) for step in range(glide)]
        shots.append(_Shot(word, 1.0, length - glide))
    return shots


class _Scene:
    """Draws any frame of an animation; whatever does not move has its place from the start."""

    def __init__(
        self,
        photo: Image.Image,
        caption: Caption,
        colours: Theme,
        *,
        smooth: bool,
        colormap: str,
    ) -> None:
        self.photo, self.caption, self.colours = photo, caption, colours
        self.smooth, self.colormap = smooth, colormap
        self.sentence = caption.text or "no words"
        self.scale = shared_scale(caption.alphas)
        inner = max(photo.width, _MIN_WIDTH)
        self.text = max(13, min(22, round(inner / 26)))
        self.margin = round(0.9 * self.text)
        self.words = _placed(caption.words, self.text, inner)
        lines = 1 + max((line for _, line, _ in self.words), default=0)
        self.sentence_top = self.margin + photo.height + round(0.75 * self.text)
        self.numbers_top = self.sentence_top + round(1.55 * self.text) * lines + self.text // 2
        self.small = max(11, round(0.78 * self.text))
        self.inner = inner
        width = inner + 2 * self.margin
        height = self.numbers_top + round(1.9 * self.small) + self.margin
        self.width, self.height = width + width % 2, height + height % 2
        self.corner = self.margin + (inner - photo.width) // 2, self.margin

    def fixed_colours(self) -> list[tuple[int, int, int]]:
        """Colours of paper and letters."""
        from PIL import ImageColor

        c = self.colours
        names = c.paper, c.ink, c.quiet, c.track, c.gate, c.shade
        return [_rgb(ImageColor.getrgb(name)) for name in names]

    def lit(self) -> list[Image.Image]:
        """The photo under even light: strong light is rare in the frames, and still to be seen."""
        if not self.caption.words:
            return [self.photo]
        levels = (np.full((1, 1), level, dtype=np.float32) for level in (0.4, 0.65, 0.9))
        return [
            attention_image(self.photo, level, scale_max=1.0, colormap=self.colormap)
            for level in levels
        ]

    def draw(self, shot: _Shot) -> Image.Image:
        """One frame."""
        image = Image.new("RGB", (self.width, self.height), self.colours.paper)
        draw = ImageDraw.Draw(image)
        if not self.caption.words:
            image.paste(self.photo, self.corner)
            self._say(draw, self.margin, self.sentence_top, "no words", self.colours.quiet)
            return image
        panel = attention_image(
            self.photo,
            between(self._map(max(shot.word - 1, 0)), self._map(shot.word), shot.part),
            scale_max=self.scale,
            crop_box=self.caption.crop_box,
            smooth=self.smooth,
            colormap=self.colormap,
        )
        image.paste(panel, self.corner)
        self._sentence(image, draw, shot.word)
        self._numbers(image, draw, shot)
        return image

    def _map(self, word: int) -> NDArray[np.float32]:
        """A word's map; after the last word that of all of them."""
        alphas = np.asarray(self.caption.alphas, dtype=np.float32)
        return alphas[word] if word < len(alphas) else coverage(alphas)

    def _sentence(self, image: Image.Image, draw: ImageDraw.ImageDraw, present: int) -> None:
        """What was said so far, the present word on a shade."""
        leading = round(1.55 * self.text)
        for place, (left, line, word) in enumerate(self.words[: present + 1]):
            top, x = self.sentence_top + line * leading, self.margin + left
            if place == present:
                pad = 0.22 * self.text
                wide = lettering.drawn_width(lettering.drawable(word), self.text)
                box = x - pad, top, x + wide + pad, top + round(1.42 * self.text)
                _shade(image, box, 0.25 * self.text, self.colours.shade)
            self._say(draw, x, top, word, self.colours.ink)

    def _say(self, draw: ImageDraw.ImageDraw, x: float, top: float, word: str, colour: str) -> None:
        place = x, top + round(1.05 * self.text)
        draw.text(place, lettering.drawable(word), colour, lettering.font(self.text), anchor="ls")

    def _numbers(self, image: Image.Image, draw: ImageDraw.ImageDraw, shot: _Shot) -> None:
        """Gate and probability of the present word on the left, the colours' scale on the right."""
        size, colours, words = self.small, self.colours, len(self.caption.words)
        font, baseline = lettering.font(size), self.numbers_top + round(1.1 * size)
        upper, lower = baseline - round(0.58 * size), baseline - round(0.1 * size)
        if shot.word < words:
            self._evidence(draw, shot, baseline, upper, lower)
        else:
            whole = f"mean of all {words} words" if words > 1 else "all 1 word"
            draw.text((self.margin, baseline), whole, colours.ink, font, anchor="ls")
        most = lettering.percent(self.scale)
        end = self.margin + self.inner
        right = round(end - lettering.width_of(most, size) - 0.4 * size)
        left = max(self.margin + round(14 * size), right - 9 * size)
        draw.text((end, baseline), most, colours.quiet, font, anchor="rs")
        draw.text((left - 0.4 * size, baseline), "0", colours.quiet, font, anchor="rs")
        image.paste(scale_bar(right - left, lower - upper + 1, self.colormap), (left, upper))

    def _evidence(
        self, draw: ImageDraw.ImageDraw, shot: _Shot, baseline: int, upper: int, lower: int
    ) -> None:
        """The gate as a bar that glides with the map, its value, and the word's probability."""
        size, colours, font = self.small, self.colours, lettering.font(self.small)
        draw.text((self.margin, baseline), "β", colours.quiet, font, anchor="ls")
        left = round(self.margin + 1.0 * size)
        right = left + round(3.2 * size)
        draw.rectangle((left, upper, right, lower), colours.track)
        gate, log_prob = (
            float(values[shot.word]) for values in (self.caption.gates, self.caption.log_probs)
        )
        before = float(self.caption.gates[max(shot.word - 1, 0)])
        moved = before + (gate - before) * ease(shot.part)
        level = moved if math.isfinite(moved) else gate
        if level > 0:
            filled = left + round((right - left) * min(level, 1.0))
            draw.rectangle((left, upper, filled, lower), colours.gate)
        value = right + 0.45 * size
        draw.text((value, baseline), lettering.number(gate), colours.ink, font, anchor="ls")
        p = f"p {lettering.probability(log_prob)}"
        draw.text((value + 3.1 * size, baseline), p, colours.ink, font, anchor="ls")


def _shade(
    image: Image.Image, box: tuple[float, float, float, float], radius: float, colour: str
) -> None:
    """A box with round, even corners: drawn four times as large, then brought down."""
    left, top = round(box[0]), round(box[1])
    width, height = max(1, round(box[2]) - left), max(1, round(box[3]) - top)
    mask = Image.new("L", (4 * width, 4 * height))
    corner = (0, 0, 4 * width - 1, 4 * height - 1)
    ImageDraw.Draw(mask).rounded_rectangle(corner, 4 * radius, fill=255)
    mask = mask.resize((width, height), Image.Resampling.BOX)
    image.paste(Image.new("RGB", (width, height), colour), (left, top), mask)


def _placed(words: Sequence[str], size: int, width: int) -> list[tuple[float, int, str]]:
    """Every word's left edge, line and spelling, as the whole sentence wraps."""
    placed: list[tuple[float, int, str]] = []
    end, line = 0.0, 0
    space = round(1.2 * lettering.drawn_width(" ", size))
    for place in range(len(words)):
        before, after = join_words(list(words[:place])), join_words(list(words[: place + 1]))
        added = after[len(before) :]
        gap = float(space) if added.startswith(" ") and before else 0.0
        word = lettering.cut(lettering.printable(added.strip()), size, width)
        wide = lettering.drawn_width(lettering.drawable(word), size)
        if end and end + gap + wide > width:
            end, line, gap = 0.0, line + 1, 0.0
        placed.append((end + gap, line, word))
        end += gap + wide
    return placed


def _indexed(
    frames: Iterator[tuple[Image.Image, int]], palette: Image.Image
) -> Iterator[Image.Image]:
    """Frames in the palette's colours.

    A pixel keeps its colour as long as that is near enough, which makes the file three times
    smaller; frames that rest are held to less. No dithering: its grain would move.
    """
    colours = np.asarray(palette.getpalette(), dtype=np.int16).reshape(-1, 3)
    shown: NDArray[np.uint8] | None = None
    for image, count in frames:
        indices = np.array(image.quantize(palette=palette, dither=Image.Dither.NONE))
        if shown is not None:
            allowed = _STILL if count > 1 else _MOVING
            far = np.abs(colours[shown] - np.asarray(image, dtype=np.int16)).max(axis=2) > allowed
            indices = np.where(far, indices, shown)
        shown = indices
        frame = Image.fromarray(indices)
        frame.putpalette(palette.getpalette() or [])
        yield frame


def _saved(image: Image.Image, kind: str, durations: list[int], **options: Any) -> bytes:
    """An endless loop as a file's bytes."""
    buffer = io.BytesIO()
    image.save(buffer, kind, save_all=True, loop=0, duration=durations, **options)
    return buffer.getvalue()


def _pyav() -> Any:
    try:
        import av
    except ImportError:
        raise ConfigError(
            "to write .mp4 install PyAV: pip install 'captioner[video]' (.gif and .webp need "
            "nothing more)"
        ) from None
    return av


def _rgb(colour: tuple[int, ...]) -> tuple[int, int, int]:
    return colour[0], colour[1], colour[2]
