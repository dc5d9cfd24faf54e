"""Writes the tables of options in docs/, from the dataclasses that declare them.

    python scripts/option_tables.py

A table stands between ``<!-- options: captioner.options.SearchOptions -->`` and
``<!-- end of options -->``.
"""

from __future__ import annotations

import importlib
import re
from pathlib import Path

from captioner.schema import OptionField, option_fields

DOCS = Path(__file__).parents[1] / "docs"
TABLE = re.compile(r"(<!-- options: ([\w.]+) -->\n).*?(<!-- end of options -->)", re.DOTALL)


def table(name: str) -> str:
    """The options of a dataclass as a table in Markdown."""
    module, _, kind = name.rpartition(".")
    fields = option_fields(getattr(importlib.import_module(module), kind)).values()
    rows = [f"| `{field.name}` | {_default(field)} | {_cell(field.help)} |" for field in fields]
    return "\n".join(["| option | default | |", "|---|---|---|", *rows, ""])


def _default(field: OptionField) -> str:
    empty = field.default in (None, "", [], ())
    return "" if empty else f"`{str(field.default).lower()}`"


def _cell(text: str) -> str:
    return text.replace("|", r"\|").replace("*", r"\*").replace("<", "&lt;")


def with_tables(page: str) -> str:
    """A page with all its tables written anew."""
    return TABLE.sub(lambda found: f"{found[1]}\n{table(found[2])}\n{found[3]}", page)


def main() -> None:
    """Write the tables of all pages."""
    for path in DOCS.glob("*.md"):
        text = path.read_text(encoding="utf-8")
        path.write_text(with_tables(text), encoding="utf-8")


if __name__ == "__main__":
    main()
