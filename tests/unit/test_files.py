"""Atomic writes: after any failure, a file or folder is either the old or the new one."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from captioner.errors import DataError
from captioner.files import (
    atomic_folder,
    atomic_open,
    atomic_write,
    remove_temporary,
    write_lock,
)


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


@pytest.mark.parametrize(("mode", "parts"), [("w", ["Straße", "\r\n"]), ("wb", [b"\0", b"\xff"])])
def test_a_file_is_replaced_when_closed(tmp_path: Path, mode: Any, parts: Any):
    file = tmp_path / "new folder" / "a"
    atomic_write(file, "old")
    with pytest.raises(ValueError, match="stop"), atomic_open(file, mode) as opened:  # noqa: PT012
        opened.write(parts[0])
        raise ValueError("stop")
    assert file.read_text() == "old"
    with atomic_open(file, mode) as opened:
        for part in parts:
            opened.write(part)
        assert file.read_text() == "old"
    expected = parts[0] + parts[1]
    assert file.read_bytes() == (expected if mode == "wb" else expected.encode())
    assert names(file.parent) == ["a"]


@pytest.mark.parametrize("where", ["fsync", "replace"])
def test_a_full_disk_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
):
    def full_disk(*args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    file = tmp_path / "a.json"
    file.write_text("old")
    monkeypatch.setattr(*((os, "fsync") if where == "fsync" else (Path, "replace")), full_disk)
    with pytest.raises(OSError, match="No space left") as caught:
        atomic_write(file, "new")
    assert caught.value.filename == str(file)
    assert file.read_text() == "old"
    assert names(tmp_path) == ["a.json"]


def test_permissions_are_kept_and_new_files_follow_the_umask(tmp_path: Path):
    (tmp_path / "old").write_text("")
    (tmp_path / "old").chmod(0o640)
    before = os.umask(0o022)
    try:
        atomic_write(tmp_path / "old", "x")
        atomic_write(tmp_path / ("ä" * 127), "x")  # 254 bytes, the maximum
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "old").stat().st_mode) == 0o640
    assert stat.S_IMODE((tmp_path / ("ä" * 127)).stat().st_mode) == 0o644


def test_owner_and_attributes_are_kept_and_the_time_is_not(tmp_path: Path, monkeypatch):
    file = tmp_path / "old"
    file.write_text("old")
    os.utime(file, ns=(10**18, 10**18))
    attributes = hasattr(os, "setxattr")
    with suppress(OSError):  # a file system without them
        os.setxattr(file, "user.tag", b"red")
    before = os.listxattr(file) if attributes else []
    given: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "chown", lambda path, uid, gid: given.append((uid, gid)))

    atomic_write(file, "new")

    assert given == [(file.stat().st_uid, file.stat().st_gid)]
    assert file.stat().st_mtime_ns > 10**18
    assert (os.listxattr(file) if attributes else []) == before


def test_links_and_pipes_are_written_to_and_not_replaced(tmp_path: Path):
    (tmp_path / "real").write_text("old")
    (tmp_path / "link").symlink_to("real")
    atomic_write(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_text() == "new"

    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    try:
        atomic_write(tmp_path / "pipe", "text")
        assert os.read(reader, 10) == b"text"
    finally:
        os.close(reader)
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)


def test_threads_may_write_the_same_file(tmp_path: Path):
    contents = [str(number) * 100_000 for number in range(8)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda text: atomic_write(tmp_path / "a", text), contents * 4))
    assert (tmp_path / "a").read_text() in contents
    assert names(tmp_path) == ["a"]


def test_the_temporary_file_of_a_killed_write_is_removed(tmp_path: Path):
    code = (
        "import os, sys; from captioner.files import atomic_open\nwith atomic_open(sys.argv[1]): "
    )
    files = [tmp_path / name for name in ("a [1].csv", "a [1].csv.resume", "long" * 20)]
    for file in files:
        subprocess.run([sys.executable, "-c", f"{code}os._exit(9)", file], check=False)
    assert len(names(tmp_path)) == 3
    with atomic_open(files[0]) as writing:  # not killed
        writing.write("text")
        for file in files[::2]:
            remove_temporary(file)
        assert len(names(tmp_path)) == 2
    assert files[0].read_text() == "text"
    assert sorted(name.startswith(".a [1].csv.resume.tmp-") for name in names(tmp_path)) == [
        False,
        True,
    ]


def write(folder: Path, content: str) -> None:
    with atomic_folder(folder) as temporary:
        (temporary / "sub").mkdir()
        (temporary / "sub" / "one").write_text(content)
        (temporary / "two").write_text(content)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_folder_is_replaced_as_a_whole(tmp_path: Path, error: type[BaseException]):
    model = tmp_path / "runs" / "model"
    write(model, "old")
    (model / "stale").write_text("goes with the old folder")
    with pytest.raises(error), atomic_folder(model) as temporary:  # noqa: PT012
        (temporary / "two").write_text("half")
        raise error
    assert (model / "two").read_text() == "old"
    write(model, "new")
    assert names(model) == ["sub", "two"]
    assert (model / "two").read_text() == (model / "sub" / "one").read_text() == "new"
    assert names(model.parent) == ["model"]


def test_atomic_folder_does_not_replace_a_file(tmp_path: Path):
    (tmp_path / "model").write_text("mine")
    with pytest.raises(NotADirectoryError, match="model"), atomic_folder(tmp_path / "model"):
        pass
    assert (tmp_path / "model").read_text() == "mine"


def test_a_write_lock_is_exclusive_and_released(tmp_path: Path):
    with (
        write_lock(tmp_path),
        pytest.raises(DataError, match="another process is writing"),
        write_lock(tmp_path),
    ):
        pass
    with write_lock(tmp_path):
        assert names(tmp_path) == []
