"""Animations: the map of every frame, the sentence and the encoded files."""

from __future__ import annotations

import html
import io
import re
from base64 import b64decode
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cutting import cut
from picture_helpers import brightest_cell, flat, luma, make_caption, noisy, one_hot
from PIL import Image, ImageSequence

from captioner.caption_types import CropBox
from captioner.drawing.animation import FRAME_RATE, Animation, Shot, animate, ease, plan_shots
from captioner.drawing.heatmap import attention_image, scale_of, shared_scale
from captioner.errors import ConfigError

GRID, CELLS = (3, 5), [(0, 4), (2, 0), (1, 2)]


def panel_of(frame: Image.Image, size: tuple[int, int]) -> Image.Image:
    """The photo of a frame: centred, below a margin as wide as that of the text."""
    margin = round(0.9 * 13)  # of the smallest text
    left = (frame.width - size[0]) // 2
    return frame.convert("RGB").crop((left, margin, left + size[0], margin + size[1]))


def still_frames(words: int, seconds: float = 1.0) -> list[int]:
    """Index of the last frame of each word."""
    ends, last = [], -1
    for shot in plan_shots(words, seconds):
        last += shot.frames
        if shot.part == 1.0 and shot.word >= 0:
            ends.append(last)
    return ends


# --- frames --------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", ["word", "common"])
def test_every_frame_interpolates_between_two_words_maps(scale: str) -> None:
    photo, caption = noisy((170, 50)), make_caption(["a", "dog", "runs"], crop_box=CropBox(0.1))
    animation = animate(photo, caption, seconds_per_word=0.4, scale=scale)
    common = scale_of(caption)
    maps = [a / (common if scale == "common" else shared_scale(a)) for a in caption.alphas]
    frames = list(animation.frames())
    shots = [shot for shot in plan_shots(3, 0.4) for _ in range(shot.frames)]
    assert len(frames) == len(shots) == round(animation.duration * 15)
    for frame, shot in zip(frames, shots, strict=True):
        start, end = maps[max(shot.word - 1, 0)], maps[shot.word]
        alpha = start + ease(shot.part) * (end - start)
        expected = attention_image(photo, alpha, scale_max=1.0, regions=caption.regions)
        expected = photo if shot.word < 0 else expected
        assert panel_of(frame, photo.size).tobytes() == expected.tobytes()
        assert (frame.mode, frame.size) == ("RGB", animation.size)


def test_left_out_words_and_their_maps_are_grey() -> None:
    photo, whole = noisy((170, 50)), make_caption(["a", "dog", "runs"])
    animation = animate(photo, cut(whole, 2, [0.5] * 3), seconds_per_word=0.2)

    said, left_out = (list(animation.frames())[end] for end in still_frames(3, 0.2)[1:])

    dog, runs = (attention_image(photo, alpha) for alpha in whole.alphas[1:])
    assert panel_of(said, photo.size).tobytes() == dog.tobytes()
    assert panel_of(left_out, photo.size).tobytes() == runs.convert("L").convert("RGB").tobytes()
    below = 80 - 13  # the words
    first = np.asarray(next(animation.frames()))[below:-35]
    plain = np.asarray(next(animate(photo, whole).frames()))[below:-35]
    assert first.shape == plain.shape
    assert (luma(Image.fromarray(first)) < 60).sum() < (luma(Image.fromarray(plain)) < 60).sum()
    assert 'caption: a dog"' in animation._repr_html_()


def test_the_sentence_grows_without_moving_earlier_words() -> None:
    words = ["a", "brown", "dog", "'s", "bowl", "on", "the", "very", "green", "grass", "outside"]
    frames = [
        np.asarray(frame)
        for frame in animate(noisy((200, 80)), make_caption(words), seconds_per_word=0.2).frames()
    ]
    ends = still_frames(len(words), 0.2)
    below = 80 + round(0.9 * 13) + 5
    dark = [luma(Image.fromarray(frames[end][below:-35])) < 90 for end in ends]
    whole = luma(Image.fromarray(frames[0][below:-35])) < 90
    assert (dark[-1] & ~whole).sum() < 0.1 * whole.sum()  # the first frame has all words
    for before, after in pairwise(dark):
        assert after.sum() > before.sum()
        # Earlier words stay, but for the edges of the letters on another background.
        assert (before & ~after).sum() < 0.1 * before.sum()
    rows = np.nonzero(dark[-1].any(axis=1))[0]
    assert (np.diff(rows) > 1).sum() >= 1  # over several lines


@pytest.mark.parametrize("seconds", [0.8, 0.33, 0.05, 1.0])
def test_the_duration_follows_the_options(seconds: float) -> None:
    shots = plan_shots(7, seconds)
    assert all(shot.frames > 0 for shot in shots)
    duration = sum(shot.frames for shot in shots) / FRAME_RATE
    expected = max(7 * seconds, 7 / FRAME_RATE) + 2.0
    assert duration == pytest.approx(expected, abs=1.5 / FRAME_RATE)
    animation = animate(flat((20, 20)), make_caption(["a"] * 7), seconds_per_word=seconds)
    assert animation.duration == duration
    assert plan_shots(0, seconds) == [Shot(-1, 1.0, 2 * FRAME_RATE)]


# --- files ---------------------------------------------------------------------------------------


def saved(tmp_path: Path, ending: str, **options: Any) -> tuple[Animation, Path]:
    animation = animate(flat((300, 120), 140), one_hot(GRID, *CELLS), **options)
    path = tmp_path / f"animation{ending}"
    animation.save(path)
    assert [p.name for p in tmp_path.iterdir()] == [path.name]
    return animation, path


@pytest.mark.parametrize(("ending", "theme"), [(".gif", "light"), (".webp", "dark")])
def test_gif_and_webp_match_the_frames(tmp_path: Path, ending: str, theme: str) -> None:
    animation, path = saved(tmp_path, ending, theme=theme)
    frames = list(animation.frames())
    with Image.open(path) as file:
        assert file.size == animation.size
        assert file.info["loop"] == 0  # forever
        assert file.n_frames < len(frames)  # still frames are stored once
        pages, ends, time = [], [], 0
        for page in ImageSequence.Iterator(file):
            page.load()
            time += page.info["duration"]
            ends.append(time)
            pages.append(page.convert("RGB"))
    assert ends[-1] == pytest.approx(1000 * animation.duration, abs=10)
    for end, cell in zip(still_frames(3), CELLS, strict=False):
        at = (end + 0.5) * 1000 / 15  # milliseconds, within the frame
        page = pages[next(i for i, until in enumerate(ends) if until > at)]
        assert brightest_cell(panel_of(page, (300, 120)), GRID) == cell
        difference = np.abs(np.asarray(page, float) - np.asarray(frames[end], float))
        assert difference.mean() < 4
    corners = [np.array(page.getpixel((0, 0))) for page in (pages[3], frames[0])]
    assert np.abs(corners[0] - corners[1]).max() <= 4  # the background


def test_a_gif_has_no_contours(tmp_path: Path) -> None:
    """Dithered: on average over a few pixels, the error of 256 colours is small everywhere."""
    ramp = np.linspace(60, 250, 300, dtype=np.uint8)[None, :, None]
    photo = Image.fromarray(np.broadcast_to(ramp * np.uint8(1), (200, 300, 3)).copy())
    animation = animate(photo, make_caption(["a", "dog"]), seconds_per_word=0.3)
    animation.save(tmp_path / "a.gif")
    frames = list(animation.frames())
    with Image.open(tmp_path / "a.gif") as file:
        pages = [panel_of(page, photo.size) for page in ImageSequence.Iterator(file)]
    for page, frame in ((pages[0], frames[0]), (pages[-1], frames[-1])):
        error = luma(page) - luma(panel_of(frame, photo.size))
        assert np.abs(error.reshape(20, 10, 30, 10).mean(axis=(1, 3))).max() < 4


def test_moving_maps_of_a_gif_have_no_contours(tmp_path: Path) -> None:
    photo, caption = flat((300, 200), 160), make_caption(["a", "dog", "runs"])
    animation = animate(photo, caption, seconds_per_word=0.8)
    animation.save(tmp_path / "a.gif")
    frames = list(dict.fromkeys(frame.tobytes() for frame in animation.frames()))
    size = animation.size
    with Image.open(tmp_path / "a.gif") as file:
        pages = [panel_of(page, photo.size) for page in ImageSequence.Iterator(file)]
    assert len(pages) == len(frames)
    for page, pixels in zip(pages, frames, strict=True):
        frame = panel_of(Image.frombytes("RGB", size, pixels), photo.size)
        error = (luma(page) - luma(frame)).reshape(20, 10, 30, 10).mean(axis=(1, 3))
        assert np.abs(error).max() < 5


def test_a_gif_has_no_specks(tmp_path: Path) -> None:
    """Every pixel is close to its colour, rare bright ones too."""
    photo = Image.open(Path(__file__).parents[3] / "assets" / "examples" / "rocket.jpg")
    animation = animate(photo, make_caption(["a", "dog"]), seconds_per_word=0.3, panel_size=240)
    animation.save(tmp_path / "a.gif")
    expected = next(iter(animation.frames()))
    with Image.open(tmp_path / "a.gif") as file:
        first = file.convert("RGB")
    assert np.abs(np.asarray(first, float) - np.asarray(expected, float)).max() < 60


def test_other_formats_are_an_error(tmp_path: Path) -> None:
    animation = animate(flat((40, 30)), make_caption(["a"]))
    with pytest.raises(
        ConfigError, match=r"an animation cannot be saved as \.mp4 \(.*\); use \.gif, \.webp$"
    ):
        animation.save(tmp_path / "animation.mp4")
    assert not list(tmp_path.iterdir())


def test_notebooks_show_animations() -> None:
    animation = animate(flat((40, 30)), make_caption(["a", '"<dog>"']), seconds_per_word=0.2)
    pattern = r'<img alt="([^"<>]*)" width="\d+" height="\d+" src="([^"<>]*)">'
    match = re.fullmatch(pattern, animation._repr_html_())
    assert match
    assert html.unescape(match[1]).endswith('a "<dog>"')
    data = b64decode(match[2].removeprefix("data:image/webp;base64,"))
    with Image.open(io.BytesIO(data)) as file:
        assert file.format == "WEBP"
        assert file.n_frames > 1


# --- words and options ---------------------------------------------------------------------------


def test_an_empty_caption_is_the_photo_and_a_note(tmp_path: Path) -> None:
    photo = noisy((160, 40))
    animation = animate(photo, make_caption([]))
    frame = next(animation.frames())
    assert panel_of(frame, photo.size).tobytes() == photo.tobytes()
    assert (luma(frame)[55:] < 200).any()
    animation.save(tmp_path / "animation.gif")
