"""``captioner apply``: captions of a file in and beside their photos."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from captioner.cli.main import NOT_DONE, OK, SOME_FAILED, main
from captioner.data.cells import digest_cell
from captioner.data.metadata import (
    Mark,
    embed_description,
    find_embedded,
    read_description,
    set_description,
)


@pytest.fixture
def album(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Photos in ``holiday/`` and ``holiday/sub/`` of the current folder."""
    monkeypatch.chdir(tmp_path)
    for name in ("a.jpg", "b.png", "sub/a.jpg"):
        photo = tmp_path / "holiday" / name
        photo.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.zeros((12, 16, 3), np.uint8)).save(photo)


@pytest.mark.usefixtures("album")
def test_corrected_captions_reach_photos(tiny, capsys) -> None:
    """From ``caption`` to a spreadsheet, then ``apply``, which imports tables as training does."""
    photos = [f"holiday/{name}" for name in ("a.jpg", "b.png", "sub/a.jpg")]
    assert main(["caption", *photos, "-o", "captions.csv", "--model", str(tiny.model)]) == OK
    header, first, *others = Path("captions.csv").read_text().splitlines()
    start, _, digest = first.partition(",")[0], *first.rpartition(",")[1:]
    first = f'{start},1,"a ""red"" door, half open – für Zoë",,,{digest}'
    table = "\r\n".join([header, first, *others])
    Path("captions.csv").write_bytes(f"\ufeff{table}\r\n".encode())  # as Excel saves it

    assert main(["apply", "captions.csv", "--sidecar", "xmp"]) == OK
    assert main(["apply", "captions.csv", "--embed", "copies"]) == OK
    assert main(["apply", "captions.csv", "--in-place"]) == OK
    text = 'a "red" door, half open – für Zoë'
    assert read_description(Path("holiday/a.xmp").read_bytes()) == text
    for photo, caption in zip(photos, [text, *(row.split(",")[2] for row in others)], strict=True):
        for written in (Path(photo), Path("copies", photo)):
            found = find_embedded(written.read_bytes())
            assert (found.text, found.own) == (caption, caption != text)
    before = Path("holiday/b.png").read_bytes()
    capsys.readouterr()
    assert main(["apply", "captions.csv", "--in-place", "--existing", "replace-own"]) == OK
    assert (
        "2 photos left unchanged, because captioner wrote the same caption"
        in capsys.readouterr().err
    )
    assert Path("holiday/b.png").read_bytes() == before
    assert main(["apply", "--remove", "holiday"]) == OK
    assert "removed 4 captions and kept 2 texts by people" in capsys.readouterr().err


@pytest.mark.usefixtures("album")
def test_names_in_an_image_folder_are_relative_to_it() -> None:
    Path("holiday/metadata.csv").write_text("file_name,text\na.jpg,one\n")
    assert main(["apply", "holiday", "--sidecar", "txt"]) == OK
    assert Path("holiday/a.txt").read_text() == "one\n"


@pytest.mark.usefixtures("album")
def test_a_caption_is_corrected_twice_and_then_removed(capsys) -> None:
    corrected, own = Path("holiday/a.jpg"), Path("holiday/b.png")
    marked = embed_description(corrected.read_bytes(), "a door", ["house"], mark=Mark(0.5))
    corrected.write_bytes(marked)
    own.write_bytes(embed_description(own.read_bytes(), "Grandma, 80 years old"))
    before = own.read_bytes()
    for text in ("a red door", "a blue door"):
        rows = [["image", "caption", "digest"]]
        rows += [
            [str(corrected), text, digest_cell("a door")],
            [str(own), "a cat", digest_cell("a cat")],
        ]
        Path("captions.csv").write_text("".join(f"{','.join(row)}\n" for row in rows))
        assert main(["apply", "captions.csv", "--in-place", "--existing", "replace"]) == OK
        assert find_embedded(corrected.read_bytes())[:2] == (text, False)
        assert own.read_bytes() == before
    assert b"house" in corrected.read_bytes()
    assert main(["apply", "--remove", "holiday"]) == OK
    assert "removed 0 captions and kept 2 texts by people" in capsys.readouterr().err
    assert find_embedded(corrected.read_bytes()).text == "a blue door"
    assert b"house" not in corrected.read_bytes()


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
    assert code == SOME_FAILED
    assert Path("holiday/a.txt").read_text() == "one\n"
    assert not Path("holiday/b.txt").exists()
    names = ("the caption is missing", "gone.jpg", "holiday/sub/a.txt", "1 caption written")
    assert all(name in line for name, line in zip(names, lines, strict=True))

    Path("self.csv").write_text(
        "image,caption\nself.csv,one\nholiday/a.txt,two\nholiday/a.jpg,NaN\n"
    )
    assert main(["apply", "self.csv", "--sidecar", "txt", "--force"]) == NOT_DONE
    assert Path("holiday/a.txt").read_text() == "one\n"  # neither photo nor caption in the rows
    capsys.readouterr()

    Path("holiday/a.txt").write_text("mine")
    assert run(*options)[0] == NOT_DONE
    assert run(*options, "--skip-existing")[0] == SOME_FAILED
    assert Path("holiday/a.txt").read_text() == "mine"

    code, (_, line) = run("--in-place")  # the rows are of photos in another folder
    assert code == NOT_DONE
    assert "set --images to the folder" in line
    assert run()[0] == NOT_DONE


# --- tables of strangers ---


@pytest.mark.usefixtures("album")
@pytest.mark.parametrize("where", [("--sidecar", "txt"), ("--sidecar", "xmp"), ("--in-place",)])
def test_a_stranger_writes_to_photos_of_the_folder_only(where, capsys) -> None:
    """Every bad name is one line, and the good ones are written."""
    shutil.copy("holiday/a.jpg", "victim.jpg")
    Path("holiday/requirements.in").write_text("mine")
    Path("holiday/l.jpg").symlink_to("../victim.jpg")
    os.mkfifo("holiday/pipe.jpg")
    here = Path.cwd()
    # All names that lead elsewhere are in tests/unit/data/test_folders.py.
    names = ["../victim.jpg", f"{here}/victim.jpg", "requirements.in", "l.jpg", "pipe.jpg"]
    rows = [*names, "a.jpg", f"{here}/holiday/b.png"]
    Path("rows.csv").write_text("\n".join(["image,caption", *(f"{row},evil" for row in rows)]))
    before = {path: path.read_bytes() for path in here.rglob("*") if path.is_file()}

    assert main(["apply", "rows.csv", "--images", "holiday", *where]) == SOME_FAILED

    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == len(names) + 1
    assert all(repr(name) in line or name in line for name, line in zip(names, lines, strict=False))
    changed = {
        str(path.relative_to(here))
        for path in here.rglob("*")
        if path.is_file() and before.get(path) != path.read_bytes()
    }
    ending = "" if where == ("--in-place",) else f".{where[1]}"
    photos = ("holiday/a.jpg", "holiday/b.png")
    expected = {str(Path(name).with_suffix(ending)) if ending else name for name in photos}
    assert changed == expected


@pytest.mark.usefixtures("album")
@pytest.mark.parametrize("kind", ["txt", "xmp"])
def test_sidecars_are_not_written_through_links_and_pipes(kind, capsys) -> None:
    Path("victim").write_text("mine")
    shutil.copy("holiday/a.jpg", "holiday/c.jpg")
    shutil.copy("holiday/a.jpg", "holiday/d.jpg")
    Path(f"holiday/a.{kind}").symlink_to("../victim")
    Path(f"holiday/c.{kind}").symlink_to("../created")
    os.mkfifo(f"holiday/d.{kind}")
    rows = "image,caption\na.jpg,one\nb.png,two\nc.jpg,three\nd.jpg,four\n"
    Path("rows.csv").write_text(rows)
    options = ["--images", "holiday", "--sidecar", kind, "--force"]
    assert main(["apply", "rows.csv", *options]) == SOME_FAILED
    assert capsys.readouterr().err.count("; move the ") == 3
    assert Path("victim").read_text() == "mine"
    assert not Path("created").exists()
    assert Path(f"holiday/b.{kind}").is_file()


# --- captions that captioner wrote ---


@pytest.mark.usefixtures("album")
def test_texts_of_people_are_neither_replaced_nor_removed(capsys) -> None:
    mine = embed_description(Path("holiday/a.jpg").read_bytes(), "mine")
    original, other = Path("holiday/b.png").read_bytes(), Path("holiday/sub/a.jpg").read_bytes()
    Path("holiday/a.jpg").write_bytes(mine)
    Path("holiday/b.png").write_bytes(embed_description(original, "a dog", ["dog"], mark=Mark(0.4)))
    rows = "image,caption\na.jpg,one\nb.png,two\nsub/a.jpg,three\n"
    Path("rows.csv").write_text(rows)
    options = ["--images", "holiday", "--in-place", "--existing", "replace-own"]

    assert main(["apply", "rows.csv", *options]) == OK

    capsys.readouterr()
    assert Path("holiday/a.jpg").read_bytes() == mine
    for name, text in {"b.png": "two", "sub/a.jpg": "three"}.items():  # chosen by a person
        found = find_embedded(Path("holiday", name).read_bytes())
        assert (found.text, found.own) == (text, False)

    Path("holiday/b.png").write_bytes(embed_description(original, "a dog", ["dog"], mark=Mark(0.4)))
    Path("holiday/sub/a.jpg").write_bytes(embed_description(other, "a cat", mark=Mark()))
    Path("holiday/a.xmp").write_bytes(set_description(None, "a dog", mark=Mark()))
    Path("holiday/a.jpg.xmp").write_bytes(set_description(None, "by me"))
    assert main(["apply", "--remove", "holiday"]) == OK
    assert "removed 3 captions and kept 2 texts by people" in capsys.readouterr().err
    assert Path("holiday/a.jpg").read_bytes() == mine
    assert Path("holiday/b.png").read_bytes() == original
    assert Path("holiday/sub/a.jpg").read_bytes() == other
    assert not Path("holiday/a.xmp").exists()
    assert read_description(Path("holiday/a.jpg.xmp").read_bytes()) == "by me"
    assert main(["apply", "--remove", "holiday", "--in-place"]) == NOT_DONE
