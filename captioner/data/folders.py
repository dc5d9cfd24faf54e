"""Finds the images in files and folders, in natural order."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from captioner.errors import DataError

EXTENSIONS = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff")
"""File name extensions of images, in lower case; matched in any case."""


def find_images(paths: Iterable[str | Path], *, recursive: bool = False) -> Iterator[Path]:
    """List images in the order given; a folder is replaced by its images.

    Files and missing paths are returned as they are; `open_image` reports what is wrong with them.
    A folder's images are found by their extension and sorted naturally (``2.jpg`` before
    ``10.jpg``); hidden files are skipped. Folders are checked before the first image is yielded.

    Args:
        paths: Files and folders.
        recursive: Also search subfolders, after the folder's own images; links are not followed.

    Returns:
        An iterator over the images.

    Raises:
        DataError: A folder has no images or cannot be listed.
    """
    given = [Path(path) for path in ([paths] if isinstance(paths, str) else paths)]
    for path in given:
        if path.is_dir() and next(_walk(path, recursive), None) is None:
            raise DataError(
                f"{path}: no images in this folder (looked for {' '.join(EXTENSIONS)})"
                + ("" if recursive else "; subfolders are not searched")
            )
    return (
        found for path in given for found in (_walk(path, recursive) if path.is_dir() else [path])
    )


def _walk(folder: Path, recursive: bool) -> Iterator[Path]:
    images, folders = [], []
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.name.startswith("."):
                    continue
                if entry.name.lower().endswith(EXTENSIONS) and not entry.is_dir():
                    images.append(entry.name)
                elif recursive and entry.is_dir(follow_symlinks=False):
                    folders.append(entry.name)
    except OSError as error:
        raise DataError(f"{folder}: this folder cannot be listed ({error.strerror})") from error
    for name in sorted(images, key=_natural):
        yield folder / name
    for name in sorted(folders, key=_natural):
        yield from _walk(folder / name, recursive)


def _natural(name: str) -> str:
    """Sort key: numbers by value, letters without case, ties by the name itself.

    A string, which takes less memory than a list of parts for a million names. Each number is
    preceded by its length (three digits; names have at most 255 characters), so 9 sorts before 10.
    """
    return re.sub("0*([0-9]+)", _with_length, name.casefold()) + "\0" + name


def _with_length(number: re.Match[str]) -> str:
    return f"{len(number[1]):03}{number[1]}"
