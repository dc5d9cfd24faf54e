"""Helpers for browser tests."""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from axe_playwright_python.sync_playwright import Axe
from numpy.typing import NDArray
from playwright.sync_api import Page as Tab
from playwright.sync_api import expect

from captioner import load
from captioner.cli.main import OK, main
from captioner.errors import ConfigError
from captioner.serving.site import writer
from captioner.serving.site.onnxruntime_web import runtime_files

# Every site has the same runtime, which takes seconds to compress.
writer._compressed = functools.cache(writer._compressed)  # type: ignore[assignment]


def drawn(tab: Tab) -> NDArray[np.int64]:
    """Return the pixels of the canvas."""
    size, values = tab.evaluate(
        """() => {
            const canvas = document.querySelector(".stage canvas");
            const {data} = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
            return [[canvas.height, canvas.width], [...data]];
        }"""
    )
    return np.array(values).reshape(*size, 4)[..., :3]


def violations(tab: Tab) -> list[str]:
    """Return the problems that axe-core finds: WCAG 2.2 A and AA, and its best practices."""
    tags = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]
    options: dict[str, Any] = {"runOnly": tags, "resultTypes": ["violations"]}
    found = Axe().run(tab, options=options).response["violations"]
    return [f"{rule['id']}: {node['target']}" for rule in found for node in rule["nodes"]]


def out_of_order(tab: Tab) -> list[str]:
    """Return texts and controls that are read after an element shown below or to the right of them.

    Screen readers and the Tab key follow the order of the document. In this order, each element
    must begin below the start of the previous element, or to its right.
    """
    found: list[str] = tab.evaluate(
        """() => {
            const wanted = [];
            for (const one of document.querySelectorAll("main *")) {
                const own = [...one.childNodes].some((n) => n.nodeType === 3 && n.data.trim());
                const control = one.matches("button, input, [tabindex='0']");
                const box = one.getBoundingClientRect();
                const shown = one.checkVisibility() && box.width > 1 && box.height > 1;
                if (shown && (own || control) && !one.closest("label")) wanted.push([one, box]);
            }
            return wanted.slice(1).flatMap(([one, box], i) => {
                const before = wanted[i][1];
                const fine = box.bottom > before.top || box.left >= before.right - 1;
                return fine ? [] : [`${wanted[i][0].outerHTML} > ${one.outerHTML}`];
            });
        }"""
    )
    return found


# --- the page ------------------------------------------------------------------------------------


def runtime() -> dict[str, bytes]:
    """Return the files of onnxruntime-web, which are downloaded once."""
    try:
        return runtime_files()
    except ConfigError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(error))


def make_site(model: Path, parent: Path) -> SimpleNamespace:
    """Make the ``folder`` of a site, the ``exported`` folder in it, and its ``model``."""
    exported, folder = parent / "exported", parent / "site"
    assert main(["export", str(model), "-o", str(exported)]) == OK
    writer.write_site(exported, folder, runtime())
    return SimpleNamespace(folder=folder, exported=exported, model=load(exported))


def saved(tab: Tab, name: str, within: str = "Download all results") -> Path:
    """Return the file that a button downloads."""
    group = tab.get_by_role("group", name=within)
    with tab.expect_download() as download:
        group.get_by_role("button", name=name).click()
    file = Path(download.value.path())
    return file.rename(file.with_name(download.value.suggested_filename))


def results(tab: Tab, *photos: Path) -> list[dict[str, Any]]:
    """Return the captions of photos as the page saves them."""
    tab.locator("#file").set_input_files(photos)
    expect(tab.locator(".count")).to_have_text(f"{len(photos)} of {len(photos)} captioned")
    found: list[dict[str, Any]] = json.loads(saved(tab, "JSON").read_text())
    assert [entry["image"] for entry in found] == [photo.name for photo in photos]
    return [entry["captions"][0] for entry in found]


def assert_as_python(found: list[dict[str, Any]], model: Any, photos: list[Path]) -> None:
    for one, photo in zip(found, photos, strict=True):
        caption = model.caption(photo)
        assert one["log_prob"] == pytest.approx(caption.log_prob, abs=2e-3)
        if one["text"] != caption.text:  # a tie, which random weights have
            assert one["log_prob"] == pytest.approx(caption.log_prob, abs=1e-4)
            continue
        assert one["log_probs"] == pytest.approx(caption.log_probs.tolist(), abs=2e-3)
        assert one["confidence"] == pytest.approx(caption.confidence, abs=2e-3)
        data = caption.to_dict()
        for name in ("truth", "phrases", "left_out", "keywords"):
            assert_near(one.get(name), data.get(name))


def assert_near(one: Any, other: Any) -> None:
    """Check that values are equal except for rounding errors of numbers."""
    if isinstance(one, float) and isinstance(other, float):
        assert one == pytest.approx(other, abs=2e-3)
    elif isinstance(one, dict) and isinstance(other, dict):
        assert one.keys() == other.keys()
        for name, value in one.items():
            assert_near(value, other[name])
    elif isinstance(one, list) and isinstance(other, list):
        assert len(one) == len(other)
        for pair in zip(one, other, strict=True):
            assert_near(*pair)
    else:
        assert one == other
