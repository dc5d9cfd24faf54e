"""What an interrupted run has finished: JSON Lines, a header and then one entry per line.

An entry is synced to disk before the run goes on. A line that a kill has cut short is dropped, with
what follows it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from captioner.files import atomic_write


def read_journal(path: Path) -> tuple[Any, list[Any]]:
    """Header and entries of a journal; None and no entries if there is none."""
    lines: list[Any] = []
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    for line in text.splitlines(keepends=True):
        try:
            lines.append(json.loads(line if line.endswith("\n") else ""))
        except ValueError:
            break
    return (lines[0], lines[1:]) if lines else (None, [])


@contextmanager
def continue_journal(
    path: Path, header: Mapping[str, Any], entries: Sequence[Any]
) -> Iterator[Callable[[Any], None]]:
    """Start a journal, or continue one after these entries; yield what appends an entry."""
    atomic_write(path, "".join(json.dumps(line) + "\n" for line in [header, *entries]))
    with path.open("a", encoding="utf-8") as file:

        def append(entry: Any) -> None:
            file.write(json.dumps(entry) + "\n")
            file.flush()
            os.fsync(file.fileno())

        yield append
