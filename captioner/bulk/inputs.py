"""The photos of a bulk job, divided into numbered parts; local disk and object storage.

The same inputs always give the same parts, so a part can be recomputed by any worker at any time:

    photos      consecutive names, ``size`` to a part
    parquet     consecutive rows of one file, ``size`` to a part: image bytes, paths or URLs, or
                Hugging Face's ``{"bytes", "path"}``
    tar         one WebDataset shard, whatever it holds

Names may be URLs that fsspec opens (``s3://``, ``gs://``, ...). Credentials and endpoints come from
the environment, as for the cloud's own tools.
"""

from __future__ import annotations

import dataclasses
import glob
import hashlib
import json
import os
import tarfile
from collections.abc import Iterable, Iterator
from typing import Any, Literal, NamedTuple

import fsspec
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from captioner.data.folders import natural
from captioner.data.formats import format_by_name
from captioner.data.prefetch import read_ahead
from captioner.data.storage import is_local, unreadable
from captioner.errors import ConfigError, DataError, first_line

READERS = 8
"""Photos of object storage that are downloaded at the same time."""


@dataclasses.dataclass(frozen=True)
class Part:
    """What one output file holds."""

    number: int
    kind: Literal["photos", "parquet", "tar"]
    names: tuple[str, ...]
    """The photos; or the one Parquet or tar file."""
    bytes: int | None = None
    """Size of the Parquet or tar file."""
    start: int = 0
    """First row of a Parquet file."""
    stop: int = 0
    """After the last row."""
    image_column: str = ""
    key_column: str | None = None

    @property
    def photos(self) -> int | None:
        """Number of photos; None for a tar file, which has no index."""
        if self.kind == "photos":
            return len(self.names)
        return self.stop - self.start if self.kind == "parquet" else None

    def to_json(self) -> str:
        """The part as JSON, which `part_from_json` reads."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True)


def part_from_json(text: str) -> Part:
    """Read what `Part.to_json` returned."""
    fields = json.loads(text)
    return Part(**{**fields, "names": tuple(fields["names"])})


class Columns(NamedTuple):
    """Columns of Parquet files."""

    image: str | None = None
    """Image bytes, or paths or URLs; None: detected."""
    key: str | None = None
    """Names of the photos in the output; None: their path, or file and row number."""


def divide(
    inputs: Iterable[str],
    *,
    size: int,
    recursive: bool = False,
    columns: Columns = Columns(),  # noqa: B008 (immutable)
) -> list[Part]:
    """Divide inputs into parts.

    Args:
        inputs: Photos, Parquet files, tar files, folders of these, and patterns; paths or URLs.
        size: Photos or rows per part.
        recursive: Search subfolders too.
        columns: Columns of Parquet files.

    Raises:
        ConfigError: A Parquet file has no such column, or several could be meant.
        DataError: A folder has no photos, or a Parquet or tar file cannot be read.
    """
    parts: list[Part] = []
    photos: list[str] = []

    def end_photos() -> None:
        for start in range(0, len(photos), size):
            parts.append(Part(len(parts), "photos", tuple(photos[start : start + size])))
        photos.clear()

    for name in _find(inputs, recursive):
        kind = _kind(name)
        if kind not in ("parquet", "tar"):
            photos.append(name)
            continue
        end_photos()
        try:
            if kind == "tar":
                parts.append(Part(len(parts), "tar", (name,), _bytes(name)))
            else:
                parts += _divide_parquet(name, len(parts), size, columns)
        except OSError as error:
            raise unreadable(name, error) from error
    end_photos()
    return parts


def digest(parts: Iterable[Part]) -> str:
    """Identifies inputs and their division: 16 hexadecimal digits."""
    found = hashlib.sha256()
    for part in parts:
        found.update(part.to_json().encode() + b"\n")
    return found.hexdigest()[:16]


# --- finding -------------------------------------------------------------------------------------


def _kind(name: str) -> Literal["photos", "parquet", "tar"] | None:
    """What a file is by its name; None: not an input."""
    suffix = os.path.splitext(name)[1].lower()  # noqa: PTH122 (of URLs too)
    if suffix in (".parquet", ".tar"):
        return "parquet" if suffix == ".parquet" else "tar"
    kind = format_by_name(name)
    return "photos" if kind is not None and kind.decodable else None


def _find(inputs: Iterable[str], recursive: bool) -> Iterator[str]:
    """The files of the inputs, in their order; those of folders in natural order."""
    for given in inputs:
        for name in _expand(given):
            if not is_local(name) and _kind(name) is not None:
                yield name  # without a request for each of a long list
                continue
            try:
                fs, path = url_to_fs(name)
                if not fs.isdir(path):
                    yield name
                    continue
                found = fs.find(path, maxdepth=None if recursive else 1)
            except (OSError, ImportError, ValueError) as error:
                raise unreadable(name, error) from error
            root = path.rstrip("/")
            inside = [one[len(root) :] for one in found]
            usable = [one for one in inside if _kind(one) is not None and "/." not in one]
            if not usable:
                subfolders = "" if recursive else "; subfolders are not searched"
                raise DataError(f"{name}: no photos, Parquet or tar files{subfolders}")
            yield from (name.rstrip("/") + one for one in sorted(usable, key=natural))


def _expand(name: str) -> list[str]:
    """The names that match a pattern; a name that is none is returned as it is."""
    if not glob.has_magic(name) or (is_local(name) and os.path.lexists(name)):
        return [name]
    if is_local(name):
        found = glob.glob(name, recursive=True)  # noqa: PTH207 (as the shell: a/../*.jpg)
    else:
        try:
            fs, path = url_to_fs(name)
            found = [fs.unstrip_protocol(one) for one in fs.glob(path)]
        except (OSError, ImportError, ValueError) as error:
            raise unreadable(name, error) from error
    if not found:
        raise DataError(f"{name}: no file matches this pattern; check it and the folder")
    return sorted(found, key=natural)


def _bytes(name: str) -> int:
    fs, path = url_to_fs(name)
    return int(fs.size(path))


# --- reading -------------------------------------------------------------------------------------


class Photo(NamedTuple):
    """A photo of a part."""

    name: str
    """Its name in the output."""
    source: Any
    """What ``Captioner.stream`` reads."""


class RemoteFile:
    """A photo as an open binary file: its bytes, or why there are none.

    An error is raised when the file is read, so that it belongs to its photo alone.
    """

    def __init__(self, name: str, data: bytes | str) -> None:
        """Take the bytes, or the error's text."""
        self.name, self._data = name, data

    def read(self, size: int = -1) -> bytes:
        """See ``IO.read``; at most once."""
        if isinstance(self._data, str):
            raise OSError(self._data)
        return self._data if size < 0 else self._data[:size]


def read_part(part: Part) -> Iterator[Photo]:
    """The photos of a part, in order; object storage is read ahead.

    A damaged tar or Parquet file yields the photos before the damage, then one with the error.
    """
    if part.kind == "photos":
        yield from _opened((name, name) for name in part.names)
        return
    [name] = part.names
    try:
        yield from _read_tar(name) if part.kind == "tar" else _opened(_parquet_rows(part))
    except (OSError, tarfile.TarError, ValueError) as error:  # pyarrow's errors are ValueErrors
        problem = f"the {part.kind} file is damaged here: {first_line(error)}"
        yield Photo(name, RemoteFile(name, problem))


def _opened(photos: Iterable[tuple[str, Any]]) -> Iterator[Photo]:
    """Photos whose sources are paths, URLs or bytes."""
    yield from read_ahead(_open, photos, ahead=2 * READERS, threads=READERS)


def _open(photo: tuple[str, Any]) -> Photo:
    name, source = photo
    if source is None:
        return Photo(name, RemoteFile(name, "no image in this row"))
    if isinstance(source, bytes):
        return Photo(name, RemoteFile(name, source))
    if is_local(source):
        return Photo(name, source)
    try:
        with fsspec.open(source, "rb") as file:
            return Photo(name, RemoteFile(name, file.read()))
    except Exception as error:  # each protocol has its own
        return Photo(name, RemoteFile(name, first_line(error)))


def _read_tar(name: str) -> Iterator[Photo]:
    """The first photo of each sample; consecutive files up to the first dot are one sample."""
    last = None
    with fsspec.open(name, "rb") as file, tarfile.open(fileobj=file, mode="r|") as tar:
        for member in tar:
            folder, _, base = member.name.rpartition("/")
            sample = (folder, base.partition(".")[0])
            content = tar.extractfile(member)
            if content is None or sample == last or format_by_name(member.name) is None:
                continue
            last = sample
            called = f"{name}/{member.name}"
            yield Photo(called, RemoteFile(called, content.read()))


def _divide_parquet(name: str, number: int, size: int, columns: Columns) -> Iterator[Part]:
    import pyarrow.parquet as pq

    fs, path = url_to_fs(name)
    with fs.open(path, "rb") as file:
        try:
            held = pq.ParquetFile(file)
        except ValueError as error:
            raise unreadable(name, error) from error
        schema, rows = held.schema_arrow, held.metadata.num_rows
    image = columns.image or _image_column(name, schema)
    for column in filter(None, (image, columns.key)):
        if column not in schema.names:
            raise ConfigError(f"{name} has no column {column}; it has {', '.join(schema.names)}")
    if _holds(schema.field(image).type) is None:
        raise ConfigError(
            f"{name}: column {image} is {schema.field(image).type}; give one with bytes, text, or "
            "a struct of bytes and path"
        )
    bytes_ = int(fs.size(path))
    for start in range(0, rows, size):
        yield Part(
            number,
            "parquet",
            (name,),
            bytes_,
            start,
            min(rows, start + size),
            image,
            columns.key,
        )
        number += 1


def _holds(kind: Any) -> Literal["bytes", "names", "both"] | None:
    from pyarrow import types

    if types.is_binary(kind) or types.is_large_binary(kind):
        return "bytes"
    if types.is_string(kind) or types.is_large_string(kind):
        return "names"
    if types.is_struct(kind) and {"bytes", "path"} <= {field.name for field in kind}:
        return "both"
    return None


_NAMES = ("path", "image", "image_path", "file_name", "filename", "file", "url", "uri")
"""Usual names of columns with paths."""


def _image_column(name: str, schema: Any) -> str:
    """The only column with bytes, or else the only one with paths by its name."""
    held = {field.name: _holds(field.type) for field in schema}
    binary = [column for column, kind in held.items() if kind in ("bytes", "both")]
    names = [column for column in _NAMES if held.get(column) == "names"]
    found = binary or names
    if len(found) != 1:
        which = f"could be {' or '.join(found)}" if found else "is not known"
        raise ConfigError(
            f"{name}: the column of the photos {which}; give --image-column, one of "
            f"{', '.join(schema.names)}"
        )
    return found[0]


def _parquet_rows(part: Part) -> Iterator[tuple[str, Any]]:
    """Name and source of each row."""
    import pyarrow.parquet as pq

    columns = [part.image_column, *([part.key_column] if part.key_column else [])]
    with fsspec.open(part.names[0], "rb") as file:
        held = pq.ParquetFile(file)
        groups, row = _row_groups(held.metadata, part.start, part.stop)
        for batch in held.iter_batches(batch_size=64, row_groups=groups, columns=columns):
            for values in batch.to_pylist():
                if part.start <= row < part.stop:
                    yield _parquet_row(part, row, values)
                row += 1


def _row_groups(metadata: Any, start: int, stop: int) -> tuple[list[int], int]:
    """The row groups that hold these rows, and the first row of the first one."""
    groups: list[int] = []
    first = row = 0
    for number in range(metadata.num_row_groups):
        end = row + metadata.row_group(number).num_rows
        if row < stop and end > start:
            first = first if groups else row
            groups.append(number)
        row = end
    return groups, first


def _parquet_row(part: Part, row: int, values: dict[str, Any]) -> tuple[str, Any]:
    source = values[part.image_column]
    name = f"{part.names[0]}/{row}"
    if isinstance(source, dict):
        source = source["bytes"] if source["bytes"] is not None else source["path"]
    if isinstance(source, str):
        name = source
    if part.key_column is not None and values[part.key_column] is not None:
        name = str(values[part.key_column])
    return name, source


def local_folder(url: str) -> str | None:
    """The path of a folder on this machine; None for object storage."""
    fs, path = url_to_fs(url)
    return str(path) if isinstance(fs, LocalFileSystem) else None
