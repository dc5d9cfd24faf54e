"""``captioner apply``: captions of a file in and beside their photos."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from captioner.cli.main import FAILED, OK, USAGE, main
from captioner.data.metadata import embedded_description, read_description


@pytest.fixture
def album(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Photos in ``holiday/`` and ``holiday/sub/`` of the current folder."""
    monkeypatch.chdir(tmp_path)
    for name in ("a.jpg", "b.png", "sub/a.jpg"):
        photo = tmp_path / "holiday" / name
        photo.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.zeros((12, 16, 3), np.uint8)).save(photo)


@pytest.mark.usefixtures("album")
def test_corrected_captions_reach_photos(tiny) -> None:
    """From ``caption`` to a spreadsheet, then ``apply``, which imports tables as training does."""
    photos = [f"holiday/{name}" for name in ("a.jpg", "b.png", "sub/a.jpg")]
    assert main(["caption", *photos, "-o", "captions.csv", "--model", str(tiny.model)]) == OK
    header, first, *others = Path("captions.csv").read_text().splitlines()
    first = f'{first.split(",")[0]},1,"a ""red"" door, half open – für Zoë",,'
    table = "\r\n".join([header, first, *others])
    Path("captions.csv").write_bytes(f"\ufeff{table}\r\n".encode())  # as Excel saves it

    assert main(["apply", "captions.csv", "--sidecar", "xmp"]) == OK
    assert main(["apply", "captions.csv", "--embed", "copies"]) == OK
    assert main(["apply", "captions.csv", "--in-place"]) == OK
    text = 'a "red" door, half open – für Zoë'
    assert read_description(Path("holiday/a.xmp").read_bytes()) == text
    for photo, caption in zip(photos, [text, *(row.split(",")[2] for row in others)], strict=True):
        for written in (Path(photo), Path("copies", photo)):
            assert embedded_description(written.read_bytes()) == caption


@pytest.mark.usefixtures("album")
def test_names_in_an_image_folder_are_relative_to_it() -> None:
    Path("holiday/metadata.csv").write_text("file_name,text\na.jpg,one\n")
    assert main(["apply", "holiday", "--sidecar", "txt"]) == OK
    assert Path("holiday/a.txt").read_text() == "one\n"


@pytest.mark.usefixtures("album")
def test_what_cannot_be_written_is_one_line_each(capsys) -> None:
    rows = ["image,caption", "a.jpg,one", "a.jpg,two", "gone.jpg,three", "b.png,", "sub/a.jpg,four"]
    Path("rows.csv").write_text("\n".join(rows))
    Path("holiday/sub/a.txt").mkdir()

    def run(*arguments: Any) -> tuple[int, list[str]]:
        code = main(["apply", "rows.csv", *map(str, arguments)])
        return code, capsys.readouterr().err.splitlines()

    options = ["--images", "holiday", "--sidecar", "txt"]
    code, lines = run(*options, "--force")
    assert code == FAILED
    assert Path("holiday/a.txt").read_text() == "one\n"
    assert not Path("holiday/b.txt").exists()
    names = ("without a caption", "gone.jpg", "holiday/sub/a.txt", "1 caption written")
    assert all(name in line for name, line in zip(names, lines, strict=True))

    Path("self.csv").write_text(
        "image,caption\nself.csv,one\nholiday/a.txt,two\nholiday/a.jpg,NaN\n"
    )
    assert main(["apply", "self.csv", "--sidecar", "txt", "--force"]) == FAILED
    assert Path("holiday/a.txt").read_text() == "one\n"  # neither photo nor caption in the rows
    capsys.readouterr()

    Path("holiday/a.txt").write_text("mine")
    assert run(*options)[0] == USAGE
    assert run(*options, "--skip-existing")[0] == FAILED
    assert Path("holiday/a.txt").read_text() == "mine"

    code, (_, line) = run("--in-place")  # the rows are of photos in another folder
    assert code == FAILED
    assert "give --images" in line
    assert run()[0] == USAGE
