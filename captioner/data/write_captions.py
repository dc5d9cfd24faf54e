"""Functions that write captions into photos, copies or sidecar files, and remove captions.

`write_caption`, `remove_caption` and `apply_captions` are the Python counterparts of ``captioner
caption`` with ``--in-place``, ``--embed`` or ``--sidecar``, and of ``captioner apply``.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from captioner.caption_types import Caption
from captioner.data.caption_store import (
    SidecarOptions,
    Store,
    make_store,
    own_places,
    problem_of,
    remove_own,
)
from captioner.data.dataset import EMPTY
from captioner.data.folders import NamedFiles, natural
from captioner.data.formats import format_by_name
from captioner.data.images import image_size
from captioner.data.importers import (
    USUAL,
    find_source,
    import_captions,
    photo_folder,
    shared_names,
    unchanged_captions,
)
from captioner.data.options import ColumnOptions
from captioner.data.photo_metadata import NotEditableError, find_inside, require_exiftool
from captioner.errors import CaptionerError, ConfigError, DataError
from captioner.hints import hinted, unknown_option
from captioner.messages import counted, first_of
from captioner.schema import build_options, option_fields, taken

_log = logging.getLogger(__name__)

_BY_HAND = "remove the caption with other software, such as exiftool"
"""The remedy for a caption that cannot be removed. Errors of writing name another remedy."""

_FLAG = re.compile(
    r"--([a-z]+(?:-[a-z]+)*)(?: (txt|xmp|skip|replace-own|replace|append|prepend|photo\.jpg\.xmp))?"
)
"""An option in its command line spelling, with its value if the option is a choice."""

_Caption = dict[str, Any]
"""A caption of a table, in the form that a store writes (see `caption_store.Row`)."""


# --- functions of the package ---------------------------------------------------------------------


@hinted
def write_caption(
    photo: str | os.PathLike[str],
    caption: Caption | str,
    *,
    keywords: Sequence[str] = (),
    force: bool = False,
    **options: Any,
) -> Path | None:
    """Write a caption into a photo, into a copy of the photo, or into a file next to it.

    The file is replaced atomically, and a photo keeps its modification time. A `Caption` is marked
    as captioner's, so that it can be replaced or removed later. Plain text counts as written by a
    person.

    Args:
        photo: The path of the photo.
        caption: A `Caption`, with its keywords and confidence if it has them, or plain text.
        keywords: Keywords to add to the caption's own keywords.
        force: Replace an existing caption, whoever wrote it.
        **options: The destination: ``in_place=True``, ``embed="folder"`` for a copy, or
            ``sidecar="xmp"`` or ``"txt"``. The options ``existing``, ``exiftool``,
            ``sidecar_name``, ``prefix`` and ``suffix`` work as on the command line.

    Returns:
        The file that was written, or None if ``existing`` kept the caption that the photo had.

    Raises:
        ConfigError: The photo already has a caption, or the options are invalid.
        DataError: The photo cannot be read, or its format cannot store a caption.
        OSError: The disk is full or read-only.
    """
    path, row = Path(photo), _row(caption, keywords)
    with _python_spelling():
        store = _store(options, force=force)
        for found in store.write_all([path], lambda needed: [row for _ in needed]):
            if "error" in found:
                raise DataError(found["error"])
    return store.target(path) if store.written else None


@hinted
def remove_caption(photo: str | os.PathLike[str], *, exiftool: bool = False) -> int:
    """Remove the captions that captioner wrote, from a photo and its XMP sidecars.

    Texts that people wrote or changed are kept.

    Args:
        photo: The path of a photo, or of a folder with photos and subfolders.
        exiftool: Edit HEIC, AVIF and other formats too, with the program exiftool.

    Returns:
        The number of captions removed.

    Raises:
        ConfigError: The program exiftool is not installed.
        DataError: A file cannot be read or edited. The other files have been edited.
    """
    problems: list[str] = []
    with _python_spelling():
        removed = remove_captions([os.fspath(photo)], exiftool=exiftool, report=problems.append)
        if problems:
            raise DataError(problems[0])
    return removed.captions


class Applied(NamedTuple):
    """The result of `apply_captions`."""

    written: int
    """Number of captions written."""
    problems: list[str]
    """One line for each photo that is missing or could not be written."""


@hinted
def apply_captions(
    captions: str | os.PathLike[str],
    *,
    images: str | os.PathLike[str] | None = None,
    force: bool = False,
    **options: Any,
) -> Applied:
    """Write the captions of a table into their photos, copies or sidecar files.

    The texts count as written by a person, except the captions in a CSV file of captioner that
    nobody has changed. A photo that fails does not stop the rest.

    Args:
        captions: A CSV or JSON Lines file with the columns ``image`` and ``caption``.
        images: Folder of the photos (default: the folder of the table, or the current folder).
            Names that lead outside this folder are rejected.
        force: Replace the captions that photos have. A caption that nobody has changed in the table
            never replaces a text by a person.
        **options: The options of `write_caption`, and the names of columns in ``file_column`` and
            ``caption_column``.

    Raises:
        ConfigError: A photo already has a caption, or the options are invalid.
        DataError: The table cannot be read, or none of its photos exists.
    """
    with _python_spelling():
        columns = build_options(ColumnOptions, taken(options, ColumnOptions))
        store = _store(options, force=force)
        folder = None if images is None else os.fspath(images)
        problems = [*apply_table(store, os.fspath(captions), folder, columns)]
    return Applied(store.written, [_in_python(problem) for problem in problems])


def _row(caption: Caption | str, keywords: Sequence[str]) -> dict[str, Any]:
    """Return a caption as JSON data in the form of the output's rows, with additional keywords."""
    if isinstance(caption, str):
        data: dict[str, Any] = {"text": caption, "by_person": True}
    elif isinstance(caption, Caption):
        data = caption.to_dict()
    else:
        raise ConfigError(
            f"caption is {caption!r:.60}; pass the result of model.caption(photo), or text"
        )
    if not data["text"].strip():
        raise ConfigError("the caption is empty; pass a caption with words")
    more = [{"word": word} for word in ([keywords] if isinstance(keywords, str) else keywords)]
    return {"captions": [{**data, "keywords": [*data.get("keywords", ()), *more]}]}


def _store(options: dict[str, Any], *, force: bool) -> Store:
    """Return the store (destination of captions) that the options of a function select."""
    known = option_fields(SidecarOptions)
    for name in options:
        if name not in known:
            raise unknown_option(name, known, {"folder": "embed", "inplace": "in_place"})
    store = make_store(build_options(SidecarOptions, options), force=force, warn=_log.info)
    if store is None:
        raise ConfigError(
            "no destination was chosen for the caption; pass in_place=True, "
            'embed="folder" or sidecar="xmp"'
        )
    return store


@contextmanager
def _python_spelling() -> Iterator[None]:
    """Use Python's spelling of options in the errors that the block raises."""
    try:
        yield
    except CaptionerError as error:
        if (text := _in_python(str(error))) == str(error):
            raise
        raise type(error)(text) from error


def _in_python(message: str) -> str:
    """Return a message with options spelled as in Python: ``sidecar="xmp"``."""
    switches = {n for n, f in option_fields(SidecarOptions).items() if f.kind is bool} | {"force"}

    def spelled(found: re.Match[str]) -> str:
        """Return an option on the command line in Python's spelling."""
        name = found[1].replace("-", "_")
        if found[2]:
            return f'{name}="{found[2]}"'
        return f"{name}=True" if name in switches else name

    return _FLAG.sub(spelled, message)


# --- several photos -------------------------------------------------------------------------------


def apply_table(
    store: Store, table: str, images: str | None, columns: ColumnOptions
) -> Iterator[str]:
    """Write the captions in a table to the destination of a store.

    Args:
        store: The destination of the captions.
        table: A CSV or JSON Lines file. Only the first caption of each photo is written.
        images: Folder of the photos. None selects the table's folder or the current folder.
        columns: Names of the columns.

    Yields:
        One line for each photo that is missing or could not be written.

    Raises:
        ConfigError: A photo already has a caption.
        DataError: The table cannot be read, or none of its photos exists.
    """
    captions = _read(table, columns, store.warn)
    folder = photo_folder(find_source(table), images, columns)
    found, problems = _find(captions, folder)
    photos = {photo: caption for photo, caption in found.items() if caption}
    if not found:
        raise DataError(
            f"{table}: no photo can be used ({problems[0].partition(';')[0]}); set --images to the "
            "folder of the photos"
        )
    yield from (f"{table}: {problem}" for problem in problems)
    store.subfolders = {photo: photo.relative_to(folder).parent for photo in photos}
    rows = store.write_all(
        photos,
        lambda needed: ({"captions": [photos[photo]]} for photo in needed),
        photos,
    )
    yield from (one["error"] for one in rows if "error" in one)


def read_captions(
    table: str, photos: Iterable[Path], warn: Callable[[str], None]
) -> dict[Path, str]:
    """Return the first caption of each photo in a table, for the photos that have one.

    Args:
        table: A CSV or JSON Lines file, with photo names below its own or the current folder.
        photos: The photos.
        warn: Receives a line with the number of photos without a caption.

    Raises:
        DataError: The table cannot be read, or it has none of the photos.
    """
    captions = _read(table, USUAL, warn)
    files = NamedFiles(photo_folder(find_source(table), None))
    found: dict[str, str] = {}
    for name, caption in captions.items():
        if caption is None:
            warn(f"{table}: {_shared(name)}")
        elif path := files.find(_inside(name, files.folder)):
            found.setdefault(os.path.realpath(path), caption["text"])
    real = {photo: os.path.realpath(photo) for photo in photos}
    texts = {photo: found[path] for photo, path in real.items() if path in found}
    if not texts:
        raise DataError(
            f"{table} has captions, but not for the {counted(len(real), 'photo')} to draw; use the "
            "file that captioner wrote for these photos"
        )
    if missing := [photo for photo in real if photo not in texts]:
        warn(f"{table} has no caption for {first_of(missing)}; the model's caption is shown")
    return texts


class Removed(NamedTuple):
    """The result of `remove_captions`."""

    captions: int
    """Number of captions by captioner that were removed."""
    kept: int
    """Number of texts by people that were kept."""
    failed: int
    """Number of files that could not be read or written."""


def remove_captions(
    names: Iterable[str], *, exiftool: bool, report: Callable[[str], None]
) -> Removed:
    """Remove the captions that captioner wrote from photos and from all photos in folders.

    Args:
        names: Photos, and folders with their subfolders.
        exiftool: Edit HEIC, AVIF and other formats too, with the program exiftool.
        report: Receives one line for each file that cannot be read or written.
    """
    if exiftool:
        require_exiftool()
    removed = kept = failed = 0
    skipped: list[Path] = []
    for photo in _photos(names):
        try:
            if not format_by_name(photo) and photo.suffix != ".xmp":  # named by the user
                image_size(photo)  # raises an error if it is not a photo
        except DataError as error:
            report(problem_of(photo, error, photo))
            failed += 1
            continue
        for path in own_places(photo):
            try:
                found = remove_own(path, exiftool=exiftool)
            except NotEditableError:
                skipped += [path] * bool(find_inside(path).digests)
            except (DataError, OSError) as error:
                report(problem_of(path, error, path).replace("use --sidecar xmp", _BY_HAND))
                failed += 1
            else:
                removed += found.own
                kept += bool(found.text) and not found.own
    if skipped:
        report(
            f"the caption was not removed from {first_of(skipped)}, because this format needs the "
            "program exiftool; add --exiftool"
        )
    return Removed(removed, kept, failed + len(skipped))


def _photos(names: Iterable[str]) -> Iterator[Path]:
    """Yield photos in order. Replace each folder by the photos in it and its subfolders."""
    for name in names:
        if not Path(name).is_dir():
            yield Path(name)
        for parent, folders, files in os.walk(name):
            folders.sort(key=natural)
            photos = (
                Path(parent, one) for one in sorted(files, key=natural) if format_by_name(one)
            )
            yield from (photo for photo in photos if photo.is_file())


def _find(
    captions: Mapping[str, _Caption | None], folder: Path
) -> tuple[dict[Path, _Caption | None], list[str]]:
    """Return the captions by the path of their photo, and a message for each unusable name.

    ``captions`` has the captions by the name of the photo in the table. A caption is None if
    several photos share the name. The table may come from an unknown source, so only images below
    the folder count as photos.
    """
    files, photos, problems = NamedFiles(folder), dict[Path, _Caption | None](), []
    for name, text in captions.items():
        try:
            photo = files.find_below(_inside(name, folder))
            image_size(photo)
        except DataError as error:
            reason = str(error)
            remedy = "correct the name in the table, or set --images to the folder of the photo"
            own = ";" in reason  # an error of the image names the file and a remedy
            problems.append(reason if own else f"photo {name!r} in {folder}: {reason}; {remedy}")
            continue
        photos.setdefault(photo, text)
        if text is None:
            problems.append(_shared(name))
    return photos, problems


def _shared(name: str) -> str:
    """Return the message for a name that several photos share."""
    return (
        f"{name!r} has several captions with the same rank, which may belong to different photos; "
        "give the photos different names, or correct one folder at a time"
    )


def _inside(name: str, folder: Path) -> str:
    """Return a name without the folder that it begins with. Other names are returned unchanged."""
    if name.startswith(("/", "..")):
        for top in (str(folder), os.path.abspath(folder)):  # noqa: PTH100 - keeps links
            if name.startswith(f"{top.rstrip('/')}/"):
                return name[len(top.rstrip("/")) + 1 :]
    return name


def _read(
    table: str, columns: ColumnOptions, warn: Callable[[str], None]
) -> dict[str, _Caption | None]:
    """Return the first caption of each photo in a table, by the photo's name.

    The caption is None if several photos share the name (see `shared_names`). A warning reports the
    number of photos without a caption.

    Raises:
        DataError: The table cannot be read, or it has no captions.
    """
    photos = import_captions(table, columns=columns)
    captions = {str(p.path): p.captions[0].strip() for p in photos if p.captions}
    found = {name: text for name, text in captions.items() if text.lower() not in EMPTY}
    if left := len(photos) - len(found):
        warn(f"{table}: {counted(left, 'photo')} left out because the caption is missing")
    if not found:
        raise DataError(f"{table} has no captions; fill in its caption column")
    # A person may have chosen the other texts, so they are not marked as captioner's.
    machine = unchanged_captions(table, columns)
    first: dict[str, _Caption | None] = {
        name: {"text": text, "confidence": machine.get((name, text))}
        if (name, text) in machine
        else {"text": text, "by_person": True}
        for name, text in found.items()
    }
    return first | dict.fromkeys(shared_names(table, columns) & found.keys())
