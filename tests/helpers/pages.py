"""The README and the pages of docs/, and the examples in them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def read(name: str) -> str:
    """The text of a page: ``read("docs/hub.md")``."""
    return (ROOT / name).read_text(encoding="utf-8")


def examples(text: str, language: str) -> list[str]:
    """The code blocks of a page."""
    return re.findall(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)


def commands(*blocks: str) -> Iterator[list[str]]:
    """The words of each command in shell blocks."""
    for line in "\n".join(blocks).replace("\\\n", " ").splitlines():
        if words := shlex.split(line, comments=True):
            yield words
