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

from captioner.errors import ConfigError
from captioner.files import atomic_write, named_after


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
            with named_after(path):
                file.write(json.dumps(entry) + "\n")
                file.flush()
                os.fsync(file.fileno())

        yield append


def check_same(name: object, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise ConfigError if a setting is not that of the run that is to be continued."""
    for option, new in now.items():
        if (old := before.get(option)) != new:
            was, is_ = ("not set" if value in (None, "", []) else value for value in (old, new))
            raise ConfigError(
                f"cannot resume {name}: {option} was {was} and is now {is_}; give the same "
                "options, or start over with --force"
            )
