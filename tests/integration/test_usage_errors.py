"""Options that contradict each other or name missing files: one line, and nothing is written.

The checks of single values are in tests/unit/cli and tests/unit/test_options.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from captioner.cli.main import NOT_DONE, main
from captioner.evaluation import api

REFERENCES = "--annotations CAPTIONS"
CALIBRATE = f"calibrate --model MODEL {REFERENCES} --images PHOTOS"
SCORE = f"evaluate {REFERENCES} --results RESULTS"

LINES = [
    # What is written, and where.
    (
        "caption PHOTO -o x.jsonl --format json",
        "--format json does not match -o x.jsonl; leave out",
    ),
    ("caption PHOTO -o x.xlsx", "-o x.xlsx has an unknown extension; use .txt, .json, "),
    ("caption PHOTO -o new/x.csv", "the folder new does not exist; create it (mkdir -p new)"),
    ("caption PHOTO --resume", "--resume continues an output file, but -o is not set; add -o FILE"),
    (
        "caption PHOTO --sidecar xmp -o x.csv --resume",
        "--resume needs -o FILE; use --skip-existing",
    ),
    ("caption PHOTO --sidecar txt --num-captions 2", "--sidecar writes one caption per photo"),
    ("caption PHOTO --sidecar txt --existing replace-own", "does not work with --sidecar txt"),
    ("caption PHOTO --sidecar xmp --exiftool", "--exiftool cannot be combined with --sidecar xmp"),
    ("apply a.csv b.csv --sidecar txt", "2 caption files were passed; pass only one"),
    ("apply --remove PHOTO --in-place", "--in-place cannot be combined with --remove"),
    ("caption PHOTO --in-place --skip-existing --force", "contradict each other"),
    ("caption PHOTO --in-place --skip-existing -o x.csv", "--skip-existing and -o x.csv cannot be"),
    (
        "caption PHOTO --in-place --skip-existing --existing replace",
        "cannot be combined with --existing replace",
    ),
    ("caption PHOTO --in-place --existing append", "--existing append needs --sidecar txt"),
    ("caption PHOTO --existing skip", "--existing needs a destination; add --sidecar xmp"),
    ("caption PHOTO --sidecar xmp --prefix x", "--prefix needs --sidecar txt"),
    ("caption PHOTO --sidecar txt --sidecar-name photo.xmp", "--sidecar-name needs --sidecar xmp"),
    # Lists of photos.
    ("caption --from-file none.txt", "none.txt does not exist; use a list of photos"),
    ("caption --from-file PHOTO", "1.png is a photo, not a list; leave out --from-file"),
    ("caption --from-file EMPTY", "empty.txt contains no names"),
    # Videos.
    (
        "caption a.mp4 --every 0s",
        "--every is '0s'; use a time such as 5s or 2m, or the word 'shot'",
    ),
    ("caption a.mp4 --every 1s --sidecar txt", "--sidecar is for photos"),
    ("caption a.mp4 --every 1s -o x.csv --resume", "--resume is for photos"),
    ("caption a.mp4 --every 1s --format coco", "coco is for photos"),
    ("caption PHOTO --every 1s CAPTIONS -o x.vtt", "--format vtt supports one video, not 2"),
    ("caption a.mp4 --every 1s -o x.vtt --num-captions 2", "vtt writes one caption per photo"),
    ("caption a.mp4 -o x.vtt", "vtt is for videos; add --every 5s"),
    # Ray.
    ("caption PHOTOS --workers 2", "workers needs the engine 'ray'; set engine to 'ray'"),
    ("caption PHOTOS --format parquet -o x", "parquet"),
    (
        "caption PHOTOS --engine ray -o x.jsonl",
        "--engine ray writes a folder, not a file; use -o FOLDER",
    ),
    (
        "caption PHOTOS --engine ray -o x --format csv",
        "--engine ray does not support --format csv; use --format jsonl or parquet",
    ),
    ("caption PHOTOS --engine ray -o x --sidecar txt", "--sidecar cannot be combined with --engi"),
    ("caption no*.tar --engine ray -o x", "no*.tar matches no file"),
    # Pictures.
    (
        "attend PHOTO -o x.mp4",
        ".mp4 is not a supported output format; use a figure (.png, .jpg, .jpeg, .svg",
    ),
    ("attend PHOTO -o x.gif --only dog --columns 2", "--only, --columns"),
    ("attend PHOTO --only dog --content-words", "--only and --content-words both choose the words"),
    ("attend PHOTO -o x.gif --num-captions 2", "one caption"),
    (
        "attend PHOTO -o x.gif --method attention --method grad_cam",
        "an animation shows a single model and method",
    ),
    ("attend PHOTO -o x.html --coverage", "--coverage"),
    ("attend PHOTO -o x.png --dpi 300", "--dpi has no effect on .png files"),
    ("attend PHOTO -o x.png --combine max", "--only"),
    ("attend PHOTO -o x.png --format svg", "x.png"),
    ("attend PHOTO -o x.png --only gryphon", "gryphon"),
    ("attend PHOTO -o x.png --instances none.json", "none.json"),
    ("attend PHOTO -o x.png --compare TWIN --num-captions 2", "--compare"),
    ("attend PHOTO -o x.png --words dog --no-guard-endings", "guard-endings"),
    ("attend PHOTO PHOTOS -o x.png", ".html"),
    ("attend PHOTOS -o - --format gif", "one .gif file cannot show 4 photos"),
    ("attend PHOTO -o x.npz --only dog", "an archive of maps (.npz) does not support --only;"),
    # Scores and confidence; no photo is captioned before.
    ("evaluate", "or results to a file of captions"),
    ("evaluate --results RESULTS", "no reference data is set; add annotations"),
    ("evaluate --images PHOTOS --instances INSTANCES --compare RESULTS", "set annotations"),
    ("evaluate --images PHOTOS --instances INSTANCES --objects none.json", "objects needs refer"),
    (
        "evaluate --images PHOTOS --phrases none.json --beam-size 3",
        "leave out beam_size",
    ),
    (f"{SCORE} --phrases none.json", "no model runs; leave out phrases"),
    (f"{SCORE} --objects RESULTS", "contains a JSON list"),
    (f"{SCORE} --beam-size 3", "leave out beam_size"),
    (f"{SCORE} --device cpu", "no model runs; leave out device"),
    (
        "evaluate --images PHOTOS --faithfulness --meteor",
        "instead of scores and attention; leave out meteor",
    ),
    (f"{SCORE} -o EMPTY", "--force"),
    ("evaluate --images PHOTOS --max-photos 3", "--max-photos needs --faithfulness"),
    (
        f"evaluate --images PHOTOS {REFERENCES} --faithfulness --beam-size 1",
        "come from annotations",
    ),
    ("calibrate", "--model is missing; add --model FOLDER"),
    ("calibrate --model MODEL --style coco", "--style is not an option here; use"),
    (f"{CALIBRATE} --styles x --styles y", "styles lists 2 names"),
    ("calibrate --model MODEL --judged X --objects X --images X", "objects needs reference"),
    (f"{CALIBRATE} --diagram x.gif", "a figure cannot be saved as .gif (x.gif); use .png"),
    (f"{CALIBRATE} --check", "the model is not calibrated; run captioner"),
    # Models.
    ("export MODEL -o MODEL", "exists; add --force to replace it"),
    ("export MODEL -o new --int8", "--int8 and --calibration must be used together"),
    ("export MODEL -o new --onnxruntime-web ort.tgz", "--onnxruntime-web needs --web"),
    ("serve --root-path captioner", "root_path is 'captioner'; use a path such as /captio"),
    ("serve --api-key-file missing", "API key file 'missing' cannot be read (No such file"),
    # Training.
    ("train PHOTOS", "is a folder, not a config file; to train on its photos, run"),
    ("train mine.yml", "mine.yml does not exist; use a YAML config file"),
    ("train --data PHOTOS", "contains no captions in a known layout"),
    ("train --data none.csv", "none.csv does not exist; use the file with the captions"),
    ("train --images PHOTOS", "images needs captions; add captions (--data FILE)"),
]


@pytest.mark.parametrize(("line", "problem"), LINES)
def test_one_line_names_the_problem(
    line: str, problem: str, tiny, tmp_path, monkeypatch, *, capsys
) -> None:
    if "--engine ray" in line:
        pytest.importorskip("ray")
    empty = tmp_path / "empty.txt"
    places = {name.upper(): path for name, path in vars(tiny).items()}
    places |= {"PHOTO": tiny.photos / "1.png", "EMPTY": empty}
    empty.touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(api, "load", None)  # of evaluate
    given = [str(places.get(word, word)) for word in line.split()]
    model = given[0] in ("caption", "attend")

    code = main([*given, *["--model", str(tiny.model)] * model])

    out, err = capsys.readouterr()
    assert code == NOT_DONE
    assert out == ""
    assert problem in err
    assert err.startswith("captioner: ")
    assert err.count("\n") == 1
    assert list(Path().iterdir()) == [Path("empty.txt")]
    assert empty.read_text() == ""
