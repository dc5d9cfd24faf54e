"""Finds the photos in files and folders, in natural order, and counts the other files."""

from __future__ import annotations

import glob
import os
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from captioner.data.formats import FORMATS, RAW, PhotoFormat, format_by_name
from captioner.errors import DataError


@dataclass
class Skipped:
    """Files of folders that are not captioned."""

    photos: dict[PhotoFormat, Counter[str]] = field(default_factory=dict)
    """Photos that cannot be decoded here, by format and extension."""
    others: Counter[str] = field(default_factory=Counter)
    """Files that are not photos, by extension in lower case; empty: no extension."""
    rest: Counter[tuple[str, str]] = field(default_factory=Counter)
    """The rest, by a noun and what follows it: hidden photos, but no other hidden files; subfolders
    of a search that is not recursive, or else links to folders; camera RAW beside its photo."""
    unlisted: list[str] = field(default_factory=list)
    """A message for each subfolder that cannot be listed."""


def find_images(
    paths: Iterable[str | Path],
    *,
    recursive: bool = False,
    skipped: Skipped | None = None,
    formats: tuple[PhotoFormat, ...] = FORMATS,
) -> list[Path]:
    """List photos in the order given; a folder is replaced by its photos.

    Files and missing paths are returned as they are; `open_image` reports what is wrong with them.
    A folder's photos are found by their extension (see `FORMATS`) and sorted naturally (``2.jpg``
    before ``10.jpg``); hidden files are skipped, and camera RAW beside a photo of the same name.

    Args:
        paths: Files and folders.
        recursive: Also search subfolders, after the folder's own photos; links are not followed.
        skipped: Counts what is left out of folders; None: a subfolder that cannot be listed is an
            error.
        formats: What folders are searched for.

    Raises:
        DataError: A folder has no photos that can be decoded, or cannot be listed; or a name is
            empty.
    """
    counted = Skipped() if skipped is None else skipped
    photos = []
    for given in [paths] if isinstance(paths, str) else paths:
        if given == "":  # as a path, the current folder
            raise DataError("'' is an empty name; give a file or a folder")
        path = Path(given)
        if not path.is_dir():
            photos.append(path)
            continue
        found = _search(path, recursive, counted, formats)
        if skipped is None and counted.unlisted:
            raise DataError(counted.unlisted[0])
        if not found:
            searched = ", ".join(kind.name for kind in formats if kind.decodable)
            noun = "photos" if formats == FORMATS else "videos"
            subfolders = "" if recursive else "; subfolders are not searched"
            raise DataError(f"{path}: no {noun} in this folder ({searched}){subfolders}")
        photos += found
    return photos


def _search(
    folder: Path, recursive: bool, skipped: Skipped, formats: tuple[PhotoFormat, ...]
) -> list[Path]:
    found: list[Path] = []

    def report(error: OSError) -> None:
        problem = _unlisted(error)
        if Path(error.filename) == folder:
            raise DataError(problem) from error
        skipped.unlisted.append(problem)  # the rest can be read

    for parent, folders, names in os.walk(folder, onerror=report):
        hidden = [n for n in names if n.startswith(".") and format_by_name(n)]
        skipped.rest["hidden photo", ""] += len(hidden)
        visible = [name for name in folders if not name.startswith(".")]
        links = [name for name in visible if Path(parent, name).is_symlink()]
        if not recursive:
            skipped.rest["subfolder", " (give --recursive to search them)"] += len(visible)
            visible, links = [], []
        skipped.rest["link", " to folders"] += len(links)
        folders[:] = sorted(set(visible) - set(links), key=natural)
        files = [name for name in names if not name.startswith(".")]
        photos = {Path(name).stem for name in files if format_by_name(name)}
        files = [n for n in files if not (n.endswith(".txt") and n[:-4] in photos)]  # sidecars
        rest = without_twins(files) if RAW in formats else files
        twins = len(files) - len(rest)
        skipped.rest["camera RAW file", " beside a photo of the same name"] += twins
        kept = [name for name in rest if _is_photo(name, skipped, formats)]
        found += [Path(parent, name) for name in sorted(kept, key=natural)]
    return found


def without_twins(files: Sequence[str]) -> list[str]:
    """Paths or URLs of files, without camera RAW beside a photo of the same name."""
    kinds = {name: format_by_name(name) for name in files}
    if RAW not in kinds.values():
        return [*files]
    others = [name for name, kind in kinds.items() if kind and kind is not RAW and kind.decodable]
    stems = {name.rpartition(".")[0] for name in others}
    return [n for n, kind in kinds.items() if kind is not RAW or n.rpartition(".")[0] not in stems]


def _unlisted(error: OSError) -> str:
    return f"{error.filename}: this folder cannot be listed ({error.strerror})"


def expand_pattern(pattern: str, skipped: Skipped | None = None) -> list[str]:
    """Files and folders that match a pattern of local names, as in a shell, in natural order.

    ``**`` stands for any subfolders. It does not follow links to folders, which may lead back.
    Subfolders that cannot be listed are as for `find_images`.
    """
    counted = Skipped() if skipped is None else skipped
    found = sorted(dict.fromkeys(_expand(pattern, counted)), key=natural)
    if skipped is None and counted.unlisted:
        raise DataError(counted.unlisted[0])
    return found


def _expand(pattern: str, skipped: Skipped) -> list[str]:
    parts = pattern.split("/")
    if "**" not in parts:
        return glob.glob(pattern)  # noqa: PTH207 (as the shell: a/../*.jpg)
    at = parts.index("**")
    rest, found = parts[at + 1 :] or ["*"], []

    def report(error: OSError) -> None:
        skipped.unlisted.append(_unlisted(error))

    for top in _expand("/".join([*parts[:at], ""]), skipped) if at else [""]:
        for folder, subfolders, _ in os.walk(top or ".", onerror=report):
            subfolders[:] = [name for name in subfolders if not name.startswith(".")]
            inside = glob.escape(folder if top else folder[2:])
            found += _expand(os.path.join(inside, *rest), skipped)  # noqa: PTH118 (keeps the spelling)
    return found


def _is_photo(name: str, skipped: Skipped, formats: tuple[PhotoFormat, ...]) -> bool:
    """Whether the file is a photo that can be decoded here; counts it if not."""
    extension = Path(name).suffix.lower()
    kind = next((kind for kind in formats if extension in kind.extensions), None)
    if kind is None:
        # What follows a dot may also be the rest of a sentence.
        skipped.others[extension if re.fullmatch(r"\.\w{1,10}", extension) else ""] += 1
        return False
    if not kind.decodable:
        skipped.photos.setdefault(kind, Counter())[extension] += 1
        return False
    return True


def natural(name: str) -> str:
    """Sort key: numbers by value, letters without case, ties by the name itself.

    A string, which takes less memory than a list of parts for a million names. Each number is
    preceded by its length (three digits; names have at most 255 characters), so 9 sorts before 10.
    """
    padded = re.sub("0*([0-9]+)", lambda n: f"{len(n[1]):03}{n[1]}", name.casefold())
    return f"{padded}\0{name}"
