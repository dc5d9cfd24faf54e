"""Output of ``captioner caption``: files, resumed runs, sidecars and photo descriptions."""

from __future__ import annotations

import csv
import errno
import io
import json
import os
import random
import shlex
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
from PIL import Image
from tiny_data import noise_photos

from captioner import load, write_caption
from captioner.cli import caption as caption_module
from captioner.cli.journal import journal_path
from captioner.cli.main import INTERRUPTED, NOT_DONE, OK, SOME_FAILED
from captioner.cli.rows import make_row
from captioner.data import caption_store
from captioner.data.folders import find_images
from captioner.data.metadata import (
    embed_description,
    embedded_description,
    find_embedded,
    find_in_sidecar,
    read_description,
    set_description,
)


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Tiny photos with a broken one among them."""
    paths = noise_photos(tmp_path / "many", [f"{number}.png" for number in range(13)])
    paths[6].write_bytes(b"\x89PNG")
    return tmp_path / "many"


def interrupted_after(count: int) -> Any:
    """A block whose run receives Ctrl-C after this number of captioned photos."""
    left = iter(range(count))

    def interrupted(*arguments: Any) -> Any:
        if next(left, None) is None:
            raise KeyboardInterrupt
        return make_row(*arguments)

    return patch.object(caption_module, "make_row", interrupted)


# --- formats ---


def test_several_models_are_an_ensemble(tiny, caption) -> None:
    photos = sorted(tiny.photos.iterdir())

    code, out, _ = caption(*photos, "--model", tiny.twin, "--precision", "fp32")

    assert code == OK
    both = load(tiny.twin, tiny.model, precision="fp32").caption(photos)
    assert list(printed(out).values()) == [one.text for one in both]
    assert out != caption(*photos, "--precision", "fp32")[1]


@pytest.mark.parametrize(("name", "kind"), [("x.CSV", "csv"), ("x", "text")])
def test_the_extension_selects_the_format(name, kind, tiny, tmp_path, caption) -> None:
    _, expected, _ = caption(tiny.photos, "--format", kind)

    assert caption(tiny.photos, "-o", tmp_path / name)[:2] == (OK, "")

    assert (tmp_path / name).read_text() == expected


# --- interrupted and resumed ---


@pytest.mark.parametrize(("seed", "name"), [(0, "x.csv"), (1, "x.json")])
def test_a_run_killed_repeatedly_gives_the_same_file(
    seed, name, *, photos, tmp_path, caption
) -> None:
    """A killed process leaves the lines written so far; the last one may be incomplete."""
    arguments = (photos, "--batch-size", 3, "--num-captions", 2, "-o")
    assert caption(*arguments, tmp_path / name)[0] == SOME_FAILED  # one photo is broken
    expected = (tmp_path / name).read_bytes()
    (tmp_path / name).unlink()
    part, rng, kills = journal_path(tmp_path / name), random.Random(seed), 0

    while True:
        with interrupted_after(rng.randint(0, 5)):
            code, _, err = caption(*arguments, tmp_path / name, "--resume")
        if code != INTERRUPTED:
            break
        kills += 1
        assert not (tmp_path / name).exists()
        if part.exists():
            kept = part.read_bytes()
            part.write_bytes(kept[: len(kept) - rng.randint(0, 100)])

    assert kills >= 2
    assert code == SOME_FAILED
    assert "6.png" in err  # even if found by an earlier run
    assert (tmp_path / name).read_bytes() == expected


def test_how_to_continue_is_printed(photos, tmp_path, monkeypatch, caption) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = (photos.name, "--batch-size", 4, "-o", "my captions.csv")
    with interrupted_after(9):
        code, out, err = caption(*arguments)
    assert (code, out) == (INTERRUPTED, "")
    assert (
        "9 of 13 photos are finished and kept in my captions.csv.resume; to continue, run the same "
        "command with --resume\n"
    ) in err

    code, _, err = caption(*arguments)  # by mistake, without --resume
    assert code == NOT_DONE
    assert "my captions.csv.resume contains 9 photos from an earlier run; add --resume" in err


def test_a_run_that_reads_standard_input_is_not_resumed(
    photos, tmp_path, monkeypatch, caption
) -> None:
    # Nothing is stored, as --resume could not read the photo again.
    image = io.BytesIO((photos / "1.png").read_bytes())
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=image))
    monkeypatch.setattr(caption_module, "continued", None)

    code, out, err = caption("-", photos / "2.png", "-o", tmp_path / "x.csv")
    assert (code, out, err) == (OK, "", f"captioner: 2 captions written to {tmp_path / 'x.csv'}\n")
    assert (tmp_path / "x.csv").read_text().count("\n") == 3


@pytest.fixture
def interrupted(photos, tmp_path, caption) -> Path:
    """The output file of a run that was interrupted after 8 photos."""
    with interrupted_after(8):
        caption(photos, "-o", tmp_path / "x.csv", "--batch-size", 4)
    return tmp_path / "x.csv"


def test_other_options_are_refused_by_name(interrupted, photos, caption) -> None:
    before = journal_path(interrupted).read_bytes()
    for option, problem in (
        (("--banned-words", "dog"), "--banned-words was not set and is now ['dog']"),
        (("--precision", "bf16"), "--precision was auto and is now bf16"),
    ):
        code, _, err = caption(photos, "-o", interrupted, "--resume", "--batch-size", 4, *option)
        assert code == NOT_DONE
        assert problem in err
    assert journal_path(interrupted).read_bytes() == before
    assert caption(photos, "-o", interrupted, "--force")[0] == SOME_FAILED
    assert not journal_path(interrupted).exists()


def test_resume_does_not_overwrite_other_files(interrupted, photos, caption) -> None:
    interrupted.write_text("mine")
    again = (photos, "-o", interrupted, "--resume", "--batch-size", 4)

    code, _, err = caption(*again)

    assert code == NOT_DONE
    assert "--force" in err
    assert interrupted.read_text() == "mine"
    code, _, err = caption(*again, "--force")
    assert (code, "8 finished photos" in err) == (SOME_FAILED, True)
    assert interrupted.read_text() != "mine"


def test_resume_captions_what_is_new_or_changed(
    tiny, photos, tmp_path, monkeypatch, caption
) -> None:
    """Finished captions of other photos are kept: only these are decoded again."""
    from captioner.inference import captioner as inference

    (photos / "6.png").unlink()
    arguments = (photos, "-o", tmp_path / "x.csv", "--resume")
    assert caption(*arguments)[:2] == (OK, "")
    opened, open_image = [], inference.open_image
    monkeypatch.setattr(
        inference, "open_image", lambda p, **o: (opened.append(p.name), open_image(p, **o))[1]
    )
    code, _, err = caption(*arguments)
    assert (code, opened) == (OK, [])
    assert "12 finished photos" in err

    shutil.copy(tiny.photos / "1.png", photos / "20.png")
    shutil.copy(tiny.photos / "2.png", photos / "3.png")
    os.utime(photos / "4.png", ns=(1, 1))
    write_caption(photos / "7.png", load(tiny.model).caption(photos / "7.png"), in_place=True)
    opened.clear()
    (photos / "5.png").unlink()
    code, _, err = caption(*arguments)

    assert (code, sorted(opened)) == (OK, ["20.png", "3.png", "4.png"])
    assert all(part in err for part in ("9 finished photos", "1 deleted photo"))
    assert caption(photos, "-o", tmp_path / "whole.csv")[:2] == (OK, "")
    assert (tmp_path / "x.csv").read_bytes() == (tmp_path / "whole.csv").read_bytes()


def test_resume_keeps_the_rows_of_photos_that_are_not_among_the_inputs(
    tiny, photos, tmp_path, caption
) -> None:
    (photos / "6.png").unlink()
    arguments = ("-o", tmp_path / "x.csv", "--resume")
    assert caption(photos, *arguments)[0] == OK
    header, *rows = (tmp_path / "x.csv").read_text().splitlines()
    (photos / "1.png").unlink()

    assert caption(tiny.photos, *arguments)[0] == OK
    new = caption(tiny.photos, "--format", "csv")[1].splitlines()[1:]
    assert caption(tiny.photos / "1.png", *arguments)[0] == OK  # only one of the photos

    kept = [row for row in rows if not row.startswith(f"{photos / '1.png'},")]
    assert len(kept) == len(rows) - 1
    found = (tmp_path / "x.csv").read_text().splitlines()
    assert (found[0], sorted(found[1:])) == (header, sorted(kept + new))

    # An empty folder may be a disk that is not connected, so its rows are kept. The row of the
    # deleted photo does not return.
    for photo in photos.iterdir():
        photo.unlink()
    assert caption(tiny.photos, *arguments)[0] == OK
    assert sorted((tmp_path / "x.csv").read_text().splitlines()[1:]) == sorted(kept + new)


def test_resume_does_not_confuse_photos_of_the_same_name(
    tiny, photos, tmp_path, monkeypatch, caption
) -> None:
    arguments = ("1.png", "-o", tmp_path / "x.json", "--resume")
    monkeypatch.chdir(photos)
    assert caption(*arguments)[0] == OK
    before = (tmp_path / "x.json").read_text()
    monkeypatch.chdir(tiny.photos)

    code, _, err = caption(*arguments)

    assert (code, str(photos / "1.png") in err) == (NOT_DONE, True)
    assert (tmp_path / "x.json").read_text() == before


def test_resume_continues_in_a_folder_that_was_moved(photos, tmp_path, monkeypatch, caption):
    (photos / "6.png").unlink()
    (tmp_path / "old").mkdir()
    photos.rename(tmp_path / "old" / "many")
    monkeypatch.chdir(tmp_path / "old")
    assert caption("many", "-o", "x.csv", "--resume")[0] == OK
    before = Path("x.csv").read_bytes()
    (tmp_path / "old").rename(tmp_path / "new")
    monkeypatch.chdir(tmp_path / "new")

    code, _, err = caption("many", "-o", "x.csv", "--resume")

    assert (code, " 0 of them new" in err) == (OK, True)
    # If only the photos were moved, they are captioned again, and their old rows are replaced.
    Path("many").rename("photos")
    (tmp_path / "other").mkdir()
    Path("photos").rename(tmp_path / "other" / "many")
    monkeypatch.chdir(tmp_path / "other")
    assert caption("many", "-o", "../new/x.csv", "--resume")[0] == OK
    assert (tmp_path / "new" / "x.csv").read_bytes() == before


def lines_of(path: Path) -> list[str]:
    """The entries of an output file, one a line."""
    if path.suffix == ".json":
        return [json.dumps(photo) for photo in json.loads(path.read_text())]
    return path.read_text().splitlines()


@pytest.mark.parametrize(
    ("name", "options"),
    [("x.csv", []), ("x.txt", []), ("x.json", []), ("x.jsonl", []), ("x.csv", ["--resume"])],
)
def test_a_corrected_file_is_continued(name, options, photos, tmp_path, caption) -> None:
    """Its rows stay as they are, in their order; rows of new photos follow."""
    (photos / "6.png").unlink()
    new = tmp_path / "new.png"
    (photos / "3.png").rename(new)
    target = tmp_path / name
    assert caption(photos, "-o", target, *options)[0] == OK
    text = caption(photos / "1.png")[1].split(": ", 1)[1].strip()
    target.write_text(target.read_text().replace(text, "a CORRECTION", 1))
    before = lines_of(target)

    new.rename(photos / "3.png")
    for _ in range(2):  # the second time, nothing is new
        code, _, err = caption(photos, "-o", target, "--resume")
        assert (code, "are kept" in err) == (OK, True)
        after = lines_of(target)
        assert after[: len(before)] == before
        assert len(after) == len(before) + 1
        assert "3.png" in after[-1]
        assert f"12 captions written to {target}, " in err
        assert err.endswith(" of them new\n")


def test_a_corrected_table_keeps_its_columns(photos, tmp_path, caption) -> None:
    """As a spreadsheet saves it: semicolons, a column of its own, fewer rows, and an empty row."""
    (photos / "6.png").unlink()
    target = tmp_path / "x.csv"
    own = [f'yes;{photos / "2.png"};"a dog; no"', "no;elsewhere.png;a cat", ";;"]
    target.write_text("\r\n".join(["reviewed;image;caption", *own, ""]))

    code, _, err = caption(photos, "-o", target, "--resume")

    lines = target.read_text().splitlines()
    assert (code, lines[:4]) == (OK, ["reviewed;image;caption", *own])
    assert f"{len(lines) - 2} captions written to {target}" in err
    assert [line.split(";")[:2] for line in lines[4:]] == [
        ["", str(photo)] for photo in find_images([photos]) if photo.name != "2.png"
    ]


def test_replaced_photos_of_a_corrected_file(photos, tmp_path, caption) -> None:
    """Our captions are made again; one that somebody has written stays, and is named."""
    target = tmp_path / "x.csv"
    again = (photos, "-o", target, "--resume")
    caption(*again)
    first, *_ = csv.DictReader(target.read_text().splitlines())
    target.write_text(target.read_text().replace(first["caption"], "mine", 1))
    for replaced in (Path(first["image"]), photos / "9.png"):
        Image.new("RGB", (40, 30), "red").save(replaced)

    _, _, err = caption(*again)

    assert f"{first['image']} has changed, but you may have edited its caption" in err
    rows = list(csv.DictReader(target.read_text().splitlines()))
    assert (rows[0]["image"], rows[0]["caption"]) == (first["image"], "mine")
    assert rows[-1]["image"] == str(photos / "9.png")
    assert len({row["image"] for row in rows}) == len(rows) == 12


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("x.csv", "file,text\na.png,a dog\n", "a column image is missing"),
        ("x.csv", "image,caption\na.png,a dog, a cat\n", "line 2 has more or fewer cells"),
        ("x.json", "[{", "cannot be continued as a json caption file"),
        ("x.txt", "a poem: long\n", "no line begins with the name of an input photo"),
    ],
)
def test_other_files_are_not_continued(name, content, expected, *, tiny, tmp_path, caption) -> None:
    target = tmp_path / name
    target.write_text(content)
    code, _, err = caption(tiny.photos, "-o", target, "--resume")
    assert (code, expected in err, err.count("\n")) == (NOT_DONE, True, 1)
    assert target.read_text() == content


def test_a_photo_that_could_not_be_read_is_tried_again(tiny, photos, tmp_path, caption) -> None:
    arguments = (photos, "-o", tmp_path / "x.csv", "--resume")
    assert caption(*arguments)[0] == SOME_FAILED
    code, _, err = caption(*arguments)
    assert code == SOME_FAILED
    assert "6.png" in err

    shutil.copy(tiny.photos / "1.png", photos / "6.png")

    assert caption(*arguments)[0] == OK
    assert (tmp_path / "x.csv").read_text().count("\n") == 14


WAITING = """
import sys, time
from captioner.cli import caption, main

caption.make_row = lambda *_: (print("captioning", flush=True), time.sleep(600))
main.main(sys.argv[1:])
"""


def test_a_second_run_with_the_same_file_is_rejected(tiny, photos, tmp_path, caption) -> None:
    target = tmp_path / "x.csv"
    given = [str(one) for one in (photos, "-o", target, "--model", tiny.model)]
    with subprocess.Popen(
        [sys.executable, "-c", WAITING, "caption", *given], stdout=subprocess.PIPE
    ) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == b"captioning\n"
        journal = journal_path(target).read_bytes()
        for options in ([], ["--resume"], ["--force"]):
            code, _, err = caption(photos, "-o", target, *options)
            problem = (
                f"captioner: another process is writing to {target}; wait until that process ends, "
            )
            assert (code, err.startswith(problem), err.count("\n")) == (NOT_DONE, True, 1)
        assert journal_path(target).read_bytes() == journal
        first.kill()

    assert caption(photos, "-o", target)[0] == SOME_FAILED  # one photo is broken
    assert target.read_text().count("\n") == 13
    assert not journal_path(target).exists()


@pytest.mark.parametrize("name", ["x.json", "x.jsonl"])
@pytest.mark.parametrize("options", [[], ["--sidecar", "txt"]])
def test_json_has_rows_of_failed_photos(name, options, *, tiny, photos, tmp_path, caption) -> None:
    target = tmp_path / name
    assert caption(photos, "-o", target, *options)[0] == SOME_FAILED
    found = [json.loads(line) for line in lines_of(target)]

    names = [str(photo) for photo in find_images([photos])]
    assert [one["image"] for one in found] == names
    failed = found[6]
    assert (failed["image"], failed["captions"]) == (str(photos / "6.png"), [])
    assert "6.png" in failed["error"]
    assert not any("error" in one for one in found if one is not failed)
    printed_too = caption(photos, "--format", target.suffix[1:])[1]
    assert printed_too == target.read_text()

    shutil.copy(tiny.photos / "1.png", photos / "6.png")
    if not options:  # the rows are now kept from the file, as after a correction
        assert caption(photos, "-o", target, "--resume")[0] == OK
        after = [json.loads(line) for line in lines_of(target)]
        assert after[:-1] == [one for one in found if one is not failed]
        assert (after[-1]["image"], "error" in after[-1]) == (failed["image"], False)
        assert after[-1]["captions"]


def test_sigterm_ends_a_command_whatever_is_being_decoded(tiny) -> None:
    """The thread that reads a photo cannot be interrupted, and Ctrl-C waits for it."""
    code = (
        "import sys, time, captioner.inference.captioner as api; from captioner.cli import main;"
        "api.open_image = lambda *a, **k: (print('reading', flush=True), time.sleep(600));"
        f"sys.argv = ['', 'caption', {str(tiny.photos)!r}];"  # the shipped model needs no torch
        "sys.exit(main.main())"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.terminate()
        assert process.wait(10) == INTERRUPTED


# --- sidecars ---


@pytest.fixture
def album(tmp_path: Path) -> Path:
    """Three JPEG photos, a PNG and a GIF."""
    noise_photos(tmp_path / "album", ("a.jpg", "b.jpg", "c.jpg", "d.png", "e.gif"))
    return tmp_path / "album"


def printed(out: str) -> dict[str, str]:
    """Captions by file name."""
    pairs = (line.split(": ", 1) for line in out.splitlines())
    return {Path(path).name: text for path, text in pairs}


def test_sidecars_are_replaced_only_with_force(album, caption) -> None:
    (album / "b.txt").write_text("mine")

    code, out, err = caption(album, "--sidecar", "txt")
    assert (code, out) == (NOT_DONE, "")
    assert "b.jpg already has a caption in" in err
    assert "add --existing skip to keep existing captions, or --existing replace" in err
    assert not (album / "a.txt").exists()

    code, out, err = caption(album, "--sidecar", "txt", "--skip-existing")
    assert code == OK
    assert sorted(printed(out)) == ["a.jpg", "c.jpg", "d.png", "e.gif"]
    assert "1 of 5 photos skipped because they already have a caption" in err
    assert "changed after" not in err
    assert (album / "b.txt").read_text() == "mine"

    os.utime(album / "a.jpg", (2**31, 2**31))  # another photo under its name
    _, _, err = caption(album, "--sidecar", "txt", "--skip-existing")
    assert "a.jpg changed after the caption was written; to caption" in err

    assert caption(album, "--sidecar", "txt", "--force")[0] == OK
    assert (album / "b.txt").read_text() != "mine"


@pytest.mark.parametrize(
    ("options", "old", "new"),
    [
        ("--prefix ohwx,", None, "ohwx, {}"),
        ("--prefix 'ohwx, ' --suffix ', film grain'", None, "ohwx, {}, film grain"),
        ("--suffix 'film grain'", None, "{} film grain"),
        ("--existing skip --prefix ohwx", "mine", "mine"),
        ("--existing replace --prefix ohwx", "mine", "ohwx {}"),
        ("--existing append --prefix ohwx,", "1dog, grass,\n", "ohwx, 1dog, grass, {}"),
        ("--existing append --prefix ohwx,", "ohwx, 1dog", "ohwx, 1dog, {}"),
        ("--existing prepend --suffix .", "\ufeff1dog", "{}, 1dog."),
        ("--existing append --suffix ', film grain'", "1dog, film grain", "1dog, {}, film grain"),
        ("--existing prepend --prefix ohwx", "ohwx, 1dog", "ohwx {}, 1dog"),
        ("--existing append --prefix '(ohwx:1.2),'", "(ohwx:1.2),", "(ohwx:1.2), {}"),
        ("--existing append", "1dog, {}ware", "1dog, {}ware, {}"),  # begins as the caption
        ("--existing append --prefix 1", "1dog", "1 1dog, {}"),
        ("--existing append", None, "{}"),
    ],
)
def test_text_for_training_sets(options, old, new, *, album, caption) -> None:
    photo = album / "a.jpg"
    text, write = printed(caption(photo)[1])["a.jpg"], (photo, "--sidecar", "txt")
    write += tuple(shlex.split(options))
    if old is not None:
        (album / "a.txt").write_text(old.format(text), encoding="utf-8")

    assert caption(*write)[0] == OK

    expected = new.format(text, text)
    assert (album / "a.txt").read_text().strip() == expected
    if "replace" not in options and "skip" not in options:  # again: nothing is added twice
        again = () if "--existing" in options else ("--existing", "append")
        assert caption(*write, *again)[0] == OK
        assert (album / "a.txt").read_text().strip() == expected


def test_text_in_another_encoding_stays(album, caption) -> None:
    (album / "a.txt").write_bytes(b"caf\xe9")

    code, out, err = caption(album, "--sidecar", "txt", "--existing", "append")

    assert (code, len(printed(out))) == (SOME_FAILED, 4)
    assert "a.txt: the existing text is not encoded in UTF-8" in err
    assert (album / "a.txt").read_bytes() == b"caf\xe9"


def test_sentence_case(album, caption) -> None:
    plain, sentences = printed(caption(album)[1]), printed(caption(album, "--sentence-case")[1])
    assert sentences == {name: f"{text[0].upper()}{text[1:]}." for name, text in plain.items()}


def test_sidecars_and_a_list_in_one_run(album, tmp_path, caption) -> None:
    assert caption(album, "--sidecar", "txt", "-o", tmp_path / "x.csv")[:2] == (OK, "")
    rows = list(csv.DictReader((tmp_path / "x.csv").read_text().splitlines()))
    assert len(rows) == 5
    assert all(
        f"{r['caption']}\n" == Path(r["image"]).with_suffix(".txt").read_text() for r in rows
    )


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (KeyboardInterrupt(), INTERRUPTED),
        (OSError(errno.ENOSPC, "No space left", "c.txt"), NOT_DONE),
    ],
    ids=["interrupted", "full disk"],
)
def test_a_run_that_ends_early_continues(error, expected, album, caption) -> None:
    write, written = caption_store.atomic_write, []

    def ends(path: Path, data: bytes | str) -> None:
        if len(written) == 2:
            raise error
        written.append(path)
        write(path, data)

    with patch.object(caption_store, "atomic_write", ends):
        code, out, err = caption(album, "--sidecar", "txt", "--batch-size", 2)
    assert (code, len(out.splitlines())) == (expected, 2)
    assert "2 captions finished; " in err
    assert "--skip-existing\n" in err

    assert caption(album, "--sidecar", "txt", "--batch-size", 2, "--skip-existing")[0] == OK

    assert len(list(album.glob("*.txt"))) == 5


def test_xmp_sidecars_are_merged(album, caption) -> None:
    empty = set_description(None, "")
    (album / "a.xmp").write_bytes(empty.replace(b"<rdf:RDF", b"<!-- mine --><rdf:RDF"))
    (album / "b.jpg.xmp").write_bytes(empty)  # as named by darktable and digiKam

    code, out, err = caption(album, "--sidecar", "xmp")

    assert (code, err.count("\n")) == (OK, 1)  # sidecars are not counted as other files
    sidecars = {"a.jpg": "a.xmp", "b.jpg": "b.jpg.xmp", "c.jpg": "c.xmp", "d.png": "d.xmp"}
    for name, sidecar in sidecars.items():
        assert read_description((album / sidecar).read_bytes()) == printed(out)[name]
    assert b"<!-- mine -->" in (album / "a.xmp").read_bytes()
    assert not (album / "b.xmp").exists()


@pytest.mark.parametrize(
    ("name", "other"), [("photo.xmp", "a.xmp"), ("photo.jpg.xmp", "a.jpg.xmp")]
)
def test_the_name_of_sidecars_can_be_chosen(name, other, *, album, caption) -> None:
    (album / "a.jpg.xmp").write_bytes(set_description(None, ""))
    expected = printed(caption(album / "a.jpg", "--sidecar", "xmp", "--sidecar-name", name)[1])
    assert read_description((album / other).read_bytes()) == expected["a.jpg"]


def test_photos_with_the_same_sidecar_are_refused(album, caption) -> None:
    shutil.copy(album / "a.jpg", album / "a.jpeg")

    code, _, err = caption(album, "--sidecar", "txt")

    assert code == NOT_DONE
    assert "would both go into" in err


# --- descriptions in photos ---


def test_copies_have_the_description(album, tmp_path, caption) -> None:
    (album / "more").mkdir()
    shutil.copy(album / "a.jpg", album / "more" / "a.jpg")
    before = {path: path.read_bytes() for path in album.rglob("*.*")}
    copies = tmp_path / "copies"

    code, out, err = caption(album, "--recursive", "--embed", copies)

    assert code == SOME_FAILED  # the GIF
    assert "e.gif: captions can be embedded only in JPEG, PNG, WebP and TIFF; use" in err
    names = ["a.jpg", "b.jpg", "c.jpg", "d.png", "more/a.jpg"]
    assert sorted(str(p.relative_to(copies)) for p in copies.glob("**/*.*")) == names
    for name, text in printed(out).items():
        assert embedded_description((copies / name).read_bytes()) == text
    assert {path: path.read_bytes() for path in album.rglob("*.*")} == before
    assert caption(album, "--embed", copies)[0] == NOT_DONE  # they exist
    assert caption(album, "--embed", album)[0] == NOT_DONE

    assert (
        caption(copies / "more", "--embed", album / "more")[0] == NOT_DONE
    )  # it has a description
    (album / "more" / "a.jpg").unlink()
    code, out, err = caption(copies / "more", "--embed", album / "more", "--skip-existing")
    assert (code, out) == (OK, "")
    assert "copied unchanged" in err
    original, copied = (folder / "more" / "a.jpg" for folder in (copies, album))
    assert copied.read_bytes() == original.read_bytes()
    assert copied.stat().st_mtime_ns == original.stat().st_mtime_ns


def test_originals_change_only_with_in_place(album, caption) -> None:
    (album / "e.gif").unlink()
    pixels = {path.name: pixels_of(path) for path in album.iterdir()}
    for path in album.iterdir():
        os.utime(path, ns=(10**18, 10**18))

    code, out, _ = caption(album, "--in-place")

    assert code == OK
    for path in album.iterdir():
        assert path.stat().st_mtime_ns == 10**18
        assert embedded_description(path.read_bytes()) == printed(out)[path.name]
        assert Image.open(path).tobytes() == pixels[path.name]
    code, _, err = caption(album, "--in-place")
    assert code == NOT_DONE
    assert "already has a description by captioner; " in err
    assert caption(album, "--in-place", "--skip-existing")[1] == ""


def test_only_captions_of_captioner_are_replaced(album, caption) -> None:
    """A mark says that captioner wrote a caption; a person's correction is a person's text."""
    (album / "e.gif").unlink()
    assert caption(album, "--in-place", "--sentence-case")[0] == OK
    for path in album.iterdir():
        assert find_embedded(path.read_bytes()).own
    corrected = album / "b.jpg"
    corrected.write_bytes(embed_description(corrected.read_bytes(), "mine"))
    before = corrected.read_bytes()

    code, out, _ = caption(album, "--in-place", "--existing", "replace-own")

    assert (code, sorted(printed(out))) == (OK, ["a.jpg", "c.jpg", "d.png"])
    assert corrected.read_bytes() == before
    for name, text in printed(out).items():
        assert find_embedded((album / name).read_bytes())[:2] == (text, True)
    assert caption(album, "--sidecar", "txt", "--existing", "replace-own")[0] == NOT_DONE


def pixels_of(path: Path) -> bytes:
    with Image.open(path) as image:
        return image.tobytes()


def test_every_format_of_a_mixed_folder_is_written(album, caption) -> None:
    """With exiftool, which writes what captioner does not."""
    if shutil.which("exiftool") is None:
        pytest.skip("exiftool is not installed (apt-get install libimage-exiftool-perl)")
    for kind in ("webp", "tif", "avif"):
        with Image.open(album / "a.jpg") as image, suppress(KeyError):  # no AVIF in this Pillow
            image.save(album / f"z.{kind}")
    pixels = {path.name: pixels_of(path) for path in album.iterdir()}

    code, out, _ = caption(album, "--in-place", "--exiftool")

    assert code == OK
    for path in album.iterdir():
        assert pixels_of(path) == pixels[path.name]
        packet = subprocess.run(["exiftool", "-b", "-XMP", path], capture_output=True, check=True)
        assert find_in_sidecar(packet.stdout)[:2] == (printed(out)[path.name], True)


def test_a_name_that_is_too_long_costs_no_other_photo(album, caption) -> None:
    """photo.xmp fits, photo.jpg.xmp does not."""
    long = album / f"{'é' * 125}.jpg"
    shutil.copy(album / "a.jpg", long)
    assert caption(album, "--sidecar", "xmp")[0] == OK
    assert long.with_suffix(".xmp").is_file()
    again = ("--sidecar-name", "photo.jpg.xmp", "--force")
    code, out, err = caption(album, "--sidecar", "xmp", *again)
    assert (code, len(printed(out))) == (SOME_FAILED, 5)
    assert err.count("File name too long") == 1
