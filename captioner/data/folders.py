"""The pictures of the files and folders that a person names, in natural order."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from captioner.errors import DataError

EXTENSIONS = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff")
"""The file name endings (in any case) by which a folder's pictures are found."""


def find_images(paths: Iterable[str | Path], *, recursive: bool = False) -> Iterator[Path]:
    """List pictures in the order given; a folder stands for the pictures in it.

    Files, and paths where nothing is, come out as they are: `open_image` says what is wrong with
    one, and the others go on. A folder's pictures are known by their extension and come in natural
    order (``2.jpg`` before ``10.jpg``), hidden ones left out. The folders are checked before the
    first picture is yielded, so that a mistake costs no work.

    Args:
        paths: Files and folders.
        recursive: Go into subfolders too, after a folder's own pictures; not through links.

    Returns:
        The pictures, one by one.

    Raises:
        DataError: A folder holds no picture or cannot be listed.
    """
    given = [Path(path) for path in ([paths] if isinstance(paths, str) else paths)]
    for path in given:
        if path.is_dir() and next(_walk(path, recursive), None) is None:
            raise DataError(
                f"{path}: no picture in this folder (looked for {' '.join(EXTENSIONS)})"
                + ("" if recursive else "; subfolders are not searched")
            )
    return (
        found for path in given for found in (_walk(path, recursive) if path.is_dir() else [path])
    )


def _walk(folder: Path, recursive: bool) -> Iterator[Path]:
    pictures, folders = [], []
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.name.startswith("."):
                    continue
                if entry.name.lower().endswith(EXTENSIONS) and not entry.is_dir():
                    pictures.append(entry.name)
                elif recursive and entry.is_dir(follow_symlinks=False):
                    folders.append(entry.name)
    except OSError as error:
        raise DataError(f"{folder}: this folder cannot be listed ({error.strerror})") from error
    for name in sorted(pictures, key=_natural):
        yield folder / name
    for name in sorted(folders, key=_natural):
        yield from _walk(folder / name, recursive)


def _natural(name: str) -> str:
    """Sort key: digits count as numbers, letters without case; the name itself settles a tie.

    A string and not a list of parts, for folders of a million names. Each number is led by its
    length (three digits; a name has 255 characters at most), so that 9 comes before 10.
    """
    return re.sub("0*([0-9]+)", _with_length, name.casefold()) + "\0" + name


def _with_length(number: re.Match[str]) -> str:
    return f"{len(number[1]):03}{number[1]}"
