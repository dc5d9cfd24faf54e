"""The warning in a checkout whose code is not the code that runs."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

import captioner
from captioner.cli.main import OK, main

RUNNING = Path(captioner.__file__).resolve().parent


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a copy of the package, for a command line without arguments."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["captioner", "--version"])
    for path in RUNNING.rglob("*.py"):
        copy = tmp_path / "captioner" / path.relative_to(RUNNING)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, copy)
    return tmp_path


def add_file(package: Path) -> None:
    (package / "model" / "gru.py").write_text("GATES = 3\n")


def change_file(package: Path) -> None:
    path = package / "model" / "build.py"
    path.write_text(path.read_text().replace("LuongDecoder", "NguolDecoder"))


@pytest.mark.parametrize("edit", [add_file, change_file])
def test_an_edited_checkout_is_named_once(edit, checkout, capsys) -> None:
    edit(checkout / "captioner")

    assert main() == OK

    out, err = capsys.readouterr()
    assert out == f"captioner {captioner.__version__} from {RUNNING}\n"
    assert err == (
        f"captioner: the code in {checkout / 'captioner'} differs from the running package in "
        f"{RUNNING}; to run the code here, use `pip install -e .` or "
        "`python -m captioner`\n"
    )


def link_to_the_running_package(package: Path) -> None:
    shutil.rmtree(package)
    package.symlink_to(RUNNING)


def touch_files(package: Path) -> None:
    for path in package.rglob("*.py"):
        path.touch()


def another_project(package: Path) -> None:
    add_file(package)
    (package / "version.py").unlink()


@pytest.mark.parametrize(
    "edit", [lambda _: None, touch_files, link_to_the_running_package, another_project]
)
def test_no_warning(edit, checkout, capsys) -> None:
    edit(checkout / "captioner")

    assert main() == OK

    assert not capsys.readouterr().err


def test_calls_from_python_do_not_warn(checkout, capsys) -> None:
    add_file(checkout / "captioner")

    assert main(["--version"]) == OK

    assert not capsys.readouterr().err
