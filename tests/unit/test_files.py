"""Atomic writes: after any failure, a file or folder is either the old or the new one."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from captioner.errors import DataError
from captioner.files import atomic_folder, atomic_open, atomic_write, write_lock

ROOT = Path(__file__).parents[2]


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def full_disk(*args: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def run(code: str, *args: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *map(str, args)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


# --- atomic_write ---


@pytest.mark.parametrize(
    ("data", "stored"), [("Straße\r\n", "Straße\r\n".encode()), (b"\0", b"\0")]
)
def test_atomic_write_writes_text_and_bytes(tmp_path: Path, data: str | bytes, stored: bytes):
    atomic_write(tmp_path / "new folder" / "a.json", data)
    assert (tmp_path / "new folder" / "a.json").read_bytes() == stored
    assert names(tmp_path / "new folder") == ["a.json"]


@pytest.mark.parametrize("where", ["fsync", "replace"])
def test_a_full_disk_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
):
    file = tmp_path / "a.json"
    file.write_text("old")
    monkeypatch.setattr(*((os, "fsync") if where == "fsync" else (Path, "replace")), full_disk)
    with pytest.raises(OSError, match="No space left") as caught:
        atomic_write(file, "new")
    assert caught.value.errno == errno.ENOSPC
    assert caught.value.filename == str(file)
    assert file.read_text() == "old"
    assert names(tmp_path) == ["a.json"]


def test_permissions_are_kept_and_new_files_follow_the_umask(tmp_path: Path):
    (tmp_path / "old").write_text("")
    (tmp_path / "old").chmod(0o640)
    before = os.umask(0o022)
    try:
        atomic_write(tmp_path / "old", "x")
        atomic_write(tmp_path / "new", "x")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "old").stat().st_mode) == 0o640
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o644


def test_a_link_stays_a_link(tmp_path: Path):
    (tmp_path / "real").write_text("old")
    (tmp_path / "link").symlink_to("real")
    atomic_write(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_text() == "new"


def test_pipes_and_devices_are_written_to_and_not_replaced(tmp_path: Path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        atomic_write(pipe, "text")
        assert os.read(reader, 10) == b"text"
    finally:
        os.close(reader)
    assert stat.S_ISFIFO(pipe.stat().st_mode)


def test_what_a_killed_process_left_is_reused(tmp_path: Path):
    for name in ("a", "ä" * 127):  # 254 bytes, the maximum
        code = """
            import os, sys
            from captioner.files import atomic_open
            with atomic_open(sys.argv[1]) as file:
                print("half", file=file, flush=True)
                os._exit(9)
        """
        assert run(code, tmp_path / name).returncode == 9
        assert any(left.startswith(".") for left in names(tmp_path))
        atomic_write(tmp_path / name, "new")
        assert (tmp_path / name).read_text() == "new"
    assert names(tmp_path) == ["a", "ä" * 127]


def test_threads_may_write_the_same_file(tmp_path: Path):
    contents = [str(number) * 100_000 for number in range(8)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda text: atomic_write(tmp_path / "a", text), contents * 4))
    assert (tmp_path / "a").read_text() in contents
    assert names(tmp_path) == ["a"]


# --- atomic_open ---


def test_an_error_without_a_file_name_gets_one(tmp_path: Path):
    with pytest.raises(OSError, match="No space left") as caught, atomic_open(tmp_path / "a"):
        raise OSError(28, "No space left on device")  # as when a buffer is flushed
    assert caught.value.filename == str(tmp_path / "a")
    assert names(tmp_path) == []


def test_an_error_of_the_caller_keeps_its_file_name(tmp_path: Path):
    with pytest.raises(FileNotFoundError) as caught, atomic_open(tmp_path / "a"):
        (tmp_path / "another").read_text()
    assert caught.value.filename == str(tmp_path / "another")
    assert names(tmp_path) == []


@pytest.mark.parametrize(("mode", "parts"), [("w", ["Straße", "\n"]), ("wb", [b"\0", b"\xff"])])
def test_atomic_open_replaces_the_file_when_closed(tmp_path: Path, mode: Any, parts: Any):
    file = tmp_path / "new folder" / "a"
    atomic_write(file, "old")
    with pytest.raises(ValueError, match="stop"), atomic_open(file, mode) as opened:  # noqa: PT012
        opened.write(parts[0])
        raise ValueError("stop")
    assert file.read_text() == "old"
    with atomic_open(file, mode) as opened:
        for part in parts:
            opened.write(part)
        atomic_write(file, "another's")  # keeps temporary files that are still open
    expected = parts[0] + parts[1]
    assert file.read_bytes() == (expected if mode == "wb" else expected.encode())
    assert names(file.parent) == ["a"]


# --- atomic_folder ---


def write(folder: Path, content: str) -> None:
    with atomic_folder(folder) as temporary:
        (temporary / "sub").mkdir()
        (temporary / "sub" / "one").write_text(content)
        (temporary / "two").write_text(content)


def read(folder: Path) -> set[str]:
    assert names(folder) == ["sub", "two"]
    return {(folder / "sub" / "one").read_text(), (folder / "two").read_text()}


def test_a_folder_is_created_and_replaced_atomically(tmp_path: Path):
    model = tmp_path / "runs" / "model"
    write(model, "old")
    (model / "stale").write_text("goes with the old folder")
    write(model, "new")
    assert read(model) == {"new"}
    assert names(model.parent) == ["model"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_error_in_the_block_leaves_the_old_folder(tmp_path: Path, error: type[BaseException]):
    write(tmp_path / "model", "old")
    with pytest.raises(error), atomic_folder(tmp_path / "model") as temporary:  # noqa: PT012
        (temporary / "two").write_text("half")
        raise error
    assert read(tmp_path / "model") == {"old"}
    assert names(tmp_path) == ["model"]


@pytest.mark.parametrize("failing", [1, 2])
def test_a_failed_rename_restores_the_old_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: int
):
    write(tmp_path / "model", "old")
    calls = 0
    rename = Path.rename

    def fail_once(self: Path, target: Path) -> Path:
        nonlocal calls
        calls += 1
        if calls == failing:
            full_disk()
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fail_once)
    with pytest.raises(OSError, match="No space left"):
        write(tmp_path / "model", "new")
    assert read(tmp_path / "model") == {"old"}
    assert names(tmp_path) == ["model"]


@pytest.mark.parametrize("renames", [0, 1, 2])
def test_a_killed_process_leaves_a_complete_folder(tmp_path: Path, renames: int):
    model = tmp_path / "model"
    write(model, "old")
    died = run(
        """
        import os, pathlib, sys
        from captioner.files import atomic_folder
        left, rename = int(sys.argv[2]), pathlib.Path.rename
        def rename_or_die(self, target):
            global left
            if left == 0:
                os._exit(9)
            left -= 1
            return rename(self, target)
        pathlib.Path.rename = rename_or_die
        with atomic_folder(sys.argv[1]) as folder:
            (folder / "sub").mkdir()
            (folder / "sub" / "one").write_text("new")
            (folder / "two").write_text("new")
        """,
        model,
        renames,
    )
    assert died.returncode == (9 if renames < 2 else 0), died.stderr
    expected = {"new" if renames == 2 else "old"}
    assert read(model if model.exists() else tmp_path / ".model.old") == expected
    with pytest.raises(ValueError, match="stop"), atomic_folder(model):
        raise ValueError("stop")
    assert read(model) == expected
    assert names(tmp_path) == ["model"]


def test_atomic_folder_does_not_replace_a_file(tmp_path: Path):
    (tmp_path / "model").write_text("mine")
    with pytest.raises(NotADirectoryError, match="model"), atomic_folder(tmp_path / "model"):
        pass
    assert (tmp_path / "model").read_text() == "mine"


# --- write_lock ---


def test_a_write_lock_is_exclusive_and_released(tmp_path: Path):
    with (
        write_lock(tmp_path),
        pytest.raises(DataError, match="another process is writing"),
        write_lock(tmp_path),
    ):
        pass
    with write_lock(tmp_path):
        assert names(tmp_path) == []
