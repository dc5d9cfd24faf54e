"""Damaged photos give an image or a one-line error, without leaking memory."""

from __future__ import annotations

import gc
import io
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from mutated_photos import bombs, mutated_photos, original_photos, png, progressive

from captioner.data.formats import format_by_name
from captioner.data.images import open_image
from captioner.errors import ImageError, LargeImageError
from captioner.model.preprocessing import Preprocessing

SECONDS = 3.0
"""Processor time in which any photo of a few megabytes must be read or refused."""

PROCESS = Path("/proc/self")
ON_LINUX = pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")

CROP, SQUASH = Preprocessing(image_size=64), Preprocessing(image_size=64, resize="squash")


def attempt(name: str, content: bytes, seconds: float = SECONDS) -> str:
    """Decode and preprocess a photo in time; return "read" or the name of the error."""
    start, outcome = time.process_time(), "read"
    try:
        image = open_image(io.BytesIO(content), name=name)
    except ImageError as error:
        outcome, message = type(error).__name__, str(error)
        assert message.startswith(f"{name}: ")
        assert "; " in message, message  # followed by advice
        assert "\n" not in message
    else:
        assert image.mode == "RGB"
        assert all(seen.pixels(image).shape == (64, 64, 3) for seen in (CROP, SQUASH))
    assert time.process_time() - start < seconds, name
    return outcome


@pytest.mark.parametrize("name", original_photos())
def test_every_original_is_read_upright(name: str):
    image = open_image(io.BytesIO(original_photos()[name]))

    known = {"icon.ico": (32, 22)}
    rotated = name in ("rotated.jpeg", "transparent.png", "rotated.tif", "plain.webp", "plain.avif")
    assert image.size == known.get(name, (33, 47) if rotated else (47, 33))
    kind = format_by_name(name)
    assert kind is not None
    assert kind.decodable


def test_a_hundred_mutated_photos():
    outcomes = Counter(attempt(name, content) for name, content in mutated_photos(0, 130))

    assert outcomes["read"] > 40
    assert outcomes["ImageError"] > 20
    assert outcomes["NotAnImageError"] > 3


@pytest.mark.slow
@ON_LINUX
def test_bombs_are_refused_or_read_in_time():
    photos, before = bombs(), resident()
    PROCESS.joinpath("clear_refs").write_text("5")  # the peak counts from here
    outcomes = {name: attempt(name, content) for name, content in photos.items()}

    assert peak() - before < 100e6
    read = {"profile.png", "texts.png", "palette.png", "frames.gif", "pages.tif"}
    large = {"scans.jpg", "few-scans-of-many-pixels.jpg", "wide.png", "tall.png", "tiles.tif"}
    assert {name for name, outcome in outcomes.items() if outcome == "read"} <= read
    assert {name for name, outcome in outcomes.items() if outcome == "LargeImageError"} == large


@pytest.mark.stress
@pytest.mark.parametrize("content", [png((13_000, 13_000)), progressive((13_000, 13_000), 10)])
def test_photos_at_the_limits_are_read_in_bounded_time(content: bytes):
    assert attempt("a", content, seconds=20) == "read"


def peak() -> int:
    """Largest resident memory in bytes."""
    return 1024 * int(PROCESS.joinpath("status").read_text().split("VmHWM:")[1].split()[0])


def resident() -> int:
    """Resident memory in bytes."""
    gc.collect()
    return int(PROCESS.joinpath("statm").read_text().split()[1]) * 4096


@pytest.mark.stress
@ON_LINUX
def test_ten_thousand_mutated_photos_leak_no_memory(capfd: pytest.CaptureFixture[str]):
    """Only image errors, no lines of libraries and no memory growth."""
    outcomes: Counter[str] = Counter()
    memory = []
    for number, (name, content) in enumerate(mutated_photos(1, 10_000), 1):
        outcomes[attempt(name, content)] += 1
        if number % 2000 == 0:
            memory.append(resident())

    assert outcomes.total() == 10_000
    assert outcomes["read"] > 2000
    assert outcomes[LargeImageError.__name__] > 100
    assert outcomes["ImageError"] > 2000
    assert np.ptp(memory[1:]) < 60e6, memory
    out, err = capfd.readouterr()
    assert out == ""
    assert err == ""
