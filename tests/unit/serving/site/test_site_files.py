"""The files of the static site; tests/integration/test_browser_site.py opens it in a browser."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
from toy_captioner import toy_calibrator

from captioner.data.images import image_size
from captioner.errors import ConfigError
from captioner.model.preprocessing import Preprocessing
from captioner.options import Role, SearchOptions
from captioner.schema import marked, option_fields
from captioner.serving.site import writer
from captioner.serving.site.onnxruntime_web import FILES
from captioner.serving.site.writer import write_site

RUNTIME = {name: f"content of {name}".encode() for name in FILES}
WORDS = ("a", "dog", "'s", "-lrb-")


def write_exported(folder: Path, words: tuple[str, ...] = WORDS, **search: Any) -> Path:
    """Write an exported folder with graphs that are never run."""
    options = {"beam_size": 3, "max_length": 6} | search
    axis = {"first": 16.0, "pitch": 32.0, "start": 0.0, "stop": 64.0}
    tokens = {"start": 1, "end": 2, "never_generated": [0, 1, 3], "first_word": 4, "styles": {}}
    config = {
        "exported": {"opset": 18, "precision": "int8", "tokens": tokens},
        "format_version": 1,
        "encoder": {"name": "tiny", "grid": [2, 2], "geometry": {"x": axis, "y": axis}},
        "decoder": {},
        "preprocessing": vars(Preprocessing(64)),
        "search": options,
        "vocabulary": list(words),
    }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("encoder.onnx", "decoder.onnx", "document_frequencies.json.gz"):
        (folder / name).write_bytes(name.encode())
    (folder / "confidence.safetensors").write_bytes(
        toy_calibrator(SearchOptions(**options)).to_bytes()
    )
    return folder


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    return write_exported(tmp_path / "exported")


def test_the_page_reads_every_search_option_that_it_is_given() -> None:
    """Options that the page does not read have the mark ``NOT_IN_BROWSER``."""
    web = Path(writer.__file__).parent / "web"
    code = "".join(path.read_text(encoding="utf-8") for path in web.glob("*.js"))
    absent = (Role.NOT_IN_BROWSER, Role.SAMPLING)
    known = {*option_fields(SearchOptions)}.difference(*(marked(SearchOptions, r) for r in absent))
    as_tokens = {"banned_words", "guard_endings"}
    of_groups = {"diversity"}
    assert {name for name in known if name not in code} == as_tokens | of_groups


def site_of(exported: Path) -> dict[str, bytes]:
    target = exported.parent / "site"
    write_site(exported, target, RUNTIME)
    return {
        file.relative_to(target).as_posix(): file.read_bytes()
        for file in target.rglob("*")
        if file.is_file()
    }


def test_the_service_worker_knows_every_file_by_its_content(exported) -> None:
    files = site_of(exported)

    worker = files.pop("sw.js").decode()
    assert "@@" not in worker
    found = re.search(r"const DIGESTS = (\{.*?\});", worker, re.DOTALL)
    assert found is not None
    assert json.loads(found[1]) == {
        name: base64.b64encode(hashlib.sha256(content).digest()).decode()
        for name, content in files.items()
    }


def test_the_manifest_makes_it_installable(exported) -> None:
    files = site_of(exported)
    manifest = json.loads(files["manifest.json"])

    assert manifest["display"] == "standalone"
    for icon in manifest["icons"]:
        width, height = image_size(exported.parent / "site" / icon["src"])
        assert icon["sizes"] == f"{width}x{height}"
    assert {icon["sizes"] for icon in manifest["icons"]} == {"192x192", "512x512"}
    assert "maskable" in {icon.get("purpose") for icon in manifest["icons"]}


def config_of(exported: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(site_of(exported)["model/config.json"])
    return found


def test_search_words_become_tokens(tmp_path) -> None:
    exported = write_exported(
        tmp_path / "exported", guard_endings=True, block_repeats=True, banned_words=["dog"]
    )

    words = config_of(exported)["words"]
    assert words["banned"] == [5]
    assert words["bad_endings"] == [4, 6]
    assert 4 in words["repeatable"]


def test_the_confidence_is_left_out_where_it_does_not_apply(exported, tmp_path) -> None:
    assert config_of(exported)["confidence"]

    other = write_exported(tmp_path / "other")
    calibrated = toy_calibrator(SearchOptions(beam_size=3, max_length=9))
    (other / "confidence.safetensors").write_bytes(calibrated.to_bytes())
    assert config_of(other)["confidence"] is None


def test_a_certainty_needs_a_reading(tmp_path) -> None:
    exported = write_exported(tmp_path / "exported", certainty=0.5)
    with pytest.raises(ConfigError, match=r"certainty to 0\.5, but the model cannot judge"):
        site_of(exported)


def test_searches_that_the_page_lacks_are_refused(tmp_path) -> None:
    for search in ({"temperature": 0.7, "beam_size": 1}, {"forced_words": ["dog"]}):
        name = next(iter(search))
        exported = write_exported(tmp_path / name, **search)
        with pytest.raises(ConfigError, match=f"{name} to .* the page does not support"):
            site_of(exported)
    assert not (tmp_path / "site").exists()
