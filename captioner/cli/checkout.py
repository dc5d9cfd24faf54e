"""A warning for users who edit a checkout of the project while an installed copy runs.

``pip install .`` copies the package, so later edits of the checkout have no effect. Without the
warning, a student might compare two identical models without noticing.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import captioner


def other_code(checkout: Path) -> str | None:
    """Return a warning if a checkout's code differs from the running package, or else None.

    The first command of the README runs an installed copy in an unchanged checkout, which needs no
    warning. The code is therefore compared file by file. Files older than the installed copy are
    skipped.
    """
    here, running = checkout.resolve() / "captioner", Path(captioner.__file__).resolve().parent
    if here == running or not (here / "version.py").is_file():
        return None
    installed = (running / "version.py").stat().st_mtime
    edited = newer_files(here, installed)
    if all(_same(path, running / path.relative_to(here)) for path in edited):
        return None
    return (
        f"the code in {here} differs from the running package in {running}; to run the code "
        "here, use `pip install -e .` or `python -m captioner`"
    )


def newer_files(folder: Path, time: float) -> Iterator[Path]:
    """Yield the Python files below a folder that were modified after a time (Unix seconds)."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                yield from newer_files(Path(entry.path), time)
            elif entry.name.endswith(".py") and entry.stat().st_mtime > time:
                yield Path(entry.path)


def _same(path: Path, copy: Path) -> bool:
    return copy.is_file() and path.read_bytes() == copy.read_bytes()
