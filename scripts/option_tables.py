"""Update the tables of options in docs/ from the dataclasses that declare the options.

    python scripts/option_tables.py

Each table is written between the lines ``<!-- options: captioner.options.SearchOptions -->`` and
``<!-- end of options -->``. The table of search options has an additional column with the values
that the shipped model sets, because every model has its own values.
"""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path

from captioner.schema import option_fields

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
SHIPPED = ROOT / "captioner" / "pretrained" / "config.json"
"""Config of the shipped model, which contains its search options."""
TABLE = re.compile(r"(<!-- options: ([\w.]+) -->\n).*?(<!-- end of options -->)", re.DOTALL)


def table(name: str) -> str:
    """Return the options of a dataclass as a table in Markdown.

    ``name`` is the full name of the dataclass, such as ``captioner.options.SearchOptions``.
    """
    module, _, kind = name.rpartition(".")
    fields = option_fields(getattr(importlib.import_module(module), kind)).values()
    if kind != "SearchOptions":
        rows = [f"| `{f.name}` | {_value(f.default)} | {_cell(f.help)} |" for f in fields]
        return "\n".join(["| option | default | effect |", "|---|---|---|", *rows, ""])
    shipped = json.loads(SHIPPED.read_text(encoding="utf-8"))["search"]
    rows = [
        f"| `{f.name}` | {_value(shipped[f.name])} | {_value(f.default)} | {_cell(f.help)} |"
        for f in fields
    ]
    head = ["| option | shipped model | default | effect |", "|---|---|---|---|"]
    return "\n".join([*head, *rows, ""])


def _value(value: object) -> str:
    """Format a default as code. Missing and empty values become an empty cell."""
    return "" if value in (None, "", [], ()) else f"`{str(value).lower()}`"


def _cell(text: str) -> str:
    """Escape the characters of a help text that have a meaning in a Markdown table."""
    return text.replace("|", r"\|").replace("*", r"\*").replace("<", "&lt;")


def with_tables(page: str) -> str:
    """Return the text of a page with up-to-date tables in place of the old tables."""
    return TABLE.sub(lambda found: f"{found[1]}\n{table(found[2])}\n{found[3]}", page)


def main() -> None:
    """Update the tables on all pages in docs/."""
    for path in DOCS.glob("*.md"):
        text = path.read_text(encoding="utf-8")
        path.write_text(with_tables(text), encoding="utf-8")


if __name__ == "__main__":
    main()
