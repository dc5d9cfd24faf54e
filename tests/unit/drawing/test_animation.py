"""Animations: the map of every frame, the sentence and the encoded files."""

from __future__ import annotations

import html
import io
import math
import re
import sys
from base64 import b64decode
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from picture_helpers import (
    brightest_cell,
    flat,
    luma,
    make_caption,
    noisy,
    one_hot,
    positions_of,
)
from PIL import Image, ImageSequence

from captioner.caption import CropBox
from captioner.drawing import (
    Animation,
    animate,
    attention_image,
    shared_scale,
)
from captioner.drawing.maps import interpolate
from captioner.errors import ConfigError

GRID, CELLS = (3, 5), [(0, 4), (2, 0), (1, 2)]


def corner_of(animation: Animation) -> tuple[int, int]:
    return animation._scene.corner


def panel_of(frame: Image.Image, animation: Animation, size: tuple[int, int]) -> Image.Image:
    x, y = corner_of(animation)
    return frame.convert("RGB").crop((x, y, x + size[0], y + size[1]))


def still_frames(animation: Animation) -> list[int]:
    """Index of the last frame of each word, and of the pause."""
    ends, last = [], -1
    for shot in animation._shots:
        last += shot.frames
        if shot.part == 1.0:
            ends.append(last)
    return ends


# --- frames --------------------------------------------------------------------------------------


def test_every_frame_interpolates_between_two_words_maps() -> None:
    photo, caption = noisy((70, 50)), make_caption(["a", "dog", "runs"], crop_box=CropBox(0.1))
    animation = animate(photo, caption, seconds_per_word=0.4)
    scale = shared_scale(caption.alphas, caption.gates)
    ends = [*caption.alphas, caption.alphas.mean(0)]
    frames = list(animation.frames())
    shots = [shot for shot in animation._shots for _ in range(shot.frames)]
    assert len(frames) == len(shots) == round(animation.duration * 15)
    for frame, shot in zip(frames, shots, strict=True):
        alpha = interpolate(ends[max(shot.word - 1, 0)], ends[shot.word], shot.part)
        expected = attention_image(photo, alpha, scale_max=scale, regions=caption.regions)
        assert panel_of(frame, animation, photo.size).tobytes() == expected.tobytes()
        assert frame.size == animation.size
        assert frame.mode == "RGB"


@pytest.mark.parametrize("smooth", [True, False])
def test_a_one_hot_map_moves_between_regions_of_a_rotated_photo(
    tmp_path: Path, smooth: bool
) -> None:
    exif = Image.Exif()
    exif[0x112] = 6
    flat((150, 60)).transpose(Image.Transpose.ROTATE_90).save(tmp_path / "p.jpg", exif=exif)
    animation = animate(tmp_path / "p.jpg", one_hot(GRID, *CELLS), smooth=smooth)
    frames = list(animation.frames())
    for end, cell in zip(still_frames(animation), CELLS, strict=False):
        assert brightest_cell(panel_of(frames[end], animation, (150, 60)), GRID) == cell
    # From the first to the second word, the first region gets darker and the second brighter.
    first, second = still_frames(animation)[:2]
    panels = [luma(panel_of(frame, animation, (150, 60))) for frame in frames[first : second + 1]]
    fading = [panel[:20, 120:].mean() for panel in panels]
    growing = [panel[40:, :30].mean() for panel in panels]
    assert (np.diff(fading) <= 0).all()
    assert (np.diff(growing) >= 0).all()
    assert fading[0] > fading[-1] + 30
    moving = len(set(fading))
    assert 5 <= moving < len(panels)  # the map moves, then stays still


def test_same_attention_has_the_same_colour_in_every_frame() -> None:
    caption = one_hot((1, 2), (0, 0), (0, 1))
    animation = animate(flat((40, 20)), caption, smooth=False)
    first, second, whole = (
        panel_of(list(animation.frames())[end], animation, (40, 20))
        for end in still_frames(animation)
    )
    assert first.getpixel((5, 10)) == second.getpixel((35, 10))
    assert first.getpixel((35, 10)) == second.getpixel((5, 10))
    assert whole.getpixel((5, 10)) == whole.getpixel((35, 10))
    assert first.getpixel((5, 10)) != whole.getpixel((5, 10))  # half the attention, another colour


def test_sentence_grows_without_moving_earlier_words() -> None:
    words = ["a", "brown", "dog", "'s", "bowl", "on", "the", "very", "green", "grass", "outside"]
    animation = animate(noisy((200, 80)), make_caption(words), seconds_per_word=0.2)
    scene = animation._scene
    assert max(line for _, line, _ in scene.words) >= 1  # over several lines
    assert [word for _, _, word in scene.words][:5] == ["a", "brown", "dog", "'s", "bowl"]
    frames = [np.asarray(frame) for frame in animation.frames()]
    texts = [frames[end][scene.sentence_top : scene.numbers_top] for end in still_frames(animation)]
    background, last = texts[-1][-1, -1], texts[-1]
    written = (last != background).any(axis=2)
    before = np.zeros_like(written)
    for position, text in enumerate(texts[:-1]):
        ink = (text != background).any(axis=2)
        assert ink.sum() > before.sum()
        assert not (before & ~ink).any()  # earlier words stay
        same = (text == last).all(axis=2)
        if position:  # earlier words are already in their final position
            left, line, _ = scene.words[position]
            above = slice(0, round(1.55 * scene.text) * line)
            assert same[above][ink[above]].all()
            until = scene.margin + round(left - 0.3 * scene.text)
            assert same[:, :until][ink[:, :until]].all()
        before = written & ink & same


def test_clitics_are_attached_to_their_word() -> None:
    placed = animate(flat((300, 50)), make_caption(["dog", "'s", "hat"]))._scene.words
    (dog, _, _), (clitic, _, _), (hat, _, _) = placed
    assert hat - clitic > clitic - dog - 30
    plain = animate(flat((300, 50)), make_caption(["dog", "s", "hat"]))._scene.words
    assert clitic < plain[1][0]


def test_gate_and_probability_of_the_current_word() -> None:
    photo, caption = flat((300, 60)), make_caption(["a", "dog"])
    pages = []
    for gate, log_prob in [(0.1, -1.0), (0.9, -1.0), (0.1, -2.0)]:
        gates = np.array([0.5, gate], np.float32)
        log_probs = np.array([-1.0, log_prob], np.float32)
        animation = animate(photo, replace(caption, gates=gates, log_probs=log_probs))
        frames = list(animation.frames())
        pages.append([np.asarray(frames[end]) for end in still_frames(animation)])
    assert (pages[0][0] == pages[1][0]).all()  # the first word's numbers are equal
    columns = [np.nonzero((pages[0][1] != other[1]).any(axis=(0, 2)))[0] for other in pages[1:]]
    assert columns[0].max() < columns[1].min()  # β is left of p, without overlap


def test_frames_are_drawn_on_demand(monkeypatch: pytest.MonkeyPatch) -> None:
    animation = animate(flat((60, 40)), make_caption(["a", "dog"] * 5))
    drawn = []
    draw = type(animation._scene).draw
    monkeypatch.setattr(
        type(animation._scene), "draw", lambda scene, shot: drawn.append(1) or draw(scene, shot)
    )
    frames = animation.frames()
    assert not drawn
    next(frames)
    assert len(drawn) == 1
    list(frames)
    assert (
        len(drawn) == len(animation._shots) < animation.duration * 15
    )  # still frames are drawn once


@pytest.mark.parametrize(("seconds", "rate"), [(0.8, 15), (0.33, 10), (0.05, 1), (1.0, 50)])
def test_the_duration_follows_the_options(seconds: float, rate: int) -> None:
    count = 7
    animation = animate(
        flat((20, 20)),
        make_caption(["a"] * count),
        seconds_per_word=seconds,
        frames_per_second=rate,
    )
    assert all(shot.frames > 0 for shot in animation._shots)
    expected = max(count * seconds, count / rate) + 2.0
    assert animation.duration == pytest.approx(expected, abs=1.5 / rate)


# --- files ---------------------------------------------------------------------------------------


def saved(tmp_path: Path, ending: str, **options: object) -> tuple[Animation, Path]:
    photo = flat((150, 60), 140)
    animation = animate(photo, one_hot(GRID, *CELLS), **options)  # type: ignore[arg-type]
    path = tmp_path / f"animation{ending}"
    animation.save(path)
    assert [p.name for p in tmp_path.iterdir()] == [path.name]
    return animation, path


@pytest.mark.parametrize("ending", [".gif", ".webp"])
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_gif_and_webp_match_the_frames(tmp_path: Path, ending: str, theme: str) -> None:
    animation, path = saved(tmp_path, ending, theme=theme)
    frames = list(animation.frames())
    with Image.open(path) as file:
        assert file.size == animation.size
        assert file.info["loop"] == 0  # forever
        assert file.n_frames <= len(animation._shots) < len(frames)  # still frames are stored once
        pages, ends, time = [], [], 0
        for page in ImageSequence.Iterator(file):
            page.load()
            time += page.info["duration"]
            ends.append(time)
            pages.append(page.convert("RGB"))
    assert ends[-1] == pytest.approx(1000 * animation.duration, abs=10)
    for end, cell in zip(still_frames(animation), CELLS, strict=False):
        at = (end + 0.5) * 1000 / 15  # milliseconds, within the frame
        page = pages[next(i for i, until in enumerate(ends) if until > at)]
        assert brightest_cell(panel_of(page, animation, (150, 60)), GRID) == cell
        difference = np.abs(np.asarray(page, float) - np.asarray(frames[end], float))
        assert difference.mean() < 4
    corners = [np.array(page.getpixel((0, 0))) for page in (pages[3], frames[0])]
    assert np.abs(corners[0] - corners[1]).max() <= 4  # the background


def test_a_gif_has_one_palette(tmp_path: Path) -> None:
    photo, caption = noisy((90, 60)), make_caption(["a", "dog", "runs"])
    animation = animate(photo, caption, seconds_per_word=0.4)
    palette = animation._palette().getpalette()
    assert palette is not None
    assert len(palette) <= 3 * 255  # one entry is reserved for "unchanged"
    colours = {tuple(palette[i : i + 3]) for i in range(0, len(palette), 3)}
    assert {(255, 255, 255), (20, 20, 27)} <= colours  # background and text are exact
    animation.save(tmp_path / "animation.gif")
    with Image.open(tmp_path / "animation.gif") as file:
        used = {
            colour
            for page in ImageSequence.Iterator(file)
            for _, colour in page.convert("RGB").getcolors(1 << 20)
        }
    assert used <= colours


def test_a_gif_is_close_to_the_frames(tmp_path: Path) -> None:
    caption = make_caption(["a", "dog", "runs"], (4, 4))
    animation = animate(noisy((60, 40)).resize((120, 80), Image.Resampling.BICUBIC), caption)
    animation.save(tmp_path / "animation.gif")
    with Image.open(tmp_path / "animation.gif") as file:
        pages = [page.convert("RGB") for page in ImageSequence.Iterator(file)]
    shown = [image for image, _ in animation._distinct_frames()]
    assert len(pages) == len(shown)
    errors = [
        np.abs(np.asarray(page, float) - np.asarray(frame, float)).mean()
        for page, frame in zip(pages, shown, strict=True)
    ]
    assert max(errors) < 10


@pytest.mark.slow
def test_mp4_plays_in_browsers(tmp_path: Path) -> None:
    import av

    animation, path = saved(tmp_path, ".mp4")
    assert path.read_bytes().find(b"moov") < path.read_bytes().find(
        b"mdat"
    )  # playable while downloading
    with av.open(str(path)) as container:
        (stream,) = container.streams.video
        context = stream.codec_context
        assert context.name == "h264"
        assert context.pix_fmt == "yuv420p"
        assert (context.width, context.height) == animation.size
        assert context.width % 2 == context.height % 2 == 0
        assert float(stream.duration * stream.time_base) == pytest.approx(animation.duration)
        pages = [frame.to_image() for frame in container.decode(stream)]
    frames = list(animation.frames())
    assert len(pages) == len(frames)
    for end, cell in zip(still_frames(animation), CELLS, strict=False):
        assert brightest_cell(panel_of(pages[end], animation, (150, 60)), GRID) == cell
        difference = np.abs(np.asarray(pages[end], float) - np.asarray(frames[end], float))
        assert difference.mean() < 6


@pytest.mark.parametrize("size", [(1, 1), (401, 30), (31, 401), (400, 31)])
def test_sizes_are_even_for_every_photo(size: tuple[int, int]) -> None:
    animation = animate(noisy(size), make_caption(["a", "dog"], (3, 4)), panel_size=0)
    assert [side % 2 for side in animation.size] == [0, 0]
    assert next(animation.frames()).size == animation.size


def test_without_pyav_the_error_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "av", None)
    animation = animate(flat((40, 30)), make_caption(["a"]))
    with pytest.raises(ConfigError, match=r"pip install 'captioner\[video\]'"):
        animation.save(tmp_path / "animation.mp4")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["a.png", "a", "a.avi"])
def test_an_unknown_extension_lists_the_supported_ones(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=r"use \.gif, \.webp, \.mp4"):
        animate(flat((40, 30)), make_caption(["a"])).save(tmp_path / name)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("ending", [".gif", ".webp", ".mp4"])
def test_the_same_animation_gives_the_same_bytes(tmp_path: Path, ending: str) -> None:
    photo, caption = noisy((60, 40)), make_caption(["a", "dog"])
    pixels, alphas = photo.tobytes(), caption.alphas.copy()
    for name in ("first", "second"):
        animate(photo, caption, seconds_per_word=0.2).save(tmp_path / f"{name}{ending}")
    first, second = (tmp_path / f"{name}{ending}" for name in ("first", "second"))
    assert first.read_bytes() == second.read_bytes()
    assert photo.tobytes() == pixels
    np.testing.assert_array_equal(caption.alphas, alphas)


def test_notebooks_show_animations() -> None:
    shown = animate(flat((40, 30)), make_caption(["a", '"<dog>"']), seconds_per_word=0.2)
    shown_html = shown._repr_html_()
    match = re.fullmatch(
        r'<img alt="([^"<>]*)" width="\d+" height="\d+" src="([^"<>]*)">', shown_html
    )
    assert match
    assert html.unescape(match[1]).endswith('a "<dog>"')
    with Image.open(
        io.BytesIO(b64decode(match[2].removeprefix("data:image/webp;base64,")))
    ) as file:
        assert file.format == "WEBP"
        assert file.n_frames > 1


# --- words and options ---------------------------------------------------------------------------


def test_an_empty_caption_is_the_photo_and_a_note(tmp_path: Path) -> None:
    photo = noisy((60, 40))
    animation = animate(photo, make_caption([]))
    frames = list(animation.frames())
    assert len(positions_of(frames[0], photo)) == 1
    assert (luma(frames[0])[45:] < 200).any()
    for ending in (".gif", ".webp", ".mp4"):
        animation.save(tmp_path / f"animation{ending}")


@pytest.mark.parametrize(
    "word",
    ["W" * 99, "猫が座っている", "🐈", "line\nbreak", "nul\0l", "\ud800", "", " ", "i" * 5000],
)
def test_any_word_can_be_drawn(word: str) -> None:
    photo, caption = noisy((60, 40)), make_caption([word, "dog"])
    animation = animate(photo, caption, seconds_per_word=0.1)
    for frame in animation.frames():
        assert frame.size == animation.size
    animation._repr_html_()


def test_nan_can_be_drawn() -> None:
    nothing = np.full(2, math.nan, np.float32)
    caption = replace(make_caption(["a", "dog"]), gates=nothing, log_probs=nothing)
    assert len(list(animate(noisy((60, 40)), caption).frames())) > 2


def test_a_long_caption_has_all_its_lines_from_the_start() -> None:
    animation = animate(noisy((90, 30)), make_caption(["standing"] * 40), seconds_per_word=0.1)
    scene = animation._scene
    for left, line, word in scene.words:
        assert left >= 0
        assert word == "standing"
        bottom = scene.sentence_top + (line + 1) * round(1.55 * scene.text)
        assert bottom <= scene.numbers_top
    assert scene.numbers_top < scene.height


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"colormap": "jet"}, "'jet'; choose one of inferno"),
        ({"theme": "blue"}, "'blue'; choose one of light, dark"),
        ({"panel_size": -1}, "panel_size is -1; use"),
        ({"seconds_per_word": 0}, "seconds_per_word is 0; use 0.05 to 60"),
        ({"seconds_per_word": math.nan}, "seconds_per_word is nan; use"),
        ({"frames_per_second": 0}, "frames_per_second is 0; use an integer from 1 to 50"),
        ({"frames_per_second": 51}, "frames_per_second is 51; use an integer"),
        ({"frames_per_second": 12.5}, "frames_per_second is 12.5; use an integer"),
    ],
)
def test_errors(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        animate(flat((40, 30)), make_caption(["a"]), **options)  # type: ignore[arg-type]


def test_an_invalid_caption_is_an_error() -> None:
    broken = replace(make_caption(["a", "dog"]), alphas=np.full((2, 7, 7), np.nan, np.float32))
    with pytest.raises(ConfigError, match="NaN or infinity"):
        animate(flat((40, 30)), broken)
