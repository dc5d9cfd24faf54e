"""Files around the package: one version, and configuration that refers to what exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

import captioner

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
PROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")


def read(path: Path) -> dict:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def test_the_version_is_in_one_place():
    assert 'dynamic = ["version"]' in PROJECT
    assert f'__version__ = "{captioner.__version__}"' in (
        ROOT / "captioner" / "version.py"
    ).read_text(encoding="utf-8")
    for path in (ROOT / "CITATION.cff", *WORKFLOWS):
        assert captioner.__version__ not in path.read_text(encoding="utf-8"), path
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert f"\n## {captioner.__version__}" in changelog


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_run_what_exists(path):
    jobs = read(path)["jobs"]
    commands = [step.get("run", "") for job in jobs.values() for step in job["steps"]]
    for name in re.findall(r"(?:scripts/|\.ci/)\w+(?:\.py)?", "\n".join(commands)):
        assert (ROOT / name).is_file(), name
    for job in jobs.values():
        assert set(job.get("needs", "").split()) <= set(jobs)
        for step in job["steps"]:
            assert ("run" in step) != ("uses" in step)


def test_the_workflow_tests_every_python_that_is_supported():
    job = read(ROOT / ".github" / "workflows" / "tests.yml")["jobs"]["python"]
    oldest = re.search(r'requires-python = ">=([\d.]+)"', PROJECT)[1]

    assert job["strategy"]["matrix"]["python"][0] == oldest
    assert f'python_version = "{oldest}"' in PROJECT


def test_hooks_run_what_the_check_runs():
    hooks = read(ROOT / ".pre-commit-config.yaml")["repos"][0]["hooks"]
    check = (ROOT / "scripts" / "check").read_text(encoding="utf-8")

    for hook in hooks:
        module = hook["entry"].removeprefix("python -m ").removesuffix(" --force-exclude")
        assert f'"$python" -m {module}' in check
