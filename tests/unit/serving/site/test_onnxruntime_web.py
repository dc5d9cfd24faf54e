"""The source of onnxruntime-web's files, and the rejection of any other content."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import tarfile
import urllib.error
from pathlib import Path

import pytest

from captioner.errors import ConfigError
from captioner.serving.site import onnxruntime_web
from captioner.serving.site.onnxruntime_web import FILES, VERSION, runtime_files

CONTENT = {name: f"content of {name}".encode() for name in FILES}


def packed(content: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name, data in {**content, "ort.all.js": b"not needed"}.items():
            member = tarfile.TarInfo(f"package/dist/{name}")
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return buffer.getvalue()


TARBALL = packed(CONTENT)


@pytest.fixture(autouse=True)
def registry(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """A small package in place of the real one, without npm; yields the requested addresses."""
    requested: list[str] = []
    sha512 = base64.b64encode(hashlib.sha512(TARBALL).digest()).decode()

    def urlopen(url: str, timeout: float) -> io.BytesIO:
        requested.append(url)
        return io.BytesIO(TARBALL)

    monkeypatch.setattr(onnxruntime_web, "INTEGRITY", f"sha512-{sha512}")
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.setattr("urllib.request.urlopen", urlopen)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return requested


def test_it_is_downloaded_once(registry) -> None:
    assert runtime_files() == runtime_files() == CONTENT
    assert registry == [
        f"https://registry.npmjs.org/onnxruntime-web/-/onnxruntime-web-{VERSION}.tgz"
    ]


def test_a_tarball_and_the_package_folder_need_no_network(tmp_path, registry) -> None:
    (tmp_path / "package.tgz").write_bytes(TARBALL)
    folder = tmp_path / "node_modules" / "onnxruntime-web"
    (folder / "dist").mkdir(parents=True)
    (folder / "package.json").write_text(json.dumps({"version": VERSION}))
    for name, data in CONTENT.items():
        (folder / "dist" / name).write_bytes(data)

    assert runtime_files(tmp_path / "package.tgz") == runtime_files(folder) == CONTENT
    assert registry == []
    (folder / "package.json").write_text(json.dumps({"version": "1.0.0"}))
    with pytest.raises(ConfigError, match="the version of the package is not"):
        runtime_files(folder)


def test_other_content_is_refused_and_not_kept(tmp_path, monkeypatch) -> None:
    other = packed(CONTENT | {"ort.wasm.min.mjs": b"something else"})
    (tmp_path / "package.tgz").write_bytes(other)
    monkeypatch.setattr("urllib.request.urlopen", lambda url, timeout: io.BytesIO(other))

    for source in (None, tmp_path / "package.tgz"):
        with pytest.raises(ConfigError, match="its SHA-512 differs"):
            runtime_files(source)
    assert not onnxruntime_web.cache_file().exists()


def test_without_a_network_one_line_says_what_to_do(monkeypatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise urllib.error.URLError("no route to host")

    monkeypatch.setattr("urllib.request.urlopen", fail)

    with pytest.raises(
        ConfigError, match=r"cannot be downloaded .*; run npm pack onnxruntime-web@.*$"
    ):
        runtime_files()
    with pytest.raises(
        ConfigError, match=r"^--onnxruntime-web nothing\.tgz cannot be used .*; pass the tarball"
    ):
        runtime_files("nothing.tgz")
