"""Packages that ``.[dev]`` does not install: tests that need one are skipped, in CI they fail.

A test imports such a package, or calls code that needs it, without a check of its own. The hooks in
tests/conftest.py pass the errors to this module.
"""

from __future__ import annotations

import os
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from captioner import extras

OPTIONAL = (
    *("av", "axe_playwright_python", "fsspec", "imagecodecs", "mkdocs", "moto", "nbclient"),
    *("nbformat", "ollama", "openai", "openapi_spec_validator", "pillow_heif", "playwright"),
    *("pyarrow", "pycocoevalcap", "rawpy", "ray", "requests", "s3fs", "tifffile"),
    "transformers",
)
"""Modules of ``.[dev-all]`` that tests or tested code import."""
MISSING = {name for name in OPTIONAL if find_spec(name) is None}
NEEDS = "needs the package "
"""Beginning of the reason for a skipped test, before the name of the package."""

_is_installed = extras.is_installed


def _is_installed_or_skip(module: str) -> bool:
    """Skip the test instead of returning False, which becomes an error message for users."""
    if module in MISSING:
        pytest.skip(f"No module named '{module}'")
    return _is_installed(module)


extras.is_installed = _is_installed_or_skip


def missing_package(error: BaseException | None) -> str | None:
    """Return the missing package that caused an error, or None for other errors."""
    while error is not None:
        # pytest.importorskip passes on the message only.
        if isinstance(error, ModuleNotFoundError | pytest.skip.Exception):
            found = re.search(r"No module named '(\w+)", str(error))
            if found and found[1] in MISSING:
                return found[1]
        error = error.__cause__ or error.__context__
    return None


def skip_if_missing(report: Any, call: Any, path: Path, line: int) -> Any:
    """Make the report of a test or file a skip if a package is missing, or a failure in CI."""
    raised = call is not None and call.excinfo is not None
    package = missing_package(call.excinfo.value) if raised else None
    if package and os.environ.get("CI"):
        report.outcome = "failed"
        report.longrepr = f"{path}: {package} is not installed; in CI, install .[dev-all]"
    elif package:
        report.outcome, report.longrepr = "skipped", (str(path), line, NEEDS + package)
    return report


def summarize_missing(terminalreporter: Any) -> None:
    """Write one line about all missing packages, instead of one for each file or test."""
    missing, others = [], []
    for report in terminalreporter.stats.get("skipped", []):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else ""
        (missing if reason.startswith(NEEDS) else others).append(report)
    if missing:
        packages = sorted({report.longrepr[2].removeprefix(NEEDS) for report in missing})
        files = {report.longrepr[0] for report in missing if report.nodeid.endswith(".py")}
        terminalreporter.stats["skipped"] = others
        terminalreporter.write_line(
            f"{len(missing) - len(files)} tests and {len(files)} files of tests not run without "
            f"{', '.join(packages)}: pip install -e '.[dev-all]'"
        )
