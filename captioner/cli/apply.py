"""``captioner apply``: write captions of a file, such as corrected ones, into their photos."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from captioner.cli.arguments import command, refuse
from captioner.cli.console import warn
from captioner.cli.main import FAILED, OK
from captioner.cli.sidecars import (
    ALSO_REMOVES,
    SidecarOptions,
    choose_store,
    own_places,
    problem_of,
    remove_own,
)
from captioner.data.dataset import EMPTY
from captioner.data.folders import NamedFiles, natural
from captioner.data.formats import format_by_name
from captioner.data.images import image_size
from captioner.data.importers import find_source, import_captions, photo_folder
from captioner.data.options import ColumnOptions
from captioner.data.photo_metadata import require_exiftool
from captioner.errors import ConfigError, DataError
from captioner.messages import counted
from captioner.schema import Folder, Shown, changed, marked


@dataclass(frozen=True, kw_only=True)
class ApplyOptions(ColumnOptions, SidecarOptions):
    """Write captions from a file into photos or sidecars, or remove captions by captioner.

    The file may be a corrected captions.csv of captioner caption or of the web page.
    """

    captions: Annotated[list[str], Shown("CAPTIONS.csv", positional=True), ALSO_REMOVES]
    """A CSV or JSON Lines file with the columns image and caption; of several captions of a photo
    the first is written. With --remove: photos, and folders with their subfolders."""
    images: Folder | None = None
    """Folder that the names of the photos are relative to (default: that of the file, or the
    current one). Names that lead out of it are refused."""
    force: bool = False
    """Replace the captions that photos have."""
    remove: Annotated[bool, ALSO_REMOVES] = False
    """Remove the captions and keywords that captioner wrote, from photos and XMP sidecars. Texts
    that people wrote or changed are kept."""


_USAGE = (
    "CAPTIONS.csv --sidecar KIND|--embed FOLDER|--in-place [options] | --remove PHOTO|FOLDER..."
)


@command("apply", _USAGE, ApplyOptions)
def apply(options: ApplyOptions, _: Any) -> int:
    """Write every caption whose photo exists; report the others."""
    if options.remove:
        return _remove(options)
    if len(options.captions) > 1:
        raise ConfigError(f"{len(options.captions)} files of captions; give one")
    store, table = choose_store(options, force=options.force), options.captions[0]
    if store is None:
        raise ConfigError("nowhere to write to; give --sidecar txt|xmp, --embed or --in-place")
    captions = _read(table, options)
    folder = photo_folder(find_source(table), options.images, options)
    photos, problems = _find(captions, folder)
    if not photos:
        advice = "give --images, the folder that their names are relative to"
        raise DataError(f"{table}: none of its photos can be used ({problems[0]}); {advice}")
    for problem in problems:
        warn(f"{table}: {problem}")
    # A person may have chosen the texts, so they are not marked as captioner's.
    store.machine, failed = False, len(problems)
    store.subfolders = {photo: photo.relative_to(folder).parent for photo in photos}
    found = store.write_all(
        photos, lambda needed: ({"captions": [{"text": photos[photo]}]} for photo in needed)
    )
    for one in found:
        if "error" in one:
            failed += 1
            warn(one["error"])
    return FAILED if failed else OK


def _find(captions: Mapping[str, str], folder: Path) -> tuple[dict[Path, str], list[str]]:
    """Return the captions by photo of a folder, and a message for each name without a photo.

    The table may be a stranger's: only images below the folder are photos.
    """
    files, photos, problems = NamedFiles(folder), dict[Path, str](), []
    for name, text in captions.items():
        try:
            photo = files.find_below(_inside(name, folder))
            image_size(photo)
        except DataError as error:
            reason = str(error)
            own = reason.startswith(str(folder))
            problems.append(reason if own else f"{name!r} {reason}; give photos below {folder}")
            continue
        photos.setdefault(photo, text)
    return photos, problems


def _inside(name: str, folder: Path) -> str:
    """Return a name without the folder that it begins with, or unchanged."""
    if name.startswith(("/", "..")):
        for top in (str(folder), os.path.abspath(folder)):  # noqa: PTH100 - keeps links
            if name.startswith(f"{top.rstrip('/')}/"):
                return name[len(top.rstrip("/")) + 1 :]
    return name


def _remove(options: ApplyOptions) -> int:
    """Remove captioner's captions, report problems, and return the exit code."""
    for_writing = {*changed(options)} - {*marked(ApplyOptions, ALSO_REMOVES)}
    refuse(options, for_writing, "cannot be combined with --remove; leave it out")
    if options.exiftool:
        require_exiftool()
    removed = kept = failed = 0
    for path in (path for photo in _photos(options.captions) for path in own_places(photo)):
        try:
            found = remove_own(path, exiftool=options.exiftool)
        except (DataError, OSError) as error:
            warn(problem_of(path, error, path))
            failed += 1
            continue
        removed += found.own
        kept += bool(found.text) and not found.own
    others = f"; {counted(kept, 'text')} of people kept" if kept else ""
    warn(f"{counted(removed, 'caption')} removed{others}")
    return FAILED if failed else OK


def _photos(names: Iterable[str]) -> Iterator[Path]:
    """Yield photos in the order given, and those of folders and their subfolders."""
    for name in names:
        if not Path(name).is_dir():
            yield Path(name)
        for parent, folders, files in os.walk(name):
            folders.sort(key=natural)
            photos = (
                Path(parent, one) for one in sorted(files, key=natural) if format_by_name(one)
            )
            yield from (photo for photo in photos if photo.is_file())


def _read(table: str, options: ApplyOptions) -> dict[str, str]:
    """The first caption of each photo; those without one are left out and counted."""
    photos = import_captions(table, columns=options)
    captions = {str(p.path): p.captions[0].strip() for p in photos if p.captions}
    found = {name: text for name, text in captions.items() if text.lower() not in EMPTY}
    if left := len(photos) - len(found):
        warn(f"{table}: left out {counted(left, 'photo')} without a caption")
    if not found:
        raise DataError(f"{table} has no captions; fill in its caption column")
    return found
