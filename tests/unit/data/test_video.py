"""Frames of videos: which, when, and what happens with damaged ones."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tiny_video import COLOURS, shots, write_video

video = pytest.importorskip("captioner.data.video", exc_type=ImportError)


def colour(image: Image.Image) -> str:
    """The colour of a frame, in the middle of its right half."""
    found = np.array(image.getpixel((image.width * 3 // 4, image.height // 2)), int)
    return min(COLOURS, key=lambda name: np.abs(found - COLOURS[name]).sum())


def read(
    path: Path, every: float | None, min_side: int = 640
) -> tuple[list[tuple[float, str]], str]:
    """Times and colours of the frames, and the problem."""
    opened = video.Video(path, every, min_side)
    found = [(round(image.info["start"], 2), colour(image)) for image in opened.frames()]
    return found, opened.problem


@pytest.mark.parametrize("name", ["a.mp4", "a.mkv", "a.avi", "a.mov", "a.ts"])
def test_frames_at_an_interval(name, tmp_path: Path):
    path = write_video(tmp_path / name, shots("red", "green", "blue"))
    expected = [(0.0, "red"), (1.5, "red"), (3.0, "green"), (4.5, "blue")]
    assert read(path, 1.5) == (expected, "")


def test_a_frame_is_found_while_it_is_on_the_screen(tmp_path: Path):
    """Recordings of screens have frames only where something changes."""
    frames = [(0.0, "red"), (3.0, "green"), (20.0, "blue"), (20.5, "white"), (21.0, "white")]
    path = write_video(tmp_path / "a.mkv", frames)
    assert read(path, 5.0)[0] == [(0.0, "red"), (5.0, "green"), (20.0, "blue")]


def test_the_first_frame_of_each_shot(tmp_path: Path):
    path = write_video(tmp_path / "a.mp4", shots("red", "green", "white", "white"))
    assert read(path, None) == ([(0.0, "red"), (2.0, "green"), (4.0, "white")], "")


@pytest.mark.parametrize("keep", [12, 1000])
def test_skipping_to_key_frames_finds_the_same_frames(keep, tmp_path: Path, monkeypatch):
    path = write_video(
        tmp_path / "a.mp4", shots("red", "green", "blue", "white", seconds=3.2), keep=keep
    )
    expected = read(path, 3.0)
    monkeypatch.setattr(video, "_SEEK", 1.0)
    decoded: list[float] = []
    decode = video.Video._decoded

    def counted(self):
        for time, frame in decode(self):
            decoded.append(time)
            yield time, frame

    monkeypatch.setattr(video.Video, "_decoded", counted)
    assert read(path, 3.0) == expected
    assert len(decoded) < 150 if keep == 12 else 320 <= len(decoded) < 420  # of 320


@pytest.mark.parametrize(("degrees", "matrix"), [(90, (0, 1, -1, 0)), (180, (-1, 0, 0, -1))])
def test_frames_are_upright(degrees, matrix, tmp_path: Path):
    """The black third, on the left, is turned clockwise."""
    path = write_video(tmp_path / "a.mp4", shots("red"))
    data = bytearray(path.read_bytes())
    at = data.index(b"tkhd") + 4 + 40
    a, b, c, d = (value << 16 for value in matrix)
    data[at : at + 36] = struct.pack(">9i", a, b, 0, c, d, 0, 0, 0, 1 << 30)
    path.write_bytes(data)

    image = next(video.Video(path, 1.0, 32).frames())

    dark = np.asarray(image).sum(axis=2) < 128
    assert image.size == ((32, 48) if degrees == 90 else (48, 32))
    assert dark[:12].all() if degrees == 90 else dark[:, -12:].all()
    assert dark.mean() == pytest.approx(1 / 3, abs=0.05)


def test_a_truncated_video_has_its_beginning(tmp_path: Path):
    path = write_video(
        tmp_path / "a.mp4", shots("red", "green", "blue", "white"), movflags="faststart"
    )
    data = path.read_bytes()
    path.write_bytes(data[: data.index(b"mdat") + (len(data) - data.index(b"mdat")) // 2])

    found, problem = read(path, 1.0)

    assert [name for _, name in found] == ["red", "red", "green", "green"]
    assert "a.mp4: the video is damaged or truncated at 00:00:0" in problem


def test_damage_costs_no_other_frame(tmp_path: Path):
    path = write_video(tmp_path / "a.mp4", shots("red", "green", "blue", "white"), keep=5)
    data = bytearray(path.read_bytes())
    start = data.index(b"mdat") + 4
    middle = start + (data.index(b"moov") - start) // 2
    data[middle : middle + 300] = b"\xff" * 300
    path.write_bytes(data)

    found, problem = read(path, 1.0)

    assert {name for _, name in found} >= {"red", "green", "white"}
    assert "a.mp4: the video is damaged or truncated at 00:00:0" in problem


def test_what_is_not_a_video_is_one_line(tmp_path: Path, monkeypatch):
    whole = write_video(tmp_path / "whole.mp4", shots("red"))
    Image.new("RGB", (64, 48)).save(tmp_path / "photo.jpg")
    playlist = f"#EXTM3U\n#EXT-X-TARGETDURATION:2\n#EXTINF:2,\n{whole}\n#EXT-X-ENDLIST\n"
    for name, content, problem in (
        ("none.mp4", None, "the file does not exist"),
        ("empty.mp4", b"", "the file is damaged or not a video"),
        ("text.mp4", b"hello" * 100, "the file is damaged or not a video"),
        ("list.mp4", playlist.encode(), "the file is damaged or not a video"),
        ("head.mp4", whole.read_bytes()[:900], "the file is damaged or not a video"),
        (
            "photo.jpg",
            (tmp_path / "photo.jpg").read_bytes(),
            "the file is a photo, not a video; leave out --every",
        ),
    ):
        if content is not None:
            (tmp_path / name).write_bytes(content)
        found, message = read(tmp_path / name, 1.0)
        assert found == []
        assert message.startswith(f"{tmp_path / name}: {problem}")
        assert "\n" not in message
    monkeypatch.setattr(video, "MAX_PIXELS", 96 * 64 - 1)
    assert "the video is 96 x 64 pixels, but the limit is 6,143" in read(whole, 1.0)[1]
