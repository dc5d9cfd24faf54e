"""Captions kept with their photo: ``--sidecar txt|xmp``, ``--embed FOLDER`` and ``--in-place``.

Nothing that captioner or a person wrote is replaced on its own: a photo that already has a caption
is an error, unless ``--existing`` says what to do with it. Captions that captioner wrote into XMP
are marked, so that they can be replaced or removed without touching texts by people.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from captioner.cli.arguments import flags_given, refuse
from captioner.cli.console import warn
from captioner.cli.output_files import require_parent
from captioner.cli.rows import Row
from captioner.data.images import open_image
from captioner.data.metadata import (
    Found,
    Mark,
    find_in_sidecar,
    remove_from_sidecar,
    set_description,
)
from captioner.data.photo_metadata import (
    NotEditableError,
    find_in_photo,
    require_exiftool,
    with_description,
    without_own_description,
)
from captioner.errors import ConfigError, DataError
from captioner.files import atomic_write
from captioner.messages import counted, first_of
from captioner.schema import Folder, Shown, marked

_INVALID = re.compile("[^\t\n\r -\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""Characters that XML cannot have, such as a table of a stranger may have."""

PLACE = "place of captions"
"""Mark of an option that selects where captions are written."""

ALSO_REMOVES = "also removes"
"""Mark of an option that may be given with --remove of captioner apply."""


@dataclass(frozen=True, kw_only=True)
class SidecarOptions:
    """Sidecar files and metadata."""

    sidecar: Annotated[Literal["txt", "xmp"] | None, PLACE] = None
    """Write each caption beside its photo: photo.txt, or the description in photo.xmp."""
    embed: Annotated[Folder | None, PLACE] = None
    """Copy the photos (JPEG, PNG, WebP, TIFF) to this folder, and to the same subfolders of it,
    with the caption as their description (XMP, IPTC)."""
    in_place: Annotated[bool, PLACE] = False
    """Embed the description in the photos themselves."""
    exiftool: Annotated[bool, ALSO_REMOVES] = False
    """Embed descriptions in HEIC, AVIF and other formats too, by running the program exiftool,
    which has to be installed."""
    sidecar_name: Literal["photo.xmp", "photo.jpg.xmp"] | None = None
    """Name of --sidecar xmp files (default: photo.jpg.xmp if the photo has one, else photo.xmp)."""
    existing: Literal["skip", "replace", "replace-own", "append", "prepend"] | None = None
    """What to do with photos that already have such a caption (default: refuse to run): skip them
    (--embed copies them as they are), replace it (as --force does), replace only a caption that
    captioner wrote and nobody changed (replace-own), or, of --sidecar txt, add to it, after a
    comma."""
    skip_existing: bool = False
    """Short for --existing skip."""
    prefix: Annotated[str, Shown("TEXT")] = ""
    """Text that --sidecar txt files begin with, such as a trigger word."""
    suffix: Annotated[str, Shown("TEXT")] = ""
    """Text that --sidecar txt files end with."""


@dataclass
class Store:
    """Where captions go: sidecars, copies in a folder, or else the photos themselves."""

    options: SidecarOptions
    existing: str | None
    """What to do with captions that are there; None: refuse to run."""
    subfolders: Mapping[Path, Path] = field(default_factory=dict)
    """Where photos go in the folder."""
    machine: bool = True
    """Whether captioner wrote the captions itself, which XMP and IPTC then say."""
    written: int = 0
    """Number of captions so far."""

    @property
    def folder(self) -> Path | None:
        """Where copies go."""
        return None if self.options.embed is None else Path(self.options.embed)

    def target(self, photo: Path) -> Path:
        """The file that gets the caption.

        Lightroom, Bridge and Capture One use ``photo.xmp``, darktable and digiKam
        ``photo.jpg.xmp``; the second if there is one.
        """
        if kind := self.options.sidecar:
            long, name = photo.with_name(f"{photo.name}.xmp"), self.options.sidecar_name
            use_long = _exists(long) if kind == "xmp" and name is None else name == "photo.jpg.xmp"
            return long if use_long else photo.with_suffix(f".{kind}")
        if self.folder is None:
            return photo
        return self.folder / self.subfolders.get(photo, "") / photo.name

    def found(self, photo: Path) -> Found | None:
        """Return the caption that would be replaced, or None.

        Raises:
            DataError: The photo cannot have a caption there.
        """
        target, sidecar = self.target(photo), self.options.sidecar
        if sidecar and target == photo:
            raise DataError("not a photo, but what would be written beside it")
        if target != photo:
            _require_plain(target)
        if sidecar == "txt":
            return Found() if target.exists() else None
        if sidecar:
            there = find_in_sidecar(target.read_bytes()) if target.exists() else Found()
            return there if there.text else None
        if self.folder is not None and target.exists() and target.samefile(photo):
            raise ConfigError(
                f"--embed {self.folder} is the photos' own folder; give another folder, or "
                "--in-place to change the originals"
            )
        try:
            there = find_in_photo(photo, exiftool=self.options.exiftool)
        except NotEditableError:
            with open_image(photo):  # raises another error if it is not a photo
                raise
        if self.folder is None or not target.exists():
            return there if there.text else None
        return find_in_photo(target, exiftool=self.options.exiftool)

    def write(
        self, photo: Path, text: str, keywords: Sequence[str], mark: Mark | None = None
    ) -> None:
        """Write a caption and keywords; DataError or OSError: this photo cannot be written to."""
        target, text = self.target(photo), _INVALID.sub("\ufffd", text)
        if target != photo:
            _require_plain(target)
        if self.options.sidecar == "txt":
            one_line = " ".join(text.splitlines())
            text = self._with_other_text(", ".join([one_line, *keywords]), target)
            atomic_write(target, f"{text}\n")
        elif self.options.sidecar == "xmp":
            packet = target.read_bytes() if target.exists() else None
            atomic_write(target, set_description(packet, text, keywords, mark=mark))
        else:
            exiftool = self.options.exiftool
            new = with_description(photo, text, keywords, mark, exiftool=exiftool)
            _replace(target, photo, new)

    def _with_other_text(self, text: str, target: Path) -> str:
        """A caption with the text that the file has and its prefix and suffix, each once."""
        if self.existing in ("append", "prepend") and target.exists():
            try:
                old = self._bare(target.read_text(encoding="utf-8-sig"))
            except UnicodeDecodeError:
                raise DataError("the text is not in UTF-8; convert it, or move it away") from None
            parts = [old] if f", {text}, " in f", {old}, " else [old, text]
            text = ", ".join(filter(None, parts if self.existing == "append" else parts[::-1]))
        text, prefix, suffix = self._bare(text), self.options.prefix, self.options.suffix
        if prefix:
            text = prefix + " " * (not prefix[-1].isspace()) + text
        if suffix:
            text += " " * (suffix[0] not in " ,.;:!?)") + suffix
        return text

    def _bare(self, text: str) -> str:
        """The text without the prefix and suffix that it may have."""
        prefix, suffix = (s.strip(" ,") for s in (self.options.prefix, self.options.suffix))
        text = re.sub(rf"^{re.escape(prefix)}(?!\w)", "", text.strip(" ,\r\n"))
        before = r"\b" if suffix[:1].isalnum() else ""
        return re.sub(rf"{before}{re.escape(suffix)}$", "", text.strip(" ,")).strip(" ,")

    def finished(self) -> str:
        """What an interrupted run has written, if the photos without captions can be continued."""
        again = self.written and self.existing in (None, "skip")
        return f"{counted(self.written, 'caption')} finished" if again else ""

    def write_all(
        self,
        photos: Iterable[Path],
        captioned: Callable[[Sequence[Path]], Iterable[Row]],
    ) -> Iterator[Row]:
        """Check all photos, and write the captions of those that need one as they are found.

        Yields the captions, and why others cannot be written; prints how many were written.
        """
        needed, existing, problems = self._check(photos)
        problems += filter(None, (self._keep(photo, None) for photo in existing))
        yield from ({"error": problem} for problem in problems)
        for photo, one in zip(needed, captioned(needed), strict=True):
            problem = ""
            if one.get("captions"):
                best = one["captions"][0]
                words = [keyword["word"] for keyword in best.get("keywords", ())]
                problem = self._keep(photo, best["text"], words, best.get("confidence"))
                self.written += not problem
            yield {"error": problem} if problem else one
        where = f"copies in {self.folder}" if self.folder else "the photos"
        if kind := self.options.sidecar:
            where = f".{kind} files beside {where}"
        warn(f"{counted(self.written, 'caption')} written to {where}")

    def _check(self, photos: Iterable[Path]) -> tuple[list[Path], list[Path], list[str]]:
        """Check every photo before a caption is written.

        Returns the photos to caption, those that have a caption to keep, and why others cannot be
        written to.
        """
        owners: dict[Path, Path] = {}
        existing: list[Path] = []
        problems: list[str] = []
        for photo in photos:
            try:
                there = self.found(photo)
                if there and (self.existing in (None, "skip") or self._is_other(there)):
                    existing.append(photo)
            except (DataError, OSError) as error:
                problems.append(self._problem(photo, error))
                continue
            other = owners.setdefault(self.target(photo), photo)
            if other is not photo:
                xmp = self.options.sidecar == "xmp"
                raise ConfigError(
                    f"{other} and {photo} would both get {self.target(photo)}; caption them "
                    "separately, or rename one" + ", or give --sidecar-name photo.jpg.xmp" * xmp
                )
        if existing and self.existing is None:
            target = self.target(existing[0])
            beside = target != existing[0] and _exists(target)
            where = f"a caption in {target}" if beside else "a description"
            raise ConfigError(
                f"{first_of(existing)} already has {where}; give --skip-existing to keep it, or "
                "--force to replace it"
            )
        if existing:
            done = "copied as they are" if self.folder else "skipped"
            warn(f"{len(existing)} of {len(owners)} photos already have a caption; {done}")
        if newer := [photo for photo in existing if self._is_older(self.target(photo), photo)]:
            warn(
                f"{first_of(newer)} changed after the caption was written; give --existing replace "
                "with these photos to caption them again"
            )
        kept = {*existing}
        return [photo for photo in owners.values() if photo not in kept], existing, problems

    def _is_older(self, target: Path, photo: Path) -> bool:
        """Return whether a sidecar was written before its photo was modified."""
        if not self.options.sidecar:
            return False  # copies and the photos themselves have the photo's time
        try:
            return target.stat().st_mtime_ns < photo.stat().st_mtime_ns
        except OSError:
            return False

    def _is_other(self, there: Found) -> bool:
        return self.existing == "replace-own" and not there.own

    def _keep(
        self,
        photo: Path,
        text: str | None,
        keywords: Sequence[str] = (),
        confidence: float | None = None,
    ) -> str:
        """Write a caption, or copy a photo that keeps its own (None) to the folder, if any.

        Returns why it cannot be written, in one line; raises what would stop every photo.
        """
        try:
            if text is not None:
                self.write(photo, text, keywords, Mark(confidence) if self.machine else None)
            elif self.folder is not None and not self.target(photo).exists():
                _replace(self.target(photo), photo, photo.read_bytes())
        except (DataError, OSError) as error:
            return self._problem(photo, error)
        return ""

    def _problem(self, photo: Path, error: DataError | OSError) -> str:
        """An error of the methods in one line that names the file."""
        return problem_of(self.target(photo) if self.options.sidecar else photo, error, photo)


def choose_store(options: SidecarOptions, *, force: bool) -> Store | None:
    """Where captions are kept; None if they are only printed or written to one file."""
    where = flags_given(options, *marked(SidecarOptions, PLACE))
    leave = "add it, or leave this option out"
    for kind, names in (("txt", ("prefix", "suffix")), ("xmp", ("sidecar_name",))):
        if options.sidecar != kind:
            refuse(options, names, f"is for --sidecar {kind}; {leave}")
    if not where:
        names = ("existing", "skip_existing")
        refuse(options, names, f"is for --sidecar, --embed and --in-place; {leave}")
        return None
    if len(where) > 1:
        raise ConfigError(f"{where[0]} and {where[1]} cannot be combined; give one of them")
    if options.existing:
        refuse(options, ("skip_existing",), "is short for --existing skip; give one of them")
    existing = options.existing or ("skip" if options.skip_existing else None)
    if existing in ("append", "prepend") and options.sidecar != "txt":
        raise ConfigError(f"--existing {existing} is for --sidecar txt; give skip or replace")
    if existing == "replace-own" and options.sidecar == "txt":
        raise ConfigError(
            "--existing replace-own is not for --sidecar txt, which does not show who wrote a "
            "text; give skip or replace"
        )
    if options.exiftool:
        if options.sidecar:
            raise ConfigError("--exiftool is for --embed and --in-place; leave it out")
        require_exiftool()
    if force and existing not in (None, "replace"):
        raise ConfigError(f"--force and --existing {existing} contradict each other; give one")
    if options.embed is not None:
        require_parent(Path(options.embed))
    return Store(options, existing or ("replace" if force else None))


# --- removal --------------------------------------------------------------------------------------


def own_places(photo: Path) -> list[Path]:
    """Return the files in which captioner may have written a photo's caption."""
    sidecars = (photo.with_suffix(".xmp"), photo.with_name(f"{photo.name}.xmp"))
    # os.path: a name that is too long is not an error. Links are never written through.
    plain = (p for p in sidecars if os.path.isfile(p) and not os.path.islink(p))  # noqa: PTH113, PTH114
    return [*plain, photo]


def remove_own(path: Path, *, exiftool: bool) -> Found:
    """Remove what captioner wrote into a photo or an XMP sidecar; texts of people are kept.

    Returns the description before; DataError or OSError: the file cannot be read or written.
    """
    if path.suffix == ".xmp":
        before = path.read_bytes()
        found, after = find_in_sidecar(before), remove_from_sidecar(before)
        if found.own and after is None:
            path.unlink()
        elif found.own:
            atomic_write(path, after or b"")
        return found
    try:
        found = find_in_photo(path, exiftool=exiftool)
    except NotEditableError:
        return Found()
    if found.own:
        _replace(path, path, without_own_description(path, exiftool=exiftool))
    return found


# --- files ----------------------------------------------------------------------------------------


def problem_of(path: Path, error: DataError | OSError, photo: Path) -> str:
    """Return the error of one photo as a line that names the file.

    An error that stops every photo, such as a full disk, is raised again.
    """
    if getattr(error, "errno", None) in (errno.ENOSPC, errno.EROFS):
        raise error
    text = str(getattr(error, "strerror", None) or error)
    return text if text.startswith(str(photo)) else f"{path}: {text}"


def _exists(path: Path) -> bool:
    return os.path.lexists(path)  # Path.exists raises an error for a name that is too long


def _require_plain(path: Path) -> None:
    """Raise DataError if a file to write is a link, a folder, a pipe or a device.

    A link or a pipe may lead to any file of anybody.
    """
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISREG(mode):
        kind = {stat.S_IFLNK: "a link", stat.S_IFDIR: "a folder"}.get(stat.S_IFMT(mode))
        raise DataError(f"is {kind or 'a device or a pipe'}, not a file; move it away")


def _replace(target: Path, photo: Path, data: bytes) -> None:
    """Write a photo with the modification time of the original, by which albums are sorted."""
    before = photo.stat()
    atomic_write(target, data)
    os.utime(target, ns=(before.st_atime_ns, before.st_mtime_ns))
