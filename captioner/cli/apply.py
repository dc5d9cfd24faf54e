"""``captioner apply``: write captions from a file, such as corrected captions, into photos."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from captioner.cli.arguments import command
from captioner.cli.console import warn
from captioner.cli.main import OK, SOME_FAILED
from captioner.cli.sidecars import choose_store
from captioner.data.caption_store import ALSO_REMOVES, SidecarOptions
from captioner.data.options import ColumnOptions
from captioner.data.write_captions import apply_table, remove_captions
from captioner.errors import ConfigError
from captioner.messages import counted
from captioner.schema import Folder, Shown, changed, marked, refuse


@dataclass(frozen=True, kw_only=True)
class ApplyOptions(ColumnOptions, SidecarOptions):
    """Write captions from a file into photos or sidecars, or remove captions by captioner.

    The file may be a corrected captions.csv of captioner caption or of the web page.
    """

    captions: Annotated[list[str], Shown("CAPTIONS.csv", positional=True), ALSO_REMOVES]
    """Read captions from this CSV or JSON Lines file, which has the columns image and caption. If a
    photo has several captions, the first is written. With --remove, pass photos or folders instead.
    Subfolders are included."""
    images: Folder | None = None
    """Look for the photos in this folder (default: the folder of the file, or the current folder).
    Photo names that lead outside this folder are rejected."""
    force: bool = False
    """Replace existing captions."""
    remove: Annotated[bool, ALSO_REMOVES] = False
    """Remove the captions and keywords that captioner wrote from photos and XMP sidecars. Texts
    that people wrote or changed are kept."""


_USAGE = (
    "CAPTIONS.csv --sidecar KIND|--embed FOLDER|--in-place [options] | --remove PHOTO|FOLDER..."
)


@command("apply", _USAGE, ApplyOptions)
def apply(options: ApplyOptions, _: Any) -> int:
    """Write the captions of photos that exist, report failures and return the exit code."""
    if options.remove:
        return _remove(options)
    if len(options.captions) > 1:
        raise ConfigError(f"{len(options.captions)} caption files were passed; pass only one")
    store = choose_store(options, force=options.force)
    if store is None:
        raise ConfigError(
            "no destination was chosen for the captions; add --sidecar txt|xmp, --embed FOLDER or "
            "--in-place"
        )
    failed = 0
    for problem in apply_table(store, options.captions[0], options.images, options):
        failed += 1
        warn(problem)
    return SOME_FAILED if failed else OK


def _remove(options: ApplyOptions) -> int:
    """Remove captioner's captions, report failures and return the exit code."""
    for_writing = {*changed(options)} - {*marked(ApplyOptions, ALSO_REMOVES)}
    refuse(options, for_writing, "cannot be combined with --remove; use only one of them")
    removed = remove_captions(options.captions, exiftool=options.exiftool, report=warn)
    others = f" and kept {counted(removed.kept, 'text')} by people" if removed.kept else ""
    warn(f"removed {counted(removed.captions, 'caption')}{others}")
    return SOME_FAILED if removed.failed else OK
