"""The frames of an animation: the photo under a moving map, the sentence, and the numbers.

    ┌─────────────────────┐
    │ ▒▒▒▒▒▒▒▓▓▓▒▒▒▒▒▒▒▒▒ │  the photo under the map
    │ a brown [dog]       │  the words so far; there is room for the whole sentence
    │ β ▬▬▬▬ 0.91  p 0.42 │  gate and probability of the word; the colour scale
    └─────────────────────┘

A word's map fades into the next one's, all on the scale of the caption. The last frame shows the
mean of all maps and the whole sentence. Frames are drawn by Pillow, which is fast and fits letters
to whole pixels.
"""

from __future__ import annotations

from typing import NamedTuple

from PIL import Image, ImageDraw

from captioner.caption import Caption
from captioner.drawing import style
from captioner.drawing.heatmap import (
    above_scale,
    attention_image,
    scale_bar,
    scale_gates,
    shared_scale,
)
from captioner.drawing.options import AnimationOptions

_TRANSITION = 0.55  # of a word's time: the map moves, then it rests
_PAUSE = 2.0  # seconds of the whole sentence at the end
_MIN_WIDTH = 280  # pixels of the text below the photo


class Shot(NamedTuple):
    """A distinct frame and how long it is shown."""

    word: int
    """Index of the word; T, after the last of T words, is the whole caption."""
    part: float
    """Progress from the word before, 0 to 1."""
    frames: int


def plan_shots(words: int, seconds_per_word: float, rate: int) -> list[Shot]:
    """The shots of T words and of the pause at the end; ``rate`` is in frames per second."""
    last = max(1, round(_PAUSE * rate))
    if not words:
        return [Shot(0, 1.0, last)]
    shots = []
    for word in range(words + 1):
        # Measured from the start, so that rounding to frames does not accumulate.
        length = round((word + 1) * seconds_per_word * rate) - round(word * seconds_per_word * rate)
        length = max(1, length) if word < words else last
        moving = 0 if word == 0 else min(length - 1, round(_TRANSITION * seconds_per_word * rate))
        shots += [Shot(word, (step + 1) / (moving + 1), 1) for step in range(moving)]
        shots.append(Shot(word, 1.0, length - moving))
    return shots


def ease(part: float) -> float:
    """Smoothstep, 3 t^2 - 2 t^3: slow at both ends of 0 to 1."""
    return part * part * (3.0 - 2.0 * part)


class Scene:
    """Draws the frames of an animation on a fixed layout."""

    def __init__(self, photo: Image.Image, caption: Caption, options: AnimationOptions) -> None:
        self.photo, self.caption, self.options = photo, caption, options
        self.theme = style.THEMES[options.theme]
        alphas = caption.alphas
        self.maps = [*alphas, alphas.mean(axis=0)] if caption.words else []
        """The map of each word, and the mean of all."""
        self.scale = shared_scale(alphas, scale_gates(caption))
        self.above = above_scale(alphas, scale_gates(caption), self.scale)
        self.inner = max(photo.width, _MIN_WIDTH)
        self.text = max(13, min(22, round(self.inner / 26)))
        self.small = max(11, round(0.78 * self.text))
        self.margin = round(0.9 * self.text)
        self.leading = round(1.55 * self.text)
        self.words = _arrange(caption, self.text, self.inner)
        lines = 1 + max((line for _, line, _ in self.words), default=0)
        self.sentence_top = self.margin + photo.height + round(0.75 * self.text)
        self.numbers_top = self.sentence_top + self.leading * lines + self.text // 2
        width = self.inner + 2 * self.margin
        height = self.numbers_top + round(1.9 * self.small) + self.margin
        self.size = width + width % 2, height + height % 2  # video needs even sizes

    def draw(self, shot: Shot) -> Image.Image:
        """Draw one frame, RGB."""
        frame = Image.new("RGB", self.size, self.theme.background)
        corner = self.margin + (self.inner - self.photo.width) // 2, self.margin
        if not self.caption.words:
            frame.paste(self.photo, corner)
            baseline = self.sentence_top + round(1.05 * self.text)
            empty = self.caption.text or "no words"
            self._text(frame, (self.margin, baseline), empty, self.text, colour=self.theme.muted)
            return frame
        before, after = self.maps[max(shot.word - 1, 0)], self.maps[shot.word]
        panel = attention_image(
            self.photo,
            before + ease(shot.part) * (after - before),
            scale_max=self.scale,
            regions=self.caption.regions,
            smooth=self.options.smooth,
            colormap=self.options.colormap,
        )
        frame.paste(panel, corner)
        self._sentence(frame, shot.word)
        self._numbers(frame, shot)
        return frame

    def _sentence(self, frame: Image.Image, current: int) -> None:
        """The words so far, the current one highlighted."""
        size = self.text
        for position, (left, line, word) in enumerate(self.words[: current + 1]):
            top, x = self.sentence_top + line * self.leading, self.margin + left
            if position == current:
                pad, width = 0.22 * size, style.pillow_font(size).getlength(word)
                start, end = round(x - pad), round(x + width + pad)
                # Antialiased corners: drawn at four times the size, then reduced.
                box = max(1, end - start), round(1.42 * size)
                mask = Image.new("L", (4 * box[0], 4 * box[1]))
                corners = (0, 0, mask.width - 1, mask.height - 1)
                ImageDraw.Draw(mask).rounded_rectangle(corners, size, fill=255)
                mask = mask.resize(box, Image.Resampling.BOX)
                frame.paste(Image.new("RGB", box, self.theme.highlight), (start, top), mask)
            self._text(frame, (x, top + round(1.05 * size)), word, size)

    def _numbers(self, frame: Image.Image, shot: Shot) -> None:
        """Gate and probability of the current word on the left, the colour scale on the right."""
        size, theme, words = self.small, self.theme, len(self.caption.words)
        baseline = self.numbers_top + round(1.1 * size)
        top, bottom = baseline - round(0.58 * size), baseline - round(0.1 * size) + 1
        end, most = self.margin + self.inner, style.percent(self.scale)
        if shot.word < words:
            gates = self.caption.gates
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
            self._text(frame, (self.margin, baseline), "β", size, colour=theme.muted)
            self._text(frame, (value, baseline), style.number(gate), size)
            self._text(frame, (value + 3.1 * size, baseline), p, size)
            most = f"≥ {most}" if self.above[shot.word] else most
        else:
            note = f"mean of all {words} words" if words > 1 else "all 1 word"
            self._text(frame, (self.margin, baseline), note, size)
        right = round(end - style.text_width(most, size) - 0.4 * size)
        left = max(self.margin + round(14 * size), right - 9 * size)
        self._text(frame, (end, baseline), most, size, colour=theme.muted, anchor="rs")
        self._text(frame, (left - 0.4 * size, baseline), "0", size, colour=theme.muted, anchor="rs")
        frame.paste(scale_bar(right - left, bottom - top, self.options.colormap), (left, top))

    def _text(
        self,
        frame: Image.Image,
        at: tuple[float, float],
        text: str,
        size: int,
        *,
        colour: str = "",
        anchor: str = "ls",
    ) -> None:
        """Text whose baseline starts, or with another anchor of Pillow's ends, at a point."""
        draw, font = ImageDraw.Draw(frame), style.pillow_font(size)
        draw.text(at, text, colour or self.theme.text, font, anchor=anchor)


def _arrange(caption: Caption, size: int, width: int) -> list[tuple[float, int, str]]:
    """Wrap the sentence; returns the left edge, line and spelling of each word."""
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
