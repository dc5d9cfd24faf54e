"""Animations of a caption: the map moves from word to word while the sentence grows.

    ┌─────────────────────┐
    │ ▒▒▒▒▒▒▒▓▓▓▒▒▒▒▒▒▒▒▒ │  the photo under the map
    │ a brown [dog]       │  the words so far; space is reserved for the whole sentence
    │ β ▬▬▬▬ 0.91  p 0.42 │  gate and probability of the word; the colour scale
    └─────────────────────┘

The first frame shows the photo, the whole sentence and a note on the numbers. Programs that do not
play animations show only this frame. After the first frame, the map of each word fades into the map
of the next word. Left-out words follow the caption in grey, with grey maps. Pillow draws the
frames, because it is fast and aligns letters with whole pixels.
"""

from __future__ import annotations

import html
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageColor, ImageDraw

from captioner.caption_types import Caption
from captioner.data.images import Photo, open_image
from captioner.data.pixels import fit_photo
from captioner.drawing import heatmap, style
from captioner.drawing.drawing import Drawing, check_captions, check_size
from captioner.drawing.options import AnimationOptions
from captioner.drawing.picture_files import base64_uri, encoded
from captioner.hints import hinted
from captioner.schema import build_options

_MAX_SIDE = 16_383  # pixels; the largest side that WebP supports
_MAX_PIXELS = 3840 * 2160  # per frame; about 80 frames are in memory while a file is written
_MIN_WIDTH = 280  # pixels; least width of the text below the photo
_TRANSITION = 0.55  # share of a word's time in which the map changes; then it rests
FRAME_RATE = 15  # frames per second
_PAUSE = 2.0  # seconds for which the whole sentence is shown at the start
# A pixel of a GIF is dithered again only if its colour changes by this many of 255 levels.
# Otherwise it keeps its dithered colour, so that the dithering noise does not move. A threshold of
# 16 left contour lines in moving maps. A threshold of 5 leaves none, but the file is 1.6 times as
# large.
_LEAST_CHANGE = 5
_Point = tuple[float, float]  # x and y in pixels from the upper left corner
_EXPLANATION = "β: use of the photo, p: probability"  # fits the smallest width


class Shot(NamedTuple):
    """A frame that differs from the frame before it, and the number of times it is repeated."""

    word: int
    """The index of the word, or -1 for the photo with the whole caption."""
    part: float
    """Progress of the transition from the previous word, 0 to 1."""
    frames: int
    """Number of frames for which the shot is shown."""


def plan_shots(words: int, seconds_per_word: float) -> list[Shot]:
    """Return the shots of an animation with this number of words.

    The first shot is the pause with the whole sentence.
    """
    rate = FRAME_RATE
    shots = [Shot(-1, 1.0, round(_PAUSE * rate))]
    for word in range(words):
        # Times are measured from the start, so that rounding errors do not accumulate.
        length = round((word + 1) * seconds_per_word * rate) - round(word * seconds_per_word * rate)
        length = max(1, length)
        moving = 0 if word == 0 else min(length - 1, round(_TRANSITION * seconds_per_word * rate))
        shots += [Shot(word, (step + 1) / (moving + 1), 1) for step in range(moving)]
        shots.append(Shot(word, 1.0, length - moving))
    return shots


def ease(part: float) -> float:
    """Return the progress 3 t^2 - 2 t^3, where t is ``part``, 0 to 1. It starts and ends slowly."""
    return part * part * (3.0 - 2.0 * part)


class Animation(Drawing):
    """An animation that draws its frames on demand.

    ``.gif`` files have 256 colours and play everywhere. ``.webp`` files are small and keep all
    colours. Both formats play in a loop.
    """

    kind, suffixes = "an animation", (".gif", ".webp")

    def __init__(self, photo: Image.Image, caption: Caption, options: AnimationOptions) -> None:
        """Arrange the photo, words and numbers. All lengths are in pixels.

        ``photo`` is an RGB picture, drawn in its own size.
        """
        self.photo, self.caption, self.options = photo, caption.whole(), options
        self.said = caption
        """The caption without its left-out words."""
        self.theme = style.THEMES[options.theme]
        common = heatmap.scale_of(self.caption) if options.scale == "common" else None
        self.tops = [common or heatmap.shared_scale(alpha) for alpha in self.caption.alphas]
        """The attention value that is drawn brightest, for each word."""
        self.inner = max(photo.width, _MIN_WIDTH)
        self.text = max(13, min(22, round(self.inner / 26)))
        self.small = max(11, round(0.78 * self.text))
        self.margin = round(0.9 * self.text)
        self.leading = round(1.55 * self.text)
        self.words = _arrange(self.caption, self.text, self.inner)
        lines = 1 + max((line for _, line, _ in self.words), default=0)
        self.sentence_top = self.margin + photo.height + round(0.75 * self.text)
        self.numbers_top = self.sentence_top + self.leading * lines + self.text // 2
        height = self.numbers_top + round(1.9 * self.small) + self.margin
        self.size = self.inner + 2 * self.margin, height
        """Width and height in pixels."""
        self._shots = plan_shots(len(self.words), options.seconds_per_word)

    @property
    def duration(self) -> float:
        """The length of one loop in seconds."""
        return sum(shot.frames for shot in self._shots) / FRAME_RATE

    def frames(self) -> Iterator[Image.Image]:
        """Yield all frames as RGB pictures, ``FRAME_RATE`` for each second."""
        for shot in self._shots:
            yield from [self._draw(shot)] * shot.frames

    def encode(self, suffix: str) -> bytes:
        """Return the content of a file with this extension."""
        frames: Iterator[Image.Image] = map(self._draw, self._shots)
        unit = 1
        options: dict[str, Any] = {"quality": 85, "method": 2}
        if suffix == ".gif":
            frames, unit = self._indexed_frames(), 10  # milliseconds: GIF counts in 1/100 s
            options = {"optimize": True, "disposal": 1}
        ends = np.cumsum([shot.frames for shot in self._shots]) * 1000 / FRAME_RATE
        whole = np.rint(ends / unit).astype(int) * unit  # rounded ends do not drift
        options |= {"save_all": True, "loop": 0, "duration": np.diff(whole, prepend=0).tolist()}
        return encoded(next(frames), suffix[1:], append_images=frames, **options)

    def _repr_html_(self) -> str:
        """Return the animation as an HTML element for notebooks."""
        data, (width, height) = base64_uri("webp", self.encode(".webp")), self.size
        sentence = self.said.text or "no words"
        alt = html.escape(f"Attention for each word of the caption: {sentence}")
        return f'<img alt="{alt}" width="{width}" height="{height}" src="{data}">'

    def _indexed_frames(self) -> Iterator[Image.Image]:
        """Yield each distinct frame once, dithered to 256 colours.

        A pixel keeps its dithered colour until its true colour changes. The noise of the dithering
        therefore does not move, and the file is smaller.
        """
        palette = self._palette()
        shown: NDArray[np.uint8] | None = None
        drawn: NDArray[np.int16] = np.zeros((*self.size[::-1], 3), np.int16)
        for shot in self._shots:
            image = self._draw(shot)
            pixels = np.asarray(image, dtype=np.int16)
            indices = np.array(image.quantize(palette=palette))
            if shown is not None:
                keep = np.abs(pixels - drawn).max(axis=2) < _LEAST_CHANGE
                indices = np.where(keep, shown, indices)
                pixels = np.where(keep[..., None], drawn, pixels)
            shown, drawn = indices, pixels
            frame = Image.fromarray(indices)
            frame.putpalette(palette.getpalette() or [])
            yield frame

    def _palette(self) -> Image.Image:
        """Return one palette for all frames, so that static colours do not flicker."""
        theme = self.theme
        resting = [shot for shot in self._shots if shot.frames > 1] or self._shots
        places = np.linspace(0, len(resting) - 1, min(12, len(resting)))
        step = -(-max(self.size) // 240)  # a part of the pixels is enough
        samples = [np.asarray(self._draw(resting[round(at)]))[::step, ::step] for at in places]
        sheet = Image.fromarray(np.concatenate(samples))
        names = (theme.background, theme.text, theme.muted, theme.track, theme.gate)
        fixed = [ImageColor.getrgb(name)[:3] for name in (*names, theme.highlight)]
        count = 255 - len(fixed)  # one of 256 stays free: GIF marks unchanged pixels with it
        # Not median cut: it drops rare bright colours, and dithering leaves specks in their place.
        found = sheet.quantize(count, Image.Quantize.MAXCOVERAGE).getpalette() or []
        palette = Image.new("P", (1, 1))
        palette.putpalette([*np.ravel(fixed).tolist(), *found[: 3 * count]])
        return palette

    # --- frames ----------------------------------------------------------------------------------

    def _draw(self, shot: Shot) -> Image.Image:
        """Draw the frame of a shot as an RGB picture."""
        frame = Image.new("RGB", self.size, self.theme.background)
        corner = self.margin + (self.inner - self.photo.width) // 2, self.margin
        if shot.word < 0:
            frame.paste(self.photo, corner)
            if not self.caption.words:
                baseline = self.sentence_top + round(1.05 * self.text)
                empty = self.caption.text or "no words"
                self._text(frame, (self.margin, baseline), empty, self.text, fill=self.theme.muted)
        else:
            before = max(shot.word - 1, 0)
            levels = [self.caption.alphas[i] / self.tops[i] for i in (before, shot.word)]
            panel = heatmap.attention_image(
                self.photo,
                levels[0] + ease(shot.part) * (levels[1] - levels[0]),
                scale_max=1.0,
                regions=self.caption.regions,
                smooth=self.options.smooth,
                colormap=self.options.colormap,
            )
            if shot.word >= len(self.said.words):
                panel = heatmap.greyed(panel)
            frame.paste(panel, corner)
        if self.caption.words:
            self._sentence(frame, shot.word)
            self._numbers(frame, shot)
        return frame

    def _sentence(self, frame: Image.Image, current: int) -> None:
        """Draw the words up to the word at index ``current``, and highlight this word.

        -1 draws all words without a highlight.
        """
        size = self.text
        for position, (left, line, word) in enumerate(self.words[: current + 1 or None]):
            top, x = self.sentence_top + line * self.leading, self.margin + left
            fill, behind = self.theme.text, self.theme.highlight
            if position >= len(self.said.words):
                fill, behind = self.theme.muted, self.theme.track
            if position == current:
                pad, width = 0.22 * size, style.pillow_font(size).getlength(word)
                start, end = round(x - pad), round(x + width + pad)
                # Antialiased corners: drawn at four times the size, then reduced.
                box = max(1, end - start), round(1.42 * size)
                mask = Image.new("L", (4 * box[0], 4 * box[1]))
                corners = (0, 0, mask.width - 1, mask.height - 1)
                ImageDraw.Draw(mask).rounded_rectangle(corners, size, fill=255)
                mask = mask.resize(box, Image.Resampling.BOX)
                frame.paste(Image.new("RGB", box, behind), (start, top), mask)
            self._text(frame, (x, top + round(1.05 * size)), word, size, fill=fill)

    def _numbers(self, frame: Image.Image, shot: Shot) -> None:
        """Draw the word's gate and probability on the left, and the colour scale on the right.

        Before the first word, an explanation of these numbers is drawn instead.
        """
        size, theme, gates, muted = self.small, self.theme, self.caption.gates, self.theme.muted
        baseline = self.numbers_top + round(1.1 * size)
        top, bottom = baseline - round(0.58 * size), baseline - round(0.1 * size) + 1
        if shot.word < 0:
            self._text(frame, (self.margin, baseline), _EXPLANATION, size, fill=muted)
            return
        gate, before = float(gates[shot.word]), float(gates[max(shot.word - 1, 0)])
        level = before + (gate - before) * ease(shot.part)
        left = round(self.margin + 1.0 * size)
        right = left + round(3.2 * size)
        draw = ImageDraw.Draw(frame)
        draw.rectangle((left, top, right, bottom - 1), theme.track)
        if level > 0:
            length = round((right - left) * min(level, 1.0))
            draw.rectangle((left, top, left + length, bottom - 1), theme.gate)
        value = right + 0.45 * size
        p = f"p {style.probability(float(self.caption.log_probs[shot.word]))}"
        self._text(frame, (self.margin, baseline), "β", size, fill=muted)
        self._text(frame, (value, baseline), style.number(gate), size)
        self._text(frame, (value + 3.1 * size, baseline), p, size)
        most, end = style.percent(self.tops[shot.word]), self.margin + self.inner
        right = round(end - style.text_width(most, size) - 0.4 * size)
        left = max(self.margin + round(14 * size), right - 9 * size)
        self._text(frame, (end, baseline), most, size, fill=muted, anchor="rs")
        self._text(frame, (left - 0.4 * size, baseline), "0", size, fill=muted, anchor="rs")
        frame.paste(
            heatmap.scale_bar(right - left, bottom - top, self.options.colormap), (left, top)
        )

    def _text(self, frame: Image.Image, at: _Point, text: str, size: int, **how: Any) -> None:
        """Draw text that begins at a point on its baseline.

        ``how`` replaces the defaults of the arguments ``fill`` (colour) and ``anchor`` (the point
        of the text at ``at``) of Pillow's ``text``.
        """
        how = {"fill": self.theme.text, "anchor": "ls"} | how
        ImageDraw.Draw(frame).text(at, text, font=style.pillow_font(size), **how)


def _arrange(caption: Caption, size: int, width: int) -> list[tuple[float, int, str]]:
    """Break a caption into lines, and return the position and spelling of each word.

    Args:
        caption: The caption, with its left-out words.
        size: Text size (pixels).
        width: Width of a line (pixels).

    Returns:
        For each word, its left edge (pixels), the number of its line, from 0, and its spelling.
    """
    font = style.pillow_font(size)
    arranged: list[tuple[float, int, str]] = []
    end, line = 0.0, 0
    space = round(1.2 * font.getlength(" "))
    for position in range(len(caption.words)):
        before, after = caption.text_until(position), caption.text_until(position + 1)
        added = after[len(before) :]
        gap = float(space) if added.startswith(" ") and before else 0.0
        word = style.truncate(style.printable(added.strip()), size, width)
        length = font.getlength(word)
        if end and end + gap + length > width:
            end, line, gap = 0.0, line + 1, 0.0
        arranged.append((end + gap, line, word))
        end += gap + length
    return arranged


@hinted
def animate(photo: Photo, caption: Caption, **options: Any) -> Animation:
    """Animate the attention of a caption, word by word.

    Args:
        photo: The captioned photo: a path, bytes, PIL image, array or binary file.
        caption: The caption.
        **options: Fields of ``AnimationOptions``, e.g. ``seconds_per_word=2``.

    Returns:
        The animation. Its frames are drawn when it is saved or shown.

    Raises:
        ConfigError: An option or the caption is invalid.
        ImageError: The photo cannot be read.
    """
    wanted = build_options(AnimationOptions, options)
    check_captions(caption)
    fitted = fit_photo(open_image(photo), wanted.panel_size, heatmap.MIN_PANEL)
    made = Animation(fitted, caption, wanted)
    check_size("animation", *made.size, _MAX_SIDE, _MAX_PIXELS)
    return made
