"""The manifest of a folder of shards."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from toy_shards import PER_SHARD, copied, grey_photos

from captioner.data.shard_writer import write_shards
from captioner.data.shards import MANIFEST, read_manifest
from captioner.errors import DataError


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Read-only shards."""
    made = tmp_path_factory.mktemp("shards") / "train"
    write_shards(grey_photos(tmp_path_factory.mktemp("photos")), made, photos_per_shard=PER_SHARD)
    return made


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data.update(version=2), "is not a list of shards"),
        (lambda data: data.pop("shards"), "is not a list of shards"),
        (lambda data: data.update(shards=[]), "is not a list of shards"),
        (lambda data: data["shards"][0].pop("sha256"), "is not a list of shards"),
        (lambda data: data["shards"][0].update(name="../../etc/passwd"), "is not a list of shards"),
        (lambda data: data["shards"][0].update(name="shard-000099.tar"), "has 0 bytes"),
        (lambda data: data["shards"][0].update(bytes=7), "bytes, but shards.json lists 7"),
    ],
)
def test_invalid_manifests(
    folder: Path, tmp_path: Path, change: Callable[[Any], None], message: str
):
    out = copied(folder, tmp_path / "out")
    data = json.loads((out / MANIFEST).read_text())
    change(data)
    (out / MANIFEST).write_text(json.dumps(data))
    with pytest.raises(DataError, match=re.escape(message)) as caught:
        read_manifest(out)
    assert "\n" not in str(caught.value)
