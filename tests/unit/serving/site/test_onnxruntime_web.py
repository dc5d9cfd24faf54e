"""Where the files of onnxruntime-web come from, and that no other content passes for them."""

from __future__ import annotations

import base64
import hashlib
import io
import subprocess
import tarfile
import urllib.error
from pathlib import Path

import pytest

from captioner.errors import ConfigError
from captioner.serving.site import onnxruntime_web
from captioner.serving.site.onnxruntime_web import runtime_files

CONTENT = {name: f"content of {name}".encode() for name in onnxruntime_web.DIGESTS}


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
def downloads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """A small package in place of the real one, and every download of it."""
    made: list[str] = []
    sha512 = base64.b64encode(hashlib.sha512(TARBALL).digest()).decode()
    digests = {name: hashlib.sha256(data).hexdigest() for name, data in CONTENT.items()}

    def by_npm() -> bytes:
        made.append("npm")
        return TARBALL

    monkeypatch.setattr(onnxruntime_web, "INTEGRITY", f"sha512-{sha512}")
    monkeypatch.setattr(onnxruntime_web, "DIGESTS", digests)
    monkeypatch.setattr(onnxruntime_web, "_by_npm", by_npm)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return made


def write_folder(folder: Path, content: dict[str, bytes]) -> Path:
    folder.mkdir(parents=True)
    for name, data in content.items():
        (folder / name).write_bytes(data)
    return folder


def test_it_is_downloaded_once(downloads) -> None:
    assert runtime_files() == CONTENT
    assert runtime_files() == CONTENT
    assert downloads == ["npm"]


def test_a_damaged_cache_is_replaced(downloads) -> None:
    runtime_files()
    (onnxruntime_web.cache_folder() / "ort.wasm.min.mjs").write_bytes(b"damaged")

    assert runtime_files() == CONTENT
    assert runtime_files() == CONTENT
    assert downloads == ["npm", "npm"]


def test_a_tarball_and_the_package_folder_need_no_network(tmp_path, downloads) -> None:
    (tmp_path / "package.tgz").write_bytes(TARBALL)
    package = tmp_path / "node_modules" / "onnxruntime-web"
    write_folder(package / "dist", CONTENT)

    for source in (tmp_path / "package.tgz", package, package / "dist"):
        assert runtime_files(source) == CONTENT
    assert downloads == []


@pytest.mark.parametrize("changed", list(CONTENT))
def test_other_content_is_refused(tmp_path, changed) -> None:
    other = CONTENT | {changed: b"something else"}
    (tmp_path / "package.tgz").write_bytes(packed(other))
    folder = write_folder(tmp_path / "package", other)

    with pytest.raises(ConfigError, match=r"package.tgz is not onnxruntime-web .* SHA-512 differs"):
        runtime_files(tmp_path / "package.tgz")
    with pytest.raises(ConfigError, match=f"{changed} is not that of onnxruntime-web"):
        runtime_files(folder)


def test_other_content_from_the_registry_is_refused_and_not_kept(monkeypatch) -> None:
    monkeypatch.setattr(onnxruntime_web, "_by_npm", lambda: packed(CONTENT | {"x": b"y"}))

    with pytest.raises(ConfigError, match="the package of the npm registry is not"):
        runtime_files()
    assert not onnxruntime_web.cache_folder().exists()


def test_what_is_missing_is_named(tmp_path) -> None:
    incomplete = {name: CONTENT[name] for name in list(CONTENT)[1:]}
    folder = write_folder(tmp_path / "package", incomplete)

    with pytest.raises(ConfigError, match=r"No such file or directory \(ort.wasm.min.mjs\); give"):
        runtime_files(folder)
    with pytest.raises(ConfigError, match=r"nothing.tgz: No such file or directory; give the tar"):
        runtime_files(tmp_path / "nothing.tgz")


def test_without_npm_it_is_downloaded_from_the_registry(monkeypatch) -> None:
    asked = []

    def urlopen(url: str, timeout: float) -> io.BytesIO:
        asked.append(url)
        return io.BytesIO(TARBALL)

    monkeypatch.undo()
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.setattr("urllib.request.urlopen", urlopen)

    assert onnxruntime_web._download() == TARBALL
    assert asked == [
        "https://registry.npmjs.org/onnxruntime-web/-/"
        f"onnxruntime-web-{onnxruntime_web.VERSION}.tgz"
    ]


def test_npm_is_asked_for_the_pinned_version(monkeypatch) -> None:
    commands = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        (Path(command[-1]) / "package.tgz").write_bytes(TARBALL)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.undo()
    monkeypatch.setattr("shutil.which", lambda name: "/bin/npm")
    monkeypatch.setattr("subprocess.run", run)

    assert onnxruntime_web._download() == TARBALL
    assert commands[0][:3] == ["/bin/npm", "pack", f"onnxruntime-web@{onnxruntime_web.VERSION}"]


def test_without_a_network_one_line_says_what_to_do(monkeypatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise urllib.error.URLError("no route to host")

    monkeypatch.undo()
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.setattr("urllib.request.urlopen", fail)

    with pytest.raises(ConfigError) as caught:
        onnxruntime_web._download()

    said = str(caught.value)
    assert "npm: not installed" in said
    assert "no route to host" in said
    assert said.count("\n") == 0
    assert f"npm pack onnxruntime-web@{onnxruntime_web.VERSION}" in said
