"""The photos of a command: arguments, folders, quoted patterns and lists of names."""

from __future__ import annotations

import glob
import os
import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from captioner.cli.outputs import warn
from captioner.data.folders import Skipped, find_images, natural
from captioner.data.formats import format_by_name
from captioner.errors import ConfigError, DataError, ImageError, counted
from captioner.option_fields import File, Shown

STDIN = Path("-")
"""The photo from standard input."""


@dataclass(frozen=True, kw_only=True)
class PhotoOptions:
    """The photos."""

    photos: Annotated[list[str], Shown(positional=True)] = field(default_factory=list)
    """Files, folders, quoted patterns such as 'photos/*.jpg' (** includes subfolders), or - for a
    photo from standard input."""
    from_file: File | None = None
    """File with the names of photos and folders, one per line or separated by NUL; - for standard
    input. Relative names start at the current folder."""
    recursive: bool = False
    """Search subfolders too."""


@dataclass
class Photos:
    """The photos that were found, and what was not."""

    paths: list[Path] = field(default_factory=list)
    """In the order given; ``STDIN`` for standard input. Named files may not exist."""
    subfolders: dict[Path, Path] = field(default_factory=dict)
    """For photos of folders: the subfolder, relative to the folder that was given."""
    problems: int = 0
    """Arguments and listed names without a photo; a warning has been printed for each."""
    skipped: Skipped = field(default_factory=Skipped)
    pictures: int = 0
    """Pictures that ``captioner attend`` saved beside these photos."""

    @property
    def failures(self) -> int:
        """Number of inputs that cannot be captioned: problems and photos of unsupported formats."""
        return self.problems + self.skipped.photos.total()

    def report_skipped(self) -> None:
        """Print what else the folders have: a line per unsupported format, one for the rest."""
        by_format: dict[Any, Counter[str]] = {}
        for (kind, extension), count in self.skipped.photos.items():
            by_format.setdefault(kind, Counter())[extension] += count
        for kind, extensions in by_format.items():
            photos = counted(extensions.total(), "photo")
            warn(f"skipped {photos} ({_by_extension(extensions)}): {kind.problem}")
        if rest := list(self._others()):
            warn(f"skipped {'; '.join(rest)}")

    def _others(self) -> Iterator[str]:
        skipped = self.skipped
        if count := skipped.others.total():
            kind = "file that is not a photo" if count == 1 else "files that are not photos"
            yield f"{count} {kind} ({_by_extension(skipped.others)})"
        if self.pictures:
            yield f"{counted(self.pictures, 'picture')} made by captioner attend"
        if skipped.hidden:
            yield counted(skipped.hidden, "hidden photo")
        if skipped.subfolders:
            yield f"{counted(skipped.subfolders, 'subfolder')} (give --recursive to search them)"
        if skipped.links:
            yield f"{counted(skipped.links, 'link')} to folders"


def find_photos(options: PhotoOptions) -> Photos:
    """Find the photos of a command; print a warning for each problem.

    Raises:
        ConfigError: There are no arguments, standard input is given twice, or the list of names
            cannot be read.
    """
    given = options.photos
    if not given and options.from_file is None:
        raise ConfigError("no photos; give files, folders, - or --from-file")
    if given.count("-") > 1:
        raise ConfigError("standard input (-) is given more than once; give it once")
    if "-" in given and options.from_file == "-":
        raise ConfigError(
            "--from-file - reads names from standard input, so it cannot be a photo too; leave "
            "out one of them"
        )
    listed = [] if options.from_file is None else read_names(options.from_file)
    photos = Photos()
    for argument in given:
        try:
            _check_no_list(argument)
            _add(photos, _expand(argument), options.recursive)
        except DataError as error:  # e.g. an empty folder: continue with the others
            photos.problems += 1
            warn(str(error))
    for position, name in listed:
        try:
            if name == "-":
                raise DataError("-: standard input; give it as an argument")
            _check_exists(name)
            _add(photos, [name], options.recursive)
        except DataError as error:
            photos.problems += 1
            warn(f"{position}: {error}")
    _leave_out_pictures(photos)
    return photos


def missing(photo: Path) -> bool:
    """Whether a file does not exist; warns now instead of after a model was loaded."""
    if photo == STDIN or photo.exists():
        return False
    try:
        _check_exists(str(photo))
    except ImageError as error:
        warn(str(error))
    return True


def _check_exists(name: str) -> None:
    """Raise the error of `open_image` for a missing file or a URL."""
    from captioner.data.images import open_image

    if not Path(name).exists():
        open_image(name)


def _check_no_list(argument: str) -> None:
    """Refuse a list of photos that was given as a photo."""
    path = Path(argument)
    if path.suffix.lower() not in (".txt", ".lst") or not path.is_file():
        return
    try:
        path.read_text("utf-8")
    except (OSError, ValueError):  # unreadable, or a photo with a wrong extension
        return
    raise DataError(f"{path}: text, not a photo; if it lists photos, give --from-file {path}")


def _expand(argument: str) -> list[str]:
    """Expand a pattern that the shell left alone, as it would: to files, hidden ones excluded."""
    if argument == "-" or os.path.lexists(argument):
        return [argument]
    if "://" in argument:
        _check_exists(argument)
    if not glob.has_magic(argument):
        return [argument]  # `missing` reports it
    matches = glob.glob(argument, recursive=True)  # noqa: PTH207 (as the shell: a/../*.jpg)
    names = [name for name in matches if not Path(name).is_dir()]
    if not names:
        raise DataError(f"{argument}: no file matches this pattern; check it and the folder")
    return sorted(names, key=natural)


def _add(photos: Photos, names: list[str], recursive: bool) -> None:
    for name in names:
        for path in find_images([name], recursive=recursive, skipped=photos.skipped):
            photos.paths.append(path)
            if path != Path(name):
                photos.subfolders[path] = path.parent.relative_to(name)


# --- lists of names ------------------------------------------------------------------------------


def read_names(source: str) -> list[tuple[str, str]]:
    """Return every name in a list, and its position for messages (``list.txt:3``)."""
    if format_by_name(source) is not None:
        raise ConfigError(
            f"--from-file is {source}, a photo; give a file with names of photos, or give the "
            "photo without --from-file"
        )
    if source == "-":
        called, data = "standard input", sys.stdin.buffer.read()
    else:
        called = source
        try:
            data = Path(source).read_bytes()
        except OSError as error:
            raise ConfigError(
                f"--from-file is {source}, which cannot be read ({error.strerror}); give a file "
                "with names of photos"
            ) from error
    names = [(f"{called}:{number}", name) for number, name in enumerate(_split(data), 1) if name]
    if not names:
        raise ConfigError(f"--from-file: {called} has no names; give one per line")
    return names


def _split(data: bytes) -> list[str]:
    """Split at NUL if there is one, otherwise into lines; Windows' line ends and UTF-16 too."""
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        data = data.decode("utf-16", errors="replace").encode()
    data = data.removeprefix(b"\xef\xbb\xbf")
    if b"\0" in data:
        return [os.fsdecode(name) for name in data.split(b"\0")]
    return [os.fsdecode(name.removesuffix(b"\r")) for name in data.split(b"\n")]


# --- pictures of earlier runs --------------------------------------------------------------------

PICTURE_MARK = "_attention"
"""``captioner attend`` appends it to a photo's name."""


def _leave_out_pictures(photos: Photos) -> None:
    """Leave out what ``captioner attend`` saved beside a photo: it is not a photo."""
    pictures = [path for path in photos.paths if path.stem.endswith(PICTURE_MARK)]
    if not pictures:
        return
    known = {(path.parent, name) for path in photos.paths for name in (path.stem, path.name)}
    made = {
        path
        for path in pictures
        if (path.parent, re.sub(rf"(_\d+)?{PICTURE_MARK}$", "", path.stem)) in known
        or (path.parent, path.stem.removesuffix(PICTURE_MARK)) in known
    }
    photos.pictures = sum(path in made for path in photos.paths)
    photos.paths = [path for path in photos.paths if path not in made]


# --- counts --------------------------------------------------------------------------------------

_LISTED = 6
"""Most extensions in a message."""


def _by_extension(counts: Counter[str]) -> str:
    """``2 .txt, 1 .mp4``: the most frequent extensions first."""
    ordered = sorted(counts.items(), key=lambda one: (-one[1], one[0]))
    parts = [f"{count} {extension or 'without extension'}" for extension, count in ordered]
    rest = sum(count for _, count in ordered[_LISTED:])
    return ", ".join(parts[:_LISTED] + ([f"{rest} others"] if rest else []))
