"""``captioner caption --every``: captions of videos."""

from __future__ import annotations

import csv
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tiny_video import shots, write_video

from captioner.cli.main import OK, SOME_FAILED
from captioner.cli.videos import merged
from captioner.messages import clock

pytest.importorskip("av")

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(autouse=True)
def clip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``clip.mp4`` in the current folder."""
    monkeypatch.chdir(tmp_path)
    write_video(tmp_path / "clip.mp4", shots("red", "green", "blue"), movflags="faststart")


def test_all_formats_have_the_same_captions(caption: Run):
    code, out, err = caption("clip.mp4", "--every", "1s")
    assert (code, err) == (OK, "")
    for ending in ("json", "csv", "vtt"):
        assert caption("clip.mp4", "--every", "1s", "-o", f"clip.{ending}")[:2] == (OK, "")

    found = json.loads(Path("clip.json").read_text())
    starts, ends = ([one[name] for one in found] for name in ("start", "end"))
    assert starts[0] == 0
    assert starts[1:] == ends[:-1]
    assert ends[-1] == pytest.approx(6, abs=0.05)
    texts = [one["captions"][0]["text"] for one in found]
    spans = [f"{clock(one['start'])} --> {clock(one['end'])}" for one in found]
    pairs = list(zip(spans, texts, strict=True))
    assert out.splitlines() == [f"clip.mp4 {span}: {text}" for span, text in pairs]
    cues = "".join(f"\n{span}\n{text}\n" for span, text in pairs)
    assert Path("clip.vtt").read_text() == f"WEBVTT\n{cues}"
    rows = list(csv.DictReader(Path("clip.csv").read_text().splitlines()))
    assert [row["caption"] for row in rows] == texts
    assert [float(row["start"]) for row in rows] == starts


def test_equal_neighbours_are_merged():
    def one(text: str, confidence: float | None = None) -> dict[str, Any]:
        captions = [{"text": text, "confidence": confidence}] if text else []
        return {"image": "a", "captions": captions}

    given = [one("dog", 0.4), one("dog", 0.9), one("dog"), one(""), one("dog")]
    entries = [e | {"start": start, "end": start + 1} for start, e in enumerate(given)]
    best = one("dog", 0.9) | {"start": 0, "end": 3}
    expected = [best, one("") | {"start": 3, "end": 4}, one("dog") | {"start": 4, "end": 5}]
    assert list(merged(entries)) == expected


def test_folders_are_searched_for_videos_only_with_every(caption: Run, tiny: SimpleNamespace):
    Path("holiday").mkdir()
    for photo in tiny.photos.iterdir():
        shutil.copy(photo, "holiday")
    data = Path("clip.mp4").read_bytes()
    Path("holiday", "a.MP4").write_bytes(data)
    Path("holiday", "b.mp4").write_bytes(data[: len(data) * 2 // 3])
    Path("holiday", "c.mp4").write_bytes(b"text")

    code, out, err = caption("holiday")
    assert (code, len(out.splitlines())) == (OK, 4)
    assert "skipped 3 videos (for videos, run captioner caption --every 5s" in err
    code, out, err = caption("holiday", "--every", "shot")

    assert code == SOME_FAILED
    assert {line.split()[0] for line in out.splitlines()} == {"holiday/a.MP4", "holiday/b.mp4"}
    assert "holiday/b.mp4: the video is damaged" in err
    assert "holiday/c.mp4: " in err
    assert "skipped 4 files that are not videos (4 .png)" in err
    assert "clip.mp4: the file is a video; to caption its frames" in caption("clip.mp4")[2]
