"""The photos of a command, found from files, folders, quoted patterns and lists of names."""

from __future__ import annotations

import glob
import os
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from captioner.cli.console import warn
from captioner.data.folders import Skipped, expand_pattern, find_images, without_pictures
from captioner.data.formats import FORMATS, VIDEO, PhotoFormat, format_by_name
from captioner.data.images import open_image
from captioner.errors import ConfigError, DataError
from captioner.files import read_input
from captioner.messages import counted
from captioner.schema import File, Shown

STDIN = Path("-")
"""The photo from standard input."""

OWN = (".xmp", ".resume")
"""Extensions of files that captioner writes next to photos or captions. These files do not count as
skipped."""


@dataclass(frozen=True, kw_only=True)
class PhotoOptions:
    """Photos to process."""

    photos: Annotated[list[str], Shown(positional=True)] = field(default_factory=list)
    """Pass files, folders, quoted patterns such as 'photos/*.jpg' (** includes subfolders), or -
    for a photo from standard input."""
    from_file: File | None = None
    """Read the names of photos and folders from this file, one per line or separated by NUL bytes.
    Relative names start from the current folder. -: read the names from standard input."""
    recursive: bool = False
    """Also search the subfolders of the given folders."""


@dataclass
class Photos:
    """The photos that were found, and the inputs that were skipped or not found."""

    paths: list[Path] = field(default_factory=list)
    """The photos in the order of the arguments, without duplicates. ``STDIN`` means standard input.
    """
    subfolders: dict[Path, Path] = field(default_factory=dict)
    """The subfolder of each photo that was found in a folder, relative to the folder argument."""
    problems: int = 0
    """Number of arguments and listed names that lead to no photo. A warning was printed for each of
    them."""
    skipped: Skipped = field(default_factory=Skipped)
    formats: tuple[PhotoFormat, ...] = FORMATS
    """Formats that folders are searched for."""
    copies: Path | None = None
    """The folder for copies of the photos (``--embed``), or None. It is left out when a folder
    around it is searched."""

    @property
    def failures(self) -> int:
        """Number of inputs that cannot be captioned, including photos in unsupported formats."""
        photos = sum(extensions.total() for extensions in self.skipped.photos.values())
        return self.problems + len(self.skipped.unlisted) + photos

    def report_skipped(self) -> None:
        """Print which files were skipped: one line per unsupported format, one for all others."""
        skipped = self.skipped
        for problem in skipped.unlisted:
            warn(problem)
        for kind, extensions in skipped.photos.items():
            photos = counted(extensions.total(), "photo")
            warn(f"skipped {photos} ({_by_extension(extensions)}): {kind.problem}")
        for extension in OWN:
            skipped.others.pop(extension, None)
        videos = 0
        if self.formats == FORMATS:
            videos = sum(skipped.others.pop(extension, 0) for extension in VIDEO.extensions)
        others = skipped.others.total()
        noun = "photo" if self.formats == FORMATS else "video"
        files = f"file that is not a {noun}" if others == 1 else f"files that are not {noun}s"
        rest = {
            f"{others} {files} ({_by_extension(skipped.others)})": others,
            f"{counted(videos, 'video')} (for videos, run captioner caption --every 5s)": videos,
            **{f"{counted(n, noun)}{more}": n for (noun, more), n in skipped.rest.items()},
        }  # fmt: skip
        if any(rest.values()):
            warn(f"skipped {'; '.join(text for text, count in rest.items() if count)}")

    def add(self, name: str, recursive: bool) -> None:
        """Add a file, or the photos in a folder except the pictures that captioner drew.

        Raises:
            DataError: The file does not exist, or a folder has no photos.
        """
        path = Path(name)
        kinds: Any = {"skipped": self.skipped, "formats": self.formats}
        found = find_images([name], recursive=recursive, **kinds)
        if not path.is_dir():
            if name != "-" and not path.exists():
                open_image(name)  # raises why
            self.paths += found
            return
        photos = without_pictures(found)
        self.skipped.rest["picture", " made by captioner attend"] += len(found) - len(photos)
        if self.copies and (inside := _place_in(path, self.copies)):
            originals = [photo for photo in photos if not photo.is_relative_to(inside)]
            copied = len(photos) - len(originals)
            self.skipped.rest["photo", f" in the folder of --embed, {self.copies}"] += copied
            photos = originals
        self.paths += photos
        self.subfolders |= {photo: photo.parent.relative_to(path) for photo in photos}


def find_photos(
    names: Sequence[str],
    from_file: str | None,
    *,
    recursive: bool,
    formats: tuple[PhotoFormat, ...] = FORMATS,
    copies: Path | None = None,
) -> Photos:
    """Find the photos named by arguments and by a list, and warn about missing photos.

    Args:
        names: Files, folders, patterns, or - for standard input.
        from_file: File that lists further photos and folders.
        recursive: Search subfolders too.
        formats: Formats that folders are searched for.
        copies: Folder to leave out when a folder around it is searched.
    """
    if not names and from_file is None:
        raise ConfigError(
            "no photos were passed; pass files or folders, - for standard input, or "
            "--from-file FILE"
        )
    photos = Photos(formats=formats, copies=copies)
    listed = [] if from_file is None else read_names(from_file)
    for position, name in [*(("", name) for name in names), *listed]:
        try:
            for one in [name] if position else _expand(name, photos.skipped):
                photos.add(f"./{one}" if position and one == "-" else one, recursive)
        except DataError as error:  # e.g. an empty folder: continue with the others
            photos.problems += 1
            start = " (names in a list start from the current folder)"
            relative = position and not Path(name).is_absolute() and not os.path.lexists(name)
            warn(f"{position}{error}{start * bool(relative)}")
    photos.paths = list(dict.fromkeys(photos.paths))
    return photos


def _place_in(folder: Path, inner: Path) -> Path | None:
    """Return the path of ``inner`` as a path that begins with ``folder``, or None if it is outside.

    A folder is not inside itself.
    """
    top, real = (Path(os.path.realpath(path)) for path in (folder, inner))
    return folder / real.relative_to(top) if top in real.parents else None


def _expand(argument: str, skipped: Skipped) -> list[str]:
    """Expand a quoted pattern to the matching files, without hidden files."""
    if Path(argument).suffix.lower() == ".txt" and Path(argument).is_file():
        raise DataError(
            f"{argument} is a text file, not a photo; if it lists photos, use --from-file "
            f"{argument}"
        )
    if "://" in argument or os.path.lexists(argument) or not glob.has_magic(argument):
        return [argument]
    names = [name for name in expand_pattern(argument, skipped) if not Path(name).is_dir()]
    if not names:
        raise DataError(f"{argument} matches no files; check the pattern and the folder")
    return names


def read_names(source: str) -> list[tuple[str, str]]:
    """Return the names in a list, each with its position in the list, such as ``list.txt:3: ``.

    If the list contains NUL, names are separated by NUL, and otherwise by line ends.
    """
    if format_by_name(source) is not None:
        raise ConfigError(f"--from-file {source} is a photo, not a list; leave out --from-file")
    data = sys.stdin.buffer.read() if source == "-" else read_input(source, "a list of photos")
    called = "standard input" if source == "-" else source
    data = data.removeprefix(b"\xef\xbb\xbf")
    lines = data.split(b"\0") if b"\0" in data else data.splitlines()
    names = [(f"{called}:{n}: ", os.fsdecode(line)) for n, line in enumerate(lines, 1) if line]
    if not names:
        raise ConfigError(f"--from-file {called} contains no names; write one name per line")
    return names


def _by_extension(counts: Counter[str]) -> str:
    """Return the six most frequent extensions with their counts, such as ``2 .txt, 1 .mp4``."""
    ordered = sorted(counts.items(), key=lambda one: (-one[1], one[0]))
    parts = [f"{count} {extension or 'without extension'}" for extension, count in ordered]
    return ", ".join([*parts[:6], *["..."] * (len(parts) > 6)])
