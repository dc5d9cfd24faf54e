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

import argparse
import os
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
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rows", nargs="*", default=ROWS, help="PYTHON:oldest or PYTHON:newest")
    parser.add_argument("--keep", type=Path, help="folder for the environments, which are kept")
    given = sys.argv[1:]
    split = given.index("--") if "--" in given else len(given)
    options = parser.parse_args(given[:split])
    for row in options.rows:
        if row.partition(":")[2] not in RESOLUTIONS:
            parser.error(f"{row} is not a row; give PYTHON:oldest or PYTHON:newest, as {ROWS[0]}")
    if shutil.which("uv") is None:
        parser.error("uv is not installed: pip install uv")
    results = {}
    for row in options.rows:
        if options.keep:
            results[row] = run(row, options.keep / row.replace(":", "-"), given[split + 1 :])
            continue
        with tempfile.TemporaryDirectory() as folder:
            results[row] = run(row, Path(folder, "env"), given[split + 1 :])
    print(table(results))
    return 0 if all(passed for _, passed, _ in results.values()) else 1


def run(row: str, folder: Path, arguments: list[str]) -> tuple[dict[str, str], bool, str]:
    """Make an environment and run the tests: versions, whether they passed, pytest's last line."""
    print(f"--- {row}", flush=True)
    python, _, kind = row.partition(":")
    extras = [word for extra in EXTRAS for word in ("--extra", extra)]
    install = ["uv", "pip", "install", "--quiet", "--python", str(folder / "bin" / "python")]
    try:
        uv(["uv", "venv", "--quiet", "--clear", "--python", python, str(folder)])
        uv([*install, "--resolution", RESOLUTIONS[kind], "-r", "pyproject.toml", *extras])
        with tempfile.NamedTemporaryFile("w", suffix=".txt") as held:  # the tools change nothing
            held.write(
                "".join(f"{name}=={version}\n" for name, version in installed(folder).items())
            )
            held.flush()
            uv([*install, "--constraint", held.name, *TOOLS])
    except subprocess.CalledProcessError as error:
        return {}, False, f"cannot be installed ({' '.join(error.cmd[:3])})"
    versions = installed(folder)
    tolerated = TOLERATED if kind == "oldest" else ()
    tests = subprocess.Popen(
        [str(folder / "bin" / "python"), "-m", "pytest", *tolerated, *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert tests.stdout is not None
    last = ""
    for line in tests.stdout:
        print(line, end="", flush=True)
        last = line if re.search(r"\d (passed|failed|error)", line) else last
    return versions, tests.wait() == 0, last.strip(" =\n")


def uv(command: list[str]) -> None:
    """Run a command of uv in the repository."""
    subprocess.run(command, cwd=ROOT, check=True)


def installed(folder: Path) -> dict[str, str]:
    """Versions of the packages in the table."""
    listed = subprocess.run(
        ["uv", "pip", "list", "--quiet", "--format", "freeze", "--python", folder / "bin/python"],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        env={**os.environ, "NO_COLOR": "1"},
    )
    return dict(line.split("==") for line in listed.stdout.splitlines() if "==" in line)


def table(results: dict[str, tuple[dict[str, str], bool, str]]) -> str:
    """The results as Markdown."""
    lines = [
        f"| Python | {' | '.join(SHOWN)} | tests |",
        f"|{'---|' * (len(SHOWN) + 2)}",
    ]
    for row, (versions, _, tests) in results.items():
        found = " | ".join(versions.get(name, "") for name in SHOWN)
        lines.append(f"| {row.partition(':')[0]} | {found} | {tests} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
