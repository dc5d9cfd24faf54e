"""The commands and examples in the README work as written."""

from __future__ import annotations

import io
import re
import shlex
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from tiny_video import shots, write_video

from captioner.cli.main import COMMANDS, OK, main, parser_of
from captioner.cli.train import read
from captioner.inference.folder import SHIPPED_MODEL

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PHOTO = ROOT / "assets" / "examples" / "photographer.jpg"
SHELL = "\n".join(re.findall(r"```bash\n(.*?)```", README, flags=re.DOTALL)).replace("\\\n", " ")
LINES = [line for line in SHELL.splitlines() if re.match(r"(captioner|cat) ", line)]


def test_linked_files_exist():
    for target in re.findall(r"\]\((?!https?:|\.\./)([^)#]+)\)", README):
        assert (ROOT / target).exists(), target


def test_readme_and_ci_use_the_same_install_and_test_commands():
    ci = (ROOT / ".ci" / "run").read_text()
    assert ".venv/bin/pip install --no-compile . &&" in README
    assert "pip install --quiet --no-compile .\n" in ci
    assert "pip install -e '.[dev,lite]'" in README
    assert "pip install --quiet -e '.[dev,lite]'" in ci
    assert re.search(r"python -m pytest$", README, re.MULTILINE)
    assert re.search(r"python -m pytest$", ci, re.MULTILINE)


@pytest.mark.slow
def test_first_caption_is_the_one_shown(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    [shown] = re.findall(r"```text\n(assets/.*?)```", README, flags=re.DOTALL)
    assert main(["caption", "assets/examples/chelsea.jpg", "--precision", "fp32"]) == OK
    assert capsys.readouterr().out == shown


@pytest.mark.slow
@pytest.mark.parametrize("line", LINES)
def test_commands_are_valid(line, tmp_path, monkeypatch, capsys):
    """Captioning commands run; the options of the others are parsed."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "holiday").mkdir()
    shutil.copy(PHOTO, tmp_path / "photo.jpg")
    shutil.copy(PHOTO, tmp_path / "holiday" / "1.jpg")
    (tmp_path / "list.txt").write_text("photo.jpg\n")
    write_video(tmp_path / "clip.mp4", shots("red"))
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    (tmp_path / "runs" / "mine" / "best").symlink_to(SHIPPED_MODEL)
    for folder in ("assets", "configs"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    words = shlex.split(line, comments=True)
    if words[0] == "cat":
        monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(PHOTO.read_bytes())))
        words = words[words.index("|") + 1 :]
    command, arguments = words[1], words[2:]
    if command == "prepare":
        command = f"prepare {arguments.pop(0)}"
    assert command in COMMANDS
    if command in ("caption", "attend"):
        assert main([command, *arguments]) == OK
    elif command == "train":
        read(arguments)
    else:
        parser_of(command).parse(arguments)


def test_python_example_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    shutil.copy(PHOTO, tmp_path / "photo.jpg")
    [example] = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    exec(compile(example, "README.md", "exec"), {})
    assert (tmp_path / "photo_attention.png").is_file()
    assert len(capsys.readouterr().out.splitlines()) == 1
