#!/usr/bin/env python
"""Run the tests with the oldest and the newest dependencies that pyproject.toml allows.

    pip install uv
    python scripts/compatibility_matrix.py                    # all rows: 3 GB of wheels each
    python scripts/compatibility_matrix.py 3.10:oldest        # one row
    python scripts/compatibility_matrix.py -- tests/unit -n 4  # other tests, for pytest

A row is a Python and a resolution. Its environment is made in a temporary folder with the extras
``all`` and ``lite``, runs the quick tests (those that need the extras ``docs``, ``ray`` or a
browser skip themselves), and is deleted. ``oldest`` takes the lower bounds of pyproject.toml for
all direct dependencies, so that they are true; the tools that run the tests are new in every row.
The exit code is 1 if a row fails.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
ROWS = ("3.10:oldest", "3.10:newest", "3.11:newest", "3.12:newest", "3.13:newest")
RESOLUTIONS = {"oldest": "lowest-direct", "newest": "highest"}
EXTRAS = ("all", "lite")
TOOLS = (
    "axe-playwright-python", "hypothesis", "nbformat", "openapi-spec-validator", "pytest",
    "pytest-xdist", "requests",
)  # fmt: skip
# A new package may deprecate what an old one still uses.
TOLERATED = ("-W", "ignore::DeprecationWarning", "-W", "ignore::PendingDeprecationWarning")
SHOWN = ("torch", "torchvision", "pillow", "matplotlib", "timm", "numpy")


def main() -> int:
    """Run the rows and print the table."""
    if shutil.which("uv") is None:
        sys.exit("uv is not installed; run: pip install uv")
    given = sys.argv[1:]
    split = given.index("--") if "--" in given else len(given)
    rows = {}
    for row in given[:split] or ROWS:
        print(f"--- {row}", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            rows[row] = run(row, Path(folder, "env"), given[split + 1 :])
    print(f"| Python | {' | '.join(SHOWN)} | tests |\n{'|---' * (len(SHOWN) + 2)}|")
    for row, (versions, _, tests) in rows.items():
        found = " | ".join(versions.get(name, "") for name in SHOWN)
        print(f"| {row.partition(':')[0]} | {found} | {tests} |")
    return 0 if all(passed for _, passed, _ in rows.values()) else 1


def run(row: str, folder: Path, arguments: list[str]) -> tuple[dict[str, str], bool, str]:
    """Make an environment and run the tests: versions, whether they passed, pytest's last line."""
    python, _, kind = row.partition(":")
    interpreter = str(folder / "bin" / "python")
    extras = [word for extra in EXTRAS for word in ("--extra", extra)]
    install = ("pip", "install", "--quiet", "--python", interpreter)
    frozen = ("pip", "list", "--quiet", "--format", "freeze", "--python", interpreter)
    held = folder.with_name("held.txt")  # the tools change nothing
    try:
        uv("venv", "--quiet", "--clear", "--python", python, str(folder))
        uv(*install, "--resolution", RESOLUTIONS[kind], "-r", "pyproject.toml", *extras)
        held.write_text(uv(*frozen))
        uv(*install, "--constraint", str(held), *TOOLS)
    except subprocess.CalledProcessError as error:
        return {}, False, f"cannot be installed ({' '.join(error.cmd[:3])})"
    versions = dict(line.split("==") for line in uv(*frozen).splitlines() if "==" in line)
    tolerated = TOLERATED if kind == "oldest" else ()
    command = [interpreter, "-m", "pytest", *tolerated, *arguments]
    last = ""
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as tests:
        for line in tests.stdout or ():
            print(line, end="", flush=True)
            last = line if re.search(r"\d (passed|failed|error)", line) else last
    return versions, tests.returncode == 0, last.strip(" =\n")


def uv(*arguments: str) -> str:
    """Run a command of uv in the repository; its output."""
    return subprocess.run(
        ["uv", *arguments], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True
    ).stdout


if __name__ == "__main__":
    sys.exit(main())
