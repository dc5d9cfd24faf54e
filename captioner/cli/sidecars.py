"""Captions kept with their photo: ``--sidecar txt|xmp``, ``--embed FOLDER`` and ``--in-place``.

Nothing that captioner or a person wrote is replaced unless ``--force`` was given: a photo that
already has a caption is an error, or is skipped with ``--skip-existing``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from captioner.cli.arguments import flag
from captioner.cli.outputs import require_parent, warn
from captioner.data.metadata.embedding import (
    HEAD,
    can_embed,
    embed_description,
    embedded_description,
)
from captioner.data.metadata.xmp import read_description, set_description
from captioner.errors import ConfigError, DataError, first_of
from captioner.files import atomic_write
from captioner.option_fields import Folder

if TYPE_CHECKING:
    from captioner.cli.caption import CaptionOptions


@dataclass(frozen=True, kw_only=True)
class SidecarOptions:
    """Sidecar files and metadata."""

    sidecar: Literal["txt", "xmp"] | None = None
    """Write each caption beside its photo: photo.txt, or the description in photo.xmp."""
    embed: Folder | None = None
    """Copy the photos (JPEG, PNG) to this folder with the caption as their description (XMP,
    IPTC)."""
    in_place: bool = False
    """Embed the description in the photos themselves."""
    skip_existing: bool = False
    """Skip photos that already have such a caption."""


class Store(Protocol):
    """Where captions go."""

    def target(self, photo: Path) -> Path:
        """The file that gets the caption."""

    def has_caption(self, photo: Path) -> bool:
        """Whether something would be replaced.

        Raises:
            DataError: This photo cannot be written to.
        """

    def write(self, photo: Path, text: str) -> None:
        """Write a caption.

        Raises:
            DataError: This photo cannot be written to.
            OSError: The file cannot be written.
        """


class _TextSidecars:
    """``photo.txt`` beside ``photo.jpg``: the caption on one line."""

    def target(self, photo: Path) -> Path:
        return photo.with_suffix(".txt")

    def has_caption(self, photo: Path) -> bool:
        return self.target(photo).exists()

    def write(self, photo: Path, text: str) -> None:
        atomic_write(self.target(photo), f"{text}\n")


class _XmpSidecars:
    """``photo.xmp``, or ``photo.jpg.xmp`` if the photo already has that one.

    Lightroom, Bridge and Capture One use the first name, darktable and digiKam the second.
    """

    def target(self, photo: Path) -> Path:
        long = photo.with_name(f"{photo.name}.xmp")
        return long if long.exists() else photo.with_suffix(".xmp")

    def has_caption(self, photo: Path) -> bool:
        target = self.target(photo)
        return target.exists() and bool(_named(target, read_description, target.read_bytes()))

    def write(self, photo: Path, text: str) -> None:
        target = self.target(photo)
        old = target.read_bytes() if target.exists() else None
        atomic_write(target, _named(target, set_description, old, text))


class _EmbeddedCopies:
    """Copies of the photos in a folder, with the caption as their description."""

    def __init__(self, folder: Path) -> None:
        require_parent(folder)
        if folder.exists() and not folder.is_dir():
            raise ConfigError(f"--embed {folder} is a file; give a folder for the copies")
        self.folder = folder

    def target(self, photo: Path) -> Path:
        return self.folder / photo.name

    def has_caption(self, photo: Path) -> bool:
        if self.target(photo).exists() and self.target(photo).samefile(photo):
            raise ConfigError(
                f"--embed {self.folder} is the photos' own folder; give another folder, or "
                "--in-place to change the originals"
            )
        return _described(photo) or self.target(photo).exists()

    def write(self, photo: Path, text: str) -> None:
        self.folder.mkdir(exist_ok=True)
        new = _named(photo, embed_description, photo.read_bytes(), text)
        atomic_write(self.target(photo), new)


class _EmbeddedOriginals:
    """The photos themselves, with the caption as their description."""

    def target(self, photo: Path) -> Path:
        return photo

    def has_caption(self, photo: Path) -> bool:
        return _described(photo)

    def write(self, photo: Path, text: str) -> None:
        atomic_write(photo, _named(photo, embed_description, photo.read_bytes(), text))


def _described(photo: Path) -> bool:
    """Whether a photo has a description; refuses formats that cannot have one here."""
    with photo.open("rb") as file:
        if not can_embed(file.read(HEAD)):
            raise DataError(
                f"{photo}: descriptions are embedded in JPEG and PNG only; use --sidecar xmp"
            )
        file.seek(0)
        return bool(_named(photo, embedded_description, file.read()))


def _named(path: Path, function: Callable[..., Any], *values: Any) -> Any:
    """Call a function; its errors name the file."""
    try:
        return function(*values)
    except DataError as error:
        raise DataError(f"{path}: {error}") from error


def choose_store(options: CaptionOptions) -> Store | None:
    """Return where captions are kept, or None if they are only printed or written to one file.

    Raises:
        ConfigError: The options contradict each other.
    """
    given = [name for name in ("sidecar", "embed", "in_place") if getattr(options, name)]
    if not given:
        if options.skip_existing:
            raise ConfigError(
                "--skip-existing is for --sidecar, --embed and --in-place; use --resume to "
                "continue with an output file"
            )
        return None
    given += [name for name in ("output", "resume", "annotations") if getattr(options, name)]
    if len(given) > 1:
        one, other = map(flag, given[:2])
        hint = "; use --skip-existing to continue" if "resume" in given else ""
        raise ConfigError(f"{one} and {other} cannot be combined; give one of them{hint}")
    if "-" in options.photos:
        raise ConfigError(f"{flag(given[0])} needs files; standard input (-) has no name")
    if options.skip_existing and options.force:
        raise ConfigError("--skip-existing and --force contradict each other; give one of them")
    if options.sidecar:
        return _TextSidecars() if options.sidecar == "txt" else _XmpSidecars()
    return _EmbeddedCopies(Path(options.embed)) if options.embed else _EmbeddedOriginals()


def check_photos(
    store: Store, photos: Sequence[Path], options: CaptionOptions
) -> tuple[list[Path], set[Path]]:
    """Check every photo before a model is loaded; warn about those that cannot be written to.

    Returns:
        The photos that can be written to, and those of them that have a caption to keep.

    Raises:
        ConfigError: Two photos share a file, or one has a caption and neither ``--force`` nor
            ``--skip-existing`` was given.
    """
    usable: list[Path] = []
    existing: list[Path] = []
    owners: dict[Path, Path] = {}
    for photo in photos:
        try:
            has_caption = store.has_caption(photo)
        except (DataError, OSError) as error:
            warn(str(error) if isinstance(error, DataError) else f"{photo}: {error.strerror}")
            continue
        other = owners.setdefault(store.target(photo), photo)
        if other is not photo:
            raise ConfigError(
                f"{other} and {photo} would both get {store.target(photo)}; caption them "
                "separately, or rename one"
            )
        usable.append(photo)
        if has_caption:
            existing.append(photo)
    if options.force:
        return usable, set()
    if existing and not options.skip_existing:
        raise ConfigError(
            f"{first_of(existing)} already has a caption in {store.target(existing[0])}; give "
            "--skip-existing to caption only the others, or --force to replace it"
        )
    return usable, set(existing)
