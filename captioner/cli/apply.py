"""``captioner apply``: write captions of a file, such as corrected ones, into their photos."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from captioner.cli.arguments import command
from captioner.cli.main import FAILED, OK
from captioner.cli.outputs import warn
from captioner.cli.sidecars import SidecarOptions, choose_store
from captioner.data.dataset import EMPTY
from captioner.data.importers import ColumnOptions, find_source, import_captions, photo_folder
from captioner.errors import ConfigError, DataError, counted
from captioner.option_fields import Folder, Shown


@dataclass(frozen=True, kw_only=True)
class ApplyOptions(ColumnOptions, SidecarOptions):
    """Write captions of a file beside their photos or into them.

    The file may be a corrected captions.csv of captioner caption or of the web page.
    """

    captions: Annotated[str, Shown("CAPTIONS.csv", positional=True)]
    """A CSV or JSON Lines file with the columns image and caption; of several captions of a photo
    the first is written."""
    images: Folder | None = None
    """Folder that the names of the photos are relative to (default: that of the file, or the
    current one)."""
    force: bool = False
    """Replace the captions that photos have."""


@command("apply", "CAPTIONS.csv --sidecar KIND|--embed FOLDER|--in-place [options]", ApplyOptions)
def apply(options: ApplyOptions, _: Any) -> int:
    """Write every caption whose photo is there; report the others."""
    store = choose_store(options, force=options.force)
    if store is None:
        raise ConfigError("nowhere to write to; give --sidecar txt|xmp, --embed or --in-place")
    captions = _read(options)
    images = photo_folder(find_source(options.captions), options.images, options)
    photos = {images / name: name for name in captions}
    missing = [photo for photo in photos if not photo.is_file()]
    if len(missing) == len(photos):
        raise DataError(
            f"{options.captions}: none of its photos exists (first: {missing[0]}); give --images, "
            "the folder that their names are relative to"
        )
    for photo in missing:
        warn(f"{options.captions}: {photos.pop(photo)!r} is not in the folder {images}")
    names = {photo: Path(name) for photo, name in photos.items()}
    inside = {photo: n.parent for photo, n in names.items() if not {"/", ".."} & {*n.parts}}
    store.subfolders, failed = inside, len(missing)
    found = store.write_all(
        photos, lambda needed: ({"captions": [{"text": captions[photos[p]]}]} for p in needed)
    )
    for one in found:
        if "error" in one:
            failed += 1
            warn(one["error"])
    return FAILED if failed else OK


def _read(options: ApplyOptions) -> dict[str, str]:
    """The first caption of each photo; those without one are left out and counted."""
    photos = import_captions(options.captions, columns=options)
    captions = {p.file_name: p.captions[0].strip() for p in photos if p.captions}
    found = {name: text for name, text in captions.items() if text.lower() not in EMPTY}
    if left := len(photos) - len(found):
        warn(f"{options.captions}: left out {counted(left, 'photo')} without a caption")
    if not found:
        raise DataError(f"{options.captions} has no captions; fill in its caption column")
    return found
