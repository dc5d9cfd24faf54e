"""The command line as a whole: extras, signals, image ids, facts of a model."""

from __future__ import annotations

import csv
import io
import json
import subprocess
import sys

import pytest
from tiny_data import noise_photos, write_captions

from captioner.cli.main import COMMANDS, NOT_DONE, OK, SOME_FAILED, main
from captioner.extras import EXTRAS
from captioner.inference.names import GRAPHS, SHIPPED_MODEL, WEIGHTS


def test_coco_results_take_ids_from_names_or_annotations(tiny, tmp_path, caption):
    names = ["holiday.jpg", "COCO_val2014_000000000042.jpg"]
    noise_photos(tmp_path / "photos", names)
    arguments = (tmp_path / "photos", "--format", "coco")
    code, out, err = caption(*arguments)
    assert ([entry["image_id"] for entry in json.loads(out)], code) == ([42], SOME_FAILED)
    assert "holiday.jpg" in err
    annotations = write_captions(tmp_path / "a.json", {name: ["a"] for name in names}, first=7)
    code, out, _ = caption(*arguments, "--annotations", annotations)
    assert [entry["image_id"] for entry in json.loads(out)] == [8, 7]
    noise_photos(tmp_path / "photos", ["000042.jpg"])  # `evaluate --results` refuses two
    code, _, err = caption(*arguments)
    assert (code, "both have the image id 42" in err) == (NOT_DONE, True)


@pytest.mark.parametrize(
    ("command", "module"),
    [(command, name) for command in sorted(COMMANDS.keys() & EXTRAS) for name in EXTRAS[command]],
)
def test_a_missing_extra_is_named_with_its_pip_command(command, module, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, module, None)  # as if it were not installed

    assert main([command]) == NOT_DONE

    expected = f"captioner {command} needs {module}; run: pip install 'captioner[{command}]'"
    assert capsys.readouterr().err == f"captioner: {expected}\n"


def test_info_describes_the_model(capsys):
    assert main(["info", "--format", "json"]) == OK
    facts = json.loads(capsys.readouterr().out)
    forms = (sum((SHIPPED_MODEL / one).stat().st_size for one in f) for f in ([WEIGHTS], GRAPHS))
    weights, graphs = (size / 1e6 for size in forms)
    assert max(weights, graphs) <= 40
    assert facts["size_mb"] == pytest.approx(weights + graphs, abs=0.1)
    assert facts["classes"]["decoder"] == "captioner.model.decoder.BahdanauDecoder"
    assert facts["classes"]["scorer"] == "captioner.model.attention.AdditiveScorer"
    assert main(["info", "--card"]) == OK
    assert "# The model that ships" in capsys.readouterr().out


def test_train_refuses_a_folder_with_other_files(tmp_path, capsys):
    (tmp_path / "best").mkdir()
    (tmp_path / "best" / "thesis.txt").write_text("mine")
    assert main(["train", "--run-folder", str(tmp_path)]) == NOT_DONE
    assert "force" in capsys.readouterr().err
    assert (tmp_path / "best" / "thesis.txt").read_text() == "mine"


OWN_HANDLER = """
import os, signal, time
from captioner.cli import main

main.GRACE = 0.1
main.main(["--version"]), main.main(["caption"])
signal.signal(signal.SIGTERM, lambda *_: time.sleep(0.1))  # as train and serve do
os.kill(os.getpid(), signal.SIGTERM)
signal.signal(signal.SIGTERM, signal.default_int_handler)
time.sleep(0.4)
"""


def test_a_command_that_handles_sigterm_is_not_ended():
    ended = subprocess.run([sys.executable, "-c", OWN_HANDLER], check=False, timeout=60)
    assert ended.returncode == 0


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_standard_streams(tmp_path, closed):
    """As schedulers start programs: the result is the same, and nothing else is written to it."""
    photo = str(noise_photos(tmp_path, ["1.png"])[0])
    command = f"{sys.executable} -m captioner caption {photo} -o {tmp_path / 'c.csv'} {closed}"
    shell = ["sh", "-c", command]
    ended = subprocess.run(shell, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr
    (row,) = csv.DictReader((tmp_path / "c.csv").read_text(encoding="utf-8-sig").splitlines())
    assert row["image"] == photo
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize("streams", [None, "closed"])
def test_missing_streams_in_python(streams, monkeypatch):
    """As under pythonw, where they are None."""
    for name in ("stdin", "stdout", "stderr"):
        stream = io.StringIO()
        stream.close()
        monkeypatch.setattr(sys, name, stream if streams else None)
    assert main(["info"]) == 0
    assert main(["caption", "missing.jpg"]) == NOT_DONE
    assert sys.stdin.buffer.name == "<stdin>"
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        stream.close()
