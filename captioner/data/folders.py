"""Functions that find photos in folders, in natural order, or by their names in a table."""

from __future__ import annotations

import glob
import os
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath

from captioner.data.formats import FORMATS, RAW, PhotoFormat, format_by_name
from captioner.errors import DataError


@dataclass
class Skipped:
    """Counts of the files that a search of folders skipped."""

    photos: dict[PhotoFormat, Counter[str]] = field(default_factory=dict)
    """Photos that this installation cannot decode, counted by format and extension."""
    others: Counter[str] = field(default_factory=Counter)
    """Files that are not photos, counted by extension in lower case. The extension may be empty."""
    rest: Counter[tuple[str, str]] = field(default_factory=Counter)
    """All other skipped files and folders. They are counted by a noun and the words that follow the
    noun in messages, such as ``("link", " to folders")``. They are hidden photos, links to folders,
    camera RAW files next to their photo, and (if the search is not recursive) subfolders. Other
    hidden files are not counted."""
    unlisted: list[str] = field(default_factory=list)
    """One message for each subfolder that cannot be listed."""


def find_images(
    paths: Iterable[str | Path],
    *,
    recursive: bool = False,
    skipped: Skipped | None = None,
    formats: tuple[PhotoFormat, ...] = FORMATS,
) -> list[Path]:
    """Return a list of paths in which each folder is replaced by the photos in the folder.

    Files and missing paths are kept, so that `open_image` reports any problem with them. The photos
    of a folder are found by their extension (see `FORMATS`) and sorted naturally (``2.jpg`` before
    ``10.jpg``). Hidden files are skipped, and so is camera RAW next to a photo of the same name.

    Args:
        paths: Files and folders.
        recursive: Also search subfolders, after the folder's own photos. Links are not followed.
        skipped: Receives the counts of skipped files, and messages about subfolders that cannot be
            listed. If it is None, such a subfolder is an error.
        formats: The formats of the files to find in folders.

    Raises:
        DataError: A folder cannot be listed or has no photos that can be decoded, or a name is
            empty.
    """
    counted = Skipped() if skipped is None else skipped
    photos = []
    for given in [paths] if isinstance(paths, str) else paths:
        if given == "":  # as a path, it would be the current folder
            raise DataError("a file name is empty; pass the name of a file or a folder")
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
            subfolders = "" if recursive else ", and subfolders are not searched"
            raise DataError(
                f"the folder {path} contains no {noun} ({searched}){subfolders}; pass a folder "
                f"with {noun}"
            )
        photos += found
    return photos


def _search(
    folder: Path, recursive: bool, skipped: Skipped, formats: tuple[PhotoFormat, ...]
) -> list[Path]:
    """Return the photos in a folder in natural order, and count the files that are skipped."""
    found: list[Path] = []

    def report(error: OSError) -> None:
        """Stop if the folder itself cannot be listed. Otherwise, record the subfolder."""
        problem = _unlisted(error)
        if Path(error.filename) == folder:
            raise DataError(problem) from error
        skipped.unlisted.append(problem)  # the other subfolders can be read

    for parent, folders, names in os.walk(folder, onerror=report):
        hidden = [n for n in names if n.startswith(".") and format_by_name(n)]
        skipped.rest["hidden photo", ""] += len(hidden)
        visible = [name for name in folders if not name.startswith(".")]
        # Path.is_symlink raises an error for a path that is too long.
        links = [n for n in visible if os.path.islink(os.path.join(parent, n))]  # noqa: PTH114, PTH118
        if not recursive:
            skipped.rest["subfolder", " (add --recursive to search them)"] += len(visible)
            visible, links = [], []
        skipped.rest["link", " to folders"] += len(links)
        folders[:] = sorted(set(visible) - set(links), key=natural)
        files = [name for name in names if not name.startswith(".")]
        photos = {Path(name).stem for name in files if format_by_name(name)}
        files = [n for n in files if not (n.endswith(".txt") and n[:-4] in photos)]  # sidecars
        rest = without_twins(files) if RAW in formats else files
        twins = len(files) - len(rest)
        skipped.rest["camera RAW file", " next to a photo of the same name"] += twins
        kept = [name for name in rest if _is_photo(name, skipped, formats)]
        found += [Path(parent, name) for name in sorted(kept, key=natural)]
    return found


PICTURE_MARK = "_attention"
"""Text that ``captioner attend`` appends to a photo's name for the picture that it draws."""


def without_pictures(photos: Sequence[Path]) -> list[Path]:
    """Return photos without the pictures that ``captioner attend`` drew from some of them."""
    known = {(photo.parent, stem) for photo in photos for stem in (photo.stem, photo.name)}

    def is_picture(photo: Path) -> bool:
        """Return whether the file's name shows that it was drawn from a photo in the list."""
        source = photo.stem.removesuffix(PICTURE_MARK)
        sources = {(photo.parent, s) for s in (source, re.sub(r"_\d+$", "", source))}
        return source != photo.stem and bool(sources & known)

    return [photo for photo in photos if not is_picture(photo)]


def without_twins(files: Sequence[str]) -> list[str]:
    """Return paths or URLs without camera RAW files next to a photo of the same name.

    Cameras often store both files for one picture.
    """
    kinds = {name: format_by_name(name) for name in files}
    if RAW not in kinds.values():
        return [*files]
    others = [name for name, kind in kinds.items() if kind and kind is not RAW and kind.decodable]
    stems = {name.rpartition(".")[0] for name in others}
    return [n for n, kind in kinds.items() if kind is not RAW or n.rpartition(".")[0] not in stems]


def _unlisted(error: OSError) -> str:
    """Return a message about a folder that cannot be listed, from the error of the listing."""
    return (
        f"{error.filename}: the folder cannot be listed ({error.strerror}); check your permissions"
    )


def expand_pattern(pattern: str, skipped: Skipped | None = None) -> list[str]:
    """Return the files and folders that match a pattern of local names, in natural order.

    Patterns work as in a shell. ``**`` matches any number of subfolders. It does not follow links
    to folders, because they may lead in a circle.

    Args:
        pattern: The pattern.
        skipped: Receives messages about subfolders that cannot be listed. If it is None, such a
            subfolder is an error.

    Raises:
        DataError: A subfolder cannot be listed, and ``skipped`` is None.
    """
    counted = Skipped() if skipped is None else skipped
    found = sorted(dict.fromkeys(_expand(pattern, counted)), key=natural)
    if skipped is None and counted.unlisted:
        raise DataError(counted.unlisted[0])
    return found


def _expand(pattern: str, skipped: Skipped) -> list[str]:
    """Return the files and folders that match a pattern, in any order and possibly repeated."""
    parts = pattern.split("/")
    if "**" not in parts:
        return glob.glob(pattern)  # noqa: PTH207 (as the shell: a/../*.jpg)
    at = parts.index("**")
    rest, found = parts[at + 1 :] or ["*"], []

    def report(error: OSError) -> None:
        """Record a subfolder that cannot be listed."""
        skipped.unlisted.append(_unlisted(error))

    for top in _expand("/".join([*parts[:at], ""]), skipped) if at else [""]:
        for folder, subfolders, _ in os.walk(top or ".", onerror=report):
            subfolders[:] = [name for name in subfolders if not name.startswith(".")]
            inside = glob.escape(folder if top else folder[2:])
            found += _expand(os.path.join(inside, *rest), skipped)  # noqa: PTH118 (keeps the spelling)
    return found


def _is_photo(name: str, skipped: Skipped, formats: tuple[PhotoFormat, ...]) -> bool:
    """Return whether a file has one of the formats and can be decoded.

    All other files are counted in ``skipped``.
    """
    extension = Path(name).suffix.lower()
    kind = next((kind for kind in formats if extension in kind.extensions), None)
    if kind is None:
        # The text after a dot may also be the rest of a sentence.
        skipped.others[extension if re.fullmatch(r"\.\w{1,10}", extension) else ""] += 1
        return False
    if not kind.decodable:
        skipped.photos.setdefault(kind, Counter())[extension] += 1
        return False
    return True


def natural(name: str) -> str:
    """Return a key that sorts names naturally: numbers by value, and letters in any case.

    Names that are equal in this order are sorted by their exact spelling. The key is text, because
    a list of parts would take more memory for a million names. Each number is preceded by its
    length in three digits, so 9 sorts before 10. Three digits are enough, because names have at
    most 255 characters.
    """
    padded = re.sub("0*([0-9]+)", lambda n: f"{len(n[1]):03}{n[1]}", name.casefold())
    return f"{padded}\0{name}"


# --- names in tables ------------------------------------------------------------------------------

_BYTE = re.compile(r"\\udc([89a-f][0-9a-f])")
"""An invalid UTF-8 byte, in the form that `captioner.files.atomic_open` writes."""


class NamedFiles:
    """The files below a folder, found by their names in a table or an annotations file.

    A name in the table may use a different Unicode form than the name on disk, because Macs write
    accents as separate characters (NFD). White space around the name and the spelling of invalid
    UTF-8 bytes may also differ, and a spreadsheet may have encoded the name twice. Each folder is
    listed only once. This is faster than a system call per photo.
    """

    def __init__(self, folder: Path) -> None:
        """Set the folder. Its files are listed when the first name is looked up."""
        self.folder = folder
        self._listed: dict[str, dict[str, str]] = {}

    def find(self, name: str) -> Path | None:
        """Return the file or folder with a name, or None if it does not exist."""
        for spelled in dict.fromkeys((name, decoded_name(name), _encoded_once(name))):
            if listed := self._find(PurePath(spelled).parts):
                return listed
            # The name leads out of the folder, or it differs in case on a system that ignores case.
            if os.path.isfile(path := self.folder / spelled):  # noqa: PTH113 - False if too long
                return path
        return None

    def find_below(self, name: str) -> Path:
        """Return the file with a name from an untrusted source.

        Raises:
            DataError: The name leads outside the folder, directly or by a link, or the file does
                not exist. The message contains neither the name nor the folder.
        """
        if problem := unsafe_name(decoded_name(name)):
            raise DataError(f"the name {problem}")
        found = self.find(name)
        if found is None or not os.path.isfile(found):  # noqa: PTH113
            raise DataError("the file does not exist")
        # realpath, because resolve raises an error for links that lead in a circle.
        real, top = (Path(os.path.realpath(path)) for path in (found, self.folder))
        if not real.is_relative_to(top):
            raise DataError(
                "the file is a link to a file outside the folder, and such links are not followed"
            )
        return found

    def _find(self, parts: Sequence[str]) -> Path | None:
        """Return the path with these parts in the spelling on disk, or None if it is missing.

        ``parts`` are the names of the folders and of the file, below this object's folder.
        """
        found = ""
        for part in parts:
            names = self._names(found)
            if (actual := names.get(part) or names.get(_same(part))) is None:
                return None
            found = f"{found}/{actual}" if found else actual
        return self.folder / found if found else None

    def _names(self, folder: str) -> dict[str, str]:
        """Return the names in a folder by their exact and by their normalized spelling.

        Normalized spellings are equal for names that differ only in Unicode form or white space.
        """
        if folder not in self._listed:
            try:
                names = os.listdir(self.folder / folder)  # noqa: PTH208 (names, not paths)
            except (OSError, ValueError):
                names = []
            self._listed[folder] = {_same(name): name for name in names} | {n: n for n in names}
        return self._listed[folder]


def unsafe_name(name: str) -> str:
    """Return why a file name must not be looked up below a folder, or an empty text if it is safe.

    A name from an unknown source could lead outside the folder, such as ``../a.jpg``. The result
    ends a sentence that begins with the name: "is empty", "is absolute". Names that are unsafe on
    only one operating system are rejected on every system.
    """
    if not name.strip():
        return "is empty"
    if "\0" in name:
        return "contains a NUL character"
    if name.startswith("/") or re.match(r"[A-Za-z]:", name):
        return "is absolute"
    if "\\" in name:
        return "contains a backslash"
    return "leads outside the folder" if ".." in name.split("/") else ""


def decoded_name(name: str) -> str:
    """Restore the invalid bytes that `captioner.files.atomic_open` escapes in a file name."""
    return _BYTE.sub(lambda byte: chr(0xDC00 + int(byte[1], 16)), name)


def _encoded_once(name: str) -> str:
    """Return a name that was encoded in UTF-8 twice as it was before. Return other names unchanged.

    Excel reads a table in UTF-8 without a byte order mark as Windows-1252. If it then saves the
    table in UTF-8, ``Brücke.jpg`` becomes ``BrÃ¼cke.jpg``. The five bytes that are missing in
    Python's Windows-1252 become control characters, as in Latin-1.
    """
    if name.isascii():
        return name
    try:
        parts = (c.encode("latin-1" if "\x80" <= c < "\xa0" else "cp1252") for c in name)
        return b"".join(parts).decode()
    except UnicodeError:
        return name


def _same(name: str) -> str:
    """Return the normalized spelling of a name.

    It is the same for names that differ only in Unicode form, white space around them, or the
    spelling of invalid bytes.
    """
    return unicodedata.normalize("NFC", name).strip()
