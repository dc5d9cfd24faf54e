"""Captions stored with their photo: ``--sidecar txt|xmp``, ``--embed FOLDER``, ``--in-place``.

An existing caption is never replaced without permission. A photo that already has a caption causes
an error, unless ``--existing`` selects what happens. Captions that captioner wrote into XMP are
marked, so that they can be replaced or removed without touching texts by people.

Messages spell options as the command line does. `captioner.data.write_captions` translates them for
Python.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from captioner.data.images import exif_description, open_image
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
    find_inside,
    new_sidecar,
    require_exiftool,
    with_description,
    without_own_description,
)
from captioner.errors import ConfigError, DataError
from captioner.files import atomic_write
from captioner.messages import counted, first_of
from captioner.schema import Folder, Shown, flags_given, marked, refuse

_INVALID = re.compile("[^\t\n\r -\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""Characters that XML does not allow. A table from an unknown source may contain them."""

PLACE = "place of captions"
"""Mark of an option that selects where captions are written."""

ALSO_REMOVES = "also removes"
"""Mark of an option that can be combined with --remove of captioner apply."""

Row = dict[str, Any]
"""The result for one photo: ``{"captions": [...]}``, or ``{"image": path, "error": message}`` if it
failed. A caption with ``by_person`` counts as a text by a person, so it is written without
captioner's mark."""


@dataclass(frozen=True, kw_only=True)
class SidecarOptions:
    """Sidecar files and metadata."""

    sidecar: Annotated[Literal["txt", "xmp"] | None, PLACE] = None
    """Write each caption to a file next to its photo. txt: photo.txt, with the caption as text.
    xmp: photo.xmp, with the caption as the description."""
    embed: Annotated[Folder | None, PLACE] = None
    """Copy the photos (JPEG, PNG, WebP, TIFF) to this folder, and write the captions into the
    copies as descriptions (XMP, IPTC). The copies keep their subfolders."""
    in_place: Annotated[bool, PLACE] = False
    """Write the captions into the photos themselves, as descriptions (XMP, IPTC)."""
    exiftool: Annotated[bool, ALSO_REMOVES] = False
    """Also write into HEIC, AVIF and other formats, with the program exiftool, which must be
    installed."""
    sidecar_name: Literal["photo.xmp", "photo.jpg.xmp"] | None = None
    """Choose the name of --sidecar xmp files (default: photo.jpg.xmp if that file exists, otherwise
    photo.xmp)."""
    existing: Literal["skip", "replace", "replace-own", "append", "prepend"] | None = None
    """Choose what happens to existing captions (default: stop with an error). skip: keep existing
    captions (--embed copies these photos unchanged). replace: replace all existing captions, like
    --force. replace-own: replace only captions that captioner wrote and nobody changed. append,
    prepend: add the new caption after or before the existing text, separated by a comma (--sidecar
    txt only)."""
    skip_existing: bool = False
    """Keep existing captions; short for --existing skip."""
    prefix: Annotated[str, Shown("TEXT")] = ""
    """Write this text, such as a trigger word, before the caption in --sidecar txt files."""
    suffix: Annotated[str, Shown("TEXT")] = ""
    """Write this text after the caption in --sidecar txt files."""


def _ignore(message: str) -> None:
    """Ignore a message. This is the default of ``Store.warn``."""


@dataclass
class Store:
    """The destination of captions: sidecar files, copies of photos, or the photos themselves."""

    options: SidecarOptions
    existing: str | None
    """Treatment of existing captions, as in ``SidecarOptions``. None stops with an error."""
    subfolders: Mapping[Path, Path] = field(default_factory=dict)
    """Subfolder for the copy of each photo. Copies of unlisted photos go into the folder itself."""
    written: int = 0
    """Number of captions written so far."""
    by_people: int = 0
    """Number of captions written so far that count as texts by people, so they have no mark."""
    warn: Callable[[str], None] = _ignore
    """Function that receives messages other than errors, such as the number of skipped photos."""

    @property
    def folder(self) -> Path | None:
        """The folder for copies of the photos, or None if no copies are made."""
        return None if self.options.embed is None else Path(self.options.embed)

    def target(self, photo: Path) -> Path:
        """Return the file that the caption of a photo is written to.

        For XMP sidecars, Lightroom, Bridge and Capture One use the name ``photo.xmp``, and
        darktable and digiKam use ``photo.jpg.xmp``. The second name is chosen if that file exists.
        """
        if kind := self.options.sidecar:
            long, name = photo.with_name(f"{photo.name}.xmp"), self.options.sidecar_name
            use_long = _exists(long) if kind == "xmp" and name is None else name == "photo.jpg.xmp"
            return long if use_long else photo.with_suffix(f".{kind}")
        if self.folder is None:
            return photo
        return self.folder / self.subfolders.get(photo, "") / photo.name

    def found(self, photo: Path) -> Found | None:
        """Return the existing caption that a new caption of the photo would replace, or None.

        Raises:
            ConfigError: The folder for copies is the folder of the photos.
            DataError: The caption of this photo cannot be stored.
        """
        target, sidecar = self.target(photo), self.options.sidecar
        if sidecar and target == photo:
            raise DataError("the file is a sidecar, not a photo; leave it out")
        if target != photo:
            _require_plain(target)
        if sidecar == "txt":
            return Found() if target.exists() else None
        if sidecar:
            return self._found_for_sidecar(photo, target)
        if self.folder is not None and target.exists() and target.samefile(photo):
            raise ConfigError(
                f"--embed {self.folder} is the folder of the photos; choose a different folder, "
                "or use --in-place to change the originals"
            )
        try:
            there = find_in_photo(photo, exiftool=self.options.exiftool)
        except NotEditableError:
            with open_image(photo):  # raises another error if it is not a photo
                raise
        if self.folder is None or not target.exists():
            return there if there.text else None
        return find_in_photo(target, exiftool=self.options.exiftool)

    def _found_for_sidecar(self, photo: Path, target: Path) -> Found | None:
        """Return the description that an XMP sidecar would replace or hide, or None.

        A description by captioner in the photo itself does not count, because hiding it loses no
        text by a person.
        """
        for path in (target, *(path for path in own_places(photo)[:-1] if path != target)):
            there = find_in_sidecar(path.read_bytes()) if path.exists() else Found()
            if there.text:
                return there
        there = find_inside(photo)
        return there if there.text and not there.own else None

    def write(
        self, photo: Path, text: str, keywords: Sequence[str], mark: Mark | None = None
    ) -> None:
        """Write the caption and keywords of a photo.

        Raises:
            DataError: The photo or its sidecar cannot be edited.
            OSError: The file cannot be read or written.
        """
        target, text = self.target(photo), _INVALID.sub("\ufffd", text)
        if target != photo:
            _require_plain(target)
        if self.options.sidecar == "txt":
            one_line = " ".join(text.splitlines())
            text = self._with_other_text(", ".join([one_line, *keywords]), target)
            atomic_write(target, f"{text}\n")
        elif self.options.sidecar == "xmp":
            packet = target.read_bytes() if target.exists() else new_sidecar(photo)
            atomic_write(target, set_description(packet, text, keywords, mark=mark))
        else:
            exiftool = self.options.exiftool
            new = with_description(photo, text, keywords, mark, exiftool=exiftool)
            _replace(target, photo, new)

    def _with_other_text(self, text: str, target: Path) -> str:
        """Return the new content of a text file.

        The content is the caption between the prefix and the suffix. If ``existing`` is append or
        prepend, the previous text is kept. Parts that the file already contains are not repeated.
        """
        if self.existing in ("append", "prepend") and target.exists():
            try:
                old = self._bare(target.read_text(encoding="utf-8-sig"))
            except UnicodeDecodeError:
                raise DataError(
                    "the existing text is not encoded in UTF-8; save the file as UTF-8, or move it "
                    "to another folder"
                ) from None
            parts = [old] if f", {text}, " in f", {old}, " else [old, text]
            text = ", ".join(filter(None, parts if self.existing == "append" else parts[::-1]))
        text, prefix, suffix = self._bare(text), self.options.prefix, self.options.suffix
        if prefix:
            text = prefix + " " * (not prefix[-1].isspace()) + text
        if suffix:
            text += " " * (suffix[0] not in " ,.;:!?)") + suffix
        return text

    def _bare(self, text: str) -> str:
        """Return a file's text without the options' prefix and suffix, and commas around it."""
        prefix, suffix = (s.strip(" ,") for s in (self.options.prefix, self.options.suffix))
        text = re.sub(rf"^{re.escape(prefix)}(?!\w)", "", text.strip(" ,\r\n"))
        before = r"\b" if suffix[:1].isalnum() else ""
        return re.sub(rf"{before}{re.escape(suffix)}$", "", text.strip(" ,")).strip(" ,")

    def finished(self) -> str:
        """Return a message with the number of finished captions, for a run that was interrupted.

        The message is empty if the next run would replace these captions and so start over.
        """
        again = self.written and self.existing in (None, "skip")
        return f"{counted(self.written, 'caption')} finished" if again else ""

    def write_all(
        self,
        photos: Collection[Path],
        captioned: Callable[[Sequence[Path]], Iterable[Row]],
        known: Mapping[Path, Row] | None = None,
    ) -> Iterator[Row]:
        """Check all photos, then write each caption as soon as it is generated.

        Args:
            photos: The photos.
            captioned: Function that receives the photos that need a caption, and returns a row for
                each of them, in order.
            known: The new captions by photo, if they are already known. If captioner has written
                the same caption before, the file is left unchanged and keeps its mark. A caption
                that no person has changed never replaces a text by a person.

        Yields:
            The rows of the captions written, and a row with an error for each photo that failed, in
            the order of the photos. A row is a photo with its captions as JSON data.

        Raises:
            ConfigError: A photo has a caption and ``existing`` is None, or two photos have the same
                target.
        """
        needed, existing, problems = self._check(photos, known or {})
        self._warn_of_other_places(needed)
        problems |= {photo: self._keep(photo, None) for photo in existing}
        rows, uncaptioned = iter(captioned(needed)), {*needed}
        for photo in photos:
            problem = problems.get(photo, "")
            one = next(rows) if photo in uncaptioned else {}
            if one.get("captions"):
                best = one["captions"][0]
                words = [keyword["word"] for keyword in best.get("keywords", ())]
                person = bool(best.get("by_person"))
                mark = None if person else Mark(best.get("confidence"))
                problem = self._keep(photo, best["text"], words, mark)
                self.written += not problem
                self.by_people += person and not problem
            if problem:
                yield {"image": str(photo), "error": problem}
            elif one:
                yield one
        for _ in rows:  # no rows are left, but only this completes the progress bar
            pass
        where = f"copies in {self.folder}" if self.folder else "the photos"
        if kind := self.options.sidecar:
            where = f".{kind} files next to {where}"
        kept = "count as texts by people, so captioner apply --remove keeps them"
        people = f"; {self.by_people:,} {kept}" if self.by_people else ""
        self.warn(f"{counted(self.written, 'caption')} written to {where}{people}")

    def _check(
        self, photos: Iterable[Path], known: Mapping[Path, Row]
    ) -> tuple[list[Path], list[Path], dict[Path, str]]:
        """Check every photo before any caption is written.

        Returns:
            The photos to caption, the photos with a caption to keep, and a message for each photo
            that cannot be written to.
        """
        owners: dict[Path, Path] = {}
        existing: dict[Path, Found] = {}
        unchanged: list[Path] = []
        protected: list[Path] = []
        problems: dict[Path, str] = {}
        for photo in photos:
            try:
                there = self.found(photo)
                new = known.get(photo)
                if there and there.own and new and there.text == new["text"]:
                    unchanged.append(photo)
                elif there and there.text and not there.own and new and not new.get("by_person"):
                    protected.append(photo)
                elif there and (self.existing in (None, "skip") or self._is_other(there)):
                    existing[photo] = there
            except (DataError, OSError) as error:
                problems[photo] = self._problem(photo, error)
                continue
            other = owners.setdefault(self.target(photo), photo)
            if other is not photo:
                xmp = self.options.sidecar == "xmp"
                raise ConfigError(
                    f"the captions of {other} and {photo} would both go into {self.target(photo)}; "
                    "rename one photo" + " or use --sidecar-name photo.jpg.xmp" * xmp
                )
        if existing and self.existing is None:
            raise ConfigError(self._existing_problem(existing))
        if existing:
            done = "copied unchanged" if self.folder else "skipped"
            photos_kept = f"{len(existing)} of {len(owners)} photos"
            self.warn(f"{photos_kept} {done} because they already have a caption")
        if newer := [photo for photo in existing if self._is_older(self.target(photo), photo)]:
            self.warn(
                f"{first_of(newer)} changed after the caption was written; to caption a "
                "changed photo again, use --existing replace"
            )
        if unchanged:
            self.warn(
                f"{counted(len(unchanged), 'photo')} left unchanged, because captioner wrote the "
                "same caption before"
            )
        if protected:
            self.warn(
                f"{first_of(protected)} left unchanged, because a person wrote the existing text "
                "and nobody edited the caption in the table"
            )
        kept = [*existing, *unchanged, *protected]
        left = {*kept}
        return [photo for photo in owners.values() if photo not in left], kept, problems

    def _warn_of_other_places(self, photos: Sequence[Path]) -> None:
        """Warn of descriptions in EXIF, and of sidecars with the name that is not written."""
        if self.options.sidecar == "txt":
            return
        in_exif = [one for one in photos if exif_description(one) and not find_inside(one).text]
        if in_exif:
            self.warn(
                f"{first_of(in_exif)} has a description in EXIF, which captioner does not read; to "
                "use it as the caption, copy it to XMP with exiftool first"
            )
        if self.options.sidecar_name is None:  # the existing file is chosen
            return
        other = [p for p in photos if not _exists(self.target(p)) and len(own_places(p)) > 1]
        if other:
            self.warn(
                f"{own_places(other[0])[0]} exists, so {first_of(other)} gets a second sidecar "
                "file; leave out --sidecar-name to change the existing file instead"
            )

    def _existing_problem(self, existing: Mapping[Path, Found]) -> str:
        """Return the error message about existing captions.

        The message names their authors (people or captioner) and the options that help.
        """
        photos, own = [*existing], sum(there.own for there in existing.values())
        target = self.target(photos[0])
        beside = target != photos[0] and _exists(target)
        where, by = (f"a caption in {target}" if beside else "a description"), ""
        if self.options.sidecar != "txt":  # text files do not record who wrote them
            people = len(photos) - own
            by = f" ({people:,} by people, {own:,} by captioner)"
            if not (people and own):
                by = " by captioner" if own else " by a person"
        replace_own = (
            "--existing replace-own to replace only captions by captioner, " if own else ""
        )
        return (
            f"{first_of(photos)} already has {where}{by}; add --existing skip to keep existing "
            f"captions, {replace_own}or --existing replace to replace them"
        )

    def _is_older(self, target: Path, photo: Path) -> bool:
        """Return whether a sidecar was written before its photo was modified."""
        if not self.options.sidecar:
            return False  # copies and the photos themselves have the photo's time
        try:
            return target.stat().st_mtime_ns < photo.stat().st_mtime_ns
        except OSError:
            return False

    def _is_other(self, there: Found) -> bool:
        """Return whether to keep an existing caption, because captioner did not write it.

        This is the case only if the option ``existing`` is replace-own.
        """
        return self.existing == "replace-own" and not there.own

    def _keep(
        self,
        photo: Path,
        text: str | None,
        keywords: Sequence[str] = (),
        mark: Mark | None = None,
    ) -> str:
        """Write a caption, or keep the photo's own caption if ``text`` is None.

        A photo that keeps its caption is copied to the folder for copies, if there is such a folder
        and the copy does not exist.

        Returns:
            The error in one line if the photo cannot be written, otherwise an empty text. An error
            that affects every photo is raised.
        """
        try:
            if text is not None:
                self.write(photo, text, keywords, mark)
            elif self.folder is not None and not self.target(photo).exists():
                _replace(self.target(photo), photo, photo.read_bytes())
        except (DataError, OSError) as error:
            return self._problem(photo, error)
        return ""

    def _problem(self, photo: Path, error: DataError | OSError) -> str:
        """Return an error as one line that names the file."""
        return problem_of(self.target(photo) if self.options.sidecar else photo, error, photo)


def make_store(
    options: SidecarOptions, *, force: bool, warn: Callable[[str], None] = _ignore
) -> Store | None:
    """Return the store (destination of captions) that the options select.

    The result is None if captions are only printed, because no option selects a destination.

    Args:
        options: The options. Their values are already checked, but not their combination.
        force: Replace existing captions.
        warn: Function that receives messages other than errors.

    Raises:
        ConfigError: Two options contradict each other, or exiftool is not installed.
    """
    where = flags_given(options, *marked(SidecarOptions, PLACE))
    for kind, names in (("txt", ("prefix", "suffix")), ("xmp", ("sidecar_name",))):
        if options.sidecar != kind:
            refuse(
                options, names, f"needs --sidecar {kind}; add --sidecar {kind} or omit this option"
            )
    if not where:
        names = ("existing", "skip_existing")
        problem = "needs a destination; add --sidecar xmp, --embed FOLDER or --in-place"
        refuse(options, names, problem)
        return None
    if len(where) > 1:
        raise ConfigError(f"{where[0]} and {where[1]} cannot be combined; use only one of them")
    if options.existing:
        problem = f"cannot be combined with --existing {options.existing}; use only one of them"
        refuse(options, ("skip_existing",), problem)
    existing = options.existing or ("skip" if options.skip_existing else None)
    if existing in ("append", "prepend") and options.sidecar != "txt":
        raise ConfigError(
            f"--existing {existing} needs --sidecar txt; add --sidecar txt, or use --existing skip "
            "or --existing replace"
        )
    if existing == "replace-own" and options.sidecar == "txt":
        raise ConfigError(
            "--existing replace-own does not work with --sidecar txt, because text files do not "
            "record who wrote them; use --existing skip or --existing replace"
        )
    if options.exiftool:
        if options.sidecar:
            raise ConfigError(
                f"--exiftool cannot be combined with --sidecar {options.sidecar}; leave out "
                "--exiftool, or replace --sidecar with --embed or --in-place"
            )
        require_exiftool()
    if force and existing not in (None, "replace"):
        raise ConfigError(
            f"--force and --existing {existing} contradict each other; use only one of them"
        )
    return Store(options, existing or ("replace" if force else None), warn=warn)


# --- removal --------------------------------------------------------------------------------------


def own_places(photo: Path) -> list[Path]:
    """Return the files that captioner may have written a photo's caption to."""
    sidecars = (photo.with_suffix(".xmp"), photo.with_name(f"{photo.name}.xmp"))
    # os.path raises no error for a name that is too long. Captions are never written through links.
    plain = (p for p in sidecars if os.path.isfile(p) and not os.path.islink(p))  # noqa: PTH113, PTH114
    return [*plain, photo]


def remove_own(path: Path, *, exiftool: bool) -> Found:
    """Remove captioner's texts from a photo or an XMP sidecar, but keep texts by people.

    Returns:
        The description that the file had before.

    Raises:
        NotEditableError: The photo's format cannot be edited.
        DataError: The file cannot be edited.
        OSError: The file cannot be read or written.
    """
    if path.suffix == ".xmp":
        before = path.read_bytes()
        found, after = find_in_sidecar(before), remove_from_sidecar(before)
        if found.digests and after is None:
            path.unlink()
        elif found.digests:
            atomic_write(path, after or b"")
        return found
    found = find_in_photo(path, exiftool=exiftool)
    if found.digests:
        _replace(path, path, without_own_description(path, exiftool=exiftool))
    return found


# --- files ----------------------------------------------------------------------------------------


def problem_of(path: Path, error: DataError | OSError, photo: Path) -> str:
    """Return the error of one photo as one line that names the file.

    An error that affects every photo, such as a full disk, is raised again.
    """
    if getattr(error, "errno", None) in (errno.ENOSPC, errno.EROFS):
        raise error
    text = str(getattr(error, "strerror", None) or error)
    return text if text.startswith(str(photo)) else f"{path}: {text}"


def _exists(path: Path) -> bool:
    """Return whether a file or a link exists."""
    return os.path.lexists(path)  # Path.exists raises an error for a name that is too long


def _require_plain(path: Path) -> None:
    """Check that the file to write is a plain file or does not exist.

    A link or a pipe could lead to any other file.

    Raises:
        DataError: The file is a link, a folder, a pipe or a device.
    """
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISREG(mode):
        kinds = {stat.S_IFLNK: "link", stat.S_IFDIR: "folder"}
        kind = kinds.get(stat.S_IFMT(mode), "device or pipe")
        raise DataError(f"the output file is a {kind}; move the {kind} away")


def _replace(target: Path, photo: Path, data: bytes) -> None:
    """Write ``data`` as the new content of ``target``, with the modification time of ``photo``.

    The time is kept, because albums are sorted by it.
    """
    before = photo.stat()
    atomic_write(target, data)
    os.utime(target, ns=(before.st_atime_ns, before.st_mtime_ns))
