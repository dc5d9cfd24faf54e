"""The destination that a command's options select for captions (see `data.caption_store`)."""

from __future__ import annotations

from pathlib import Path

from captioner.cli.console import warn
from captioner.cli.output_files import require_parent
from captioner.data.caption_store import SidecarOptions, Store, make_store


def choose_store(options: SidecarOptions, *, force: bool) -> Store | None:
    """Return the store (destination) for captions, or None if captions are only printed.

    A store writes captions into sidecar files, copies of the photos, or the photos themselves.

    Raises:
        ConfigError: Two options contradict each other, the program exiftool is not installed, or
            the parent folder of the ``--embed`` folder does not exist.
    """
    store = make_store(options, force=force, warn=warn)
    if options.embed is not None:
        require_parent(Path(options.embed))
    return store
