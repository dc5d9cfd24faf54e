"""The shipped model and the commands give what they gave before a restructuring.

The files in tests/golden come from tests/golden/make.py, which ran before it. Texts, words and the
structure of files are equal; numbers may differ as they do between processors.
"""

from __future__ import annotations

import importlib.util
import json
import re
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import captioner

GOLDEN = Path(__file__).parents[1] / "golden"
TOLERANCES = {"log_prob": 2e-4, "log_probs": 2e-4, "gates": 2e-4, "confidence": 2e-4}
MAPS = 5e-4
"""Of which 1.2e-4 for the digits that are stored."""
FILES = 2e-4
"""Of which 1e-4 for numbers that are rounded to four decimals."""
NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e-\d+)?")
CAPTIONS = json.loads((GOLDEN / "captions.json").read_text())

spec = importlib.util.spec_from_file_location("golden", GOLDEN / "make.py")
make = importlib.util.module_from_spec(spec)
spec.loader.exec_module(make)


@pytest.fixture(scope="module")
def model() -> captioner.Captioner:
    return make.load()


@pytest.fixture(scope="module")
def maps() -> dict[str, Any]:
    with np.load(GOLDEN / "alphas.npz") as stored:
        return {name: stored[name] / 4096 for name in stored}


def check(found: list[captioner.Caption], name: str, key: str, maps: dict[str, Any]) -> None:
    for one, golden in zip(map(make.describe, found), CAPTIONS[name][key], strict=True):
        for field, value in golden.items():
            exact = value is None or field not in TOLERANCES
            near = value if exact else pytest.approx(value, rel=0, abs=TOLERANCES[field])
            assert one[field] == near, (name, key, field, golden["text"])
    assert np.abs(found[-1].alphas - maps[f"{name}/{key}"]).max() <= MAPS, (name, key)


def check_text(found: str, expected: str, tolerance: float) -> None:
    """The same text, but for decimals."""
    for line, golden in zip_longest(found.splitlines(True), expected.splitlines(True)):
        assert NUMBER.sub("0", line or "") == NUMBER.sub("0", golden or "")
        for one, other in zip(NUMBER.findall(line), NUMBER.findall(golden), strict=True):
            exact = other.lstrip("-").isdecimal()
            near = other if exact else pytest.approx(float(other), rel=0, abs=tolerance)
            assert (one if exact else float(one)) == near, (line, golden)


@pytest.mark.parametrize("name", make.SEARCHES)
def test_searches(name, model, maps):
    found = make.search(model, name)

    assert list(found) == list(CAPTIONS[name])
    for photo, captions in found.items():
        check(captions, name, photo, maps)


@pytest.mark.parametrize("method", make.METHODS)
def test_explanations(method, model, maps):
    check([make.explain(model, method)], "explained", method, maps)


SLOW = ("images.json", "faithfulness.json", "calibrate.json")


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=[pytest.mark.slow] * (x in SLOW)) for x in make.COMMANDS]
)
def test_commands(name, tmp_path):
    golden = (make.FORMATS / name).read_bytes().decode()

    check_text(make.command(name, tmp_path), golden, 1e-9 if name == "results.json" else FILES)


@pytest.mark.slow
def test_the_server():
    check_text(make.served(), (make.FORMATS / "served.txt").read_text(), FILES)
