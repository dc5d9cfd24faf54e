"""Functions that divide the photos of a bulk job into numbered parts, and read the parts.

Photos are read from a disk or from object storage. The same inputs are always divided into the same
parts, so any worker can compute any part at any time. There are three kinds of parts:

    photos      up to ``size`` photo files with consecutive names
    parquet     up to ``size`` consecutive rows of one Parquet file. A row has image bytes, a path,
                a URL, or Hugging Face's ``{"bytes", "path"}``
    tar         one tar file of a WebDataset, with any number of photos

Names can be URLs that fsspec supports (``s3://``, ``gs://``, ...). Credentials and endpoints come
from the same environment variables and files that the cloud's own tools use.
"""

from __future__ import annotations

import glob
import os
import tarfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, chain, groupby, islice
from pathlib import PurePath
from typing import Any, Literal

import fsspec
from fsspec.core import url_to_fs

from captioner.data.folders import expand_pattern, natural, without_twins
from captioner.data.formats import format_by_name
from captioner.data.images import MAX_STREAM_BYTES
from captioner.data.reading import read_ahead
from captioner.errors import ConfigError, DataError
from captioner.files import unreadable
from captioner.messages import counted, first_line

STORAGE = ("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "hdfs")
"""Protocols of URLs that are allowed in Parquet files."""
READERS = 8
"""Number of photos that are downloaded from object storage at the same time."""

Kind = Literal["photos", "parquet", "tar"]


@dataclass(frozen=True)
class Part:
    """A numbered group of photos. Their captions are written to one output file."""

    number: int
    """Number of the part in the job, from 0."""
    kind: Kind
    """Kind of the part (see the top of this file)."""
    names: tuple[str, ...]
    """Names of the photos, or the name of one Parquet or tar file."""
    bytes: int | None = None
    """Size of the Parquet or tar file, in bytes."""
    start: int = 0
    """First row of the part in a Parquet file."""
    stop: int = 0
    """First row after the part in a Parquet file."""
    image_column: str = ""
    """Column of the photos in a Parquet file."""
    key_column: str | None = None
    """Column of the photos' names in a Parquet file, or None without such a column."""

    @property
    def photos(self) -> int | None:
        """The number of photos. None for a tar file, because a tar file has no index."""
        if self.kind == "photos":
            return len(self.names)
        return self.stop - self.start if self.kind == "parquet" else None


def divide(
    inputs: Iterable[str],
    *,
    size: int,
    recursive: bool = False,
    image_column: str | None = None,
    key_column: str | None = None,
) -> list[Part]:
    """Divide the inputs of a job into parts, numbered groups of photos with one output file each.

    Args:
        inputs: Paths, URLs or patterns of photos, Parquet files, tar files and folders of these.
        size: Number of photos or rows in a part.
        recursive: Also search subfolders.
        image_column: Column with the photos in Parquet files. None: find it by its type and name.
        key_column: Column with the photos' names in Parquet files. None: use the photo's path, or
            the file and row number.

    Raises:
        ConfigError: A Parquet file does not have the column, or several columns may contain photos.
        DataError: A folder has no photos, or a Parquet or tar file cannot be read.
    """
    parts: list[Part] = []
    for kind, group in groupby(_find(inputs, recursive), lambda name: _kind(name) or "photos"):
        if kind == "photos":
            while names := tuple(islice(group, size)):
                parts.append(Part(len(parts), kind, names))
            continue
        for name in group:
            with _readable(name):
                fs, path = url_to_fs(name)
                length = int(fs.size(path))
                if kind == "tar":
                    parts.append(Part(len(parts), kind, (name,), length))
                    continue
                rows, image = _inspect_parquet(name, image_column, key_column)
            for start in range(0, rows, size):
                span = start, min(rows, start + size)
                parts.append(Part(len(parts), kind, (name,), length, *span, image, key_column))
    return parts


# --- finding -------------------------------------------------------------------------------------


def is_local(name: str) -> bool:
    """Return whether a name is a local path (not a URL)."""
    return "://" not in name


@contextmanager
def _readable(name: str) -> Iterator[None]:
    """Turn errors of the block into a DataError that reports that ``name`` cannot be read."""
    try:
        yield
    except (OSError, ImportError, ValueError) as error:  # pyarrow's errors are ValueErrors
        raise unreadable(name, error) from error


def _kind(name: str) -> Kind | None:
    """Return the kind of part that a file belongs to, by its name, or None for other files."""
    if name.lower().endswith((".parquet", ".tar")):
        return "tar" if name.lower().endswith(".tar") else "parquet"
    kind = format_by_name(name)
    return "photos" if kind is not None and kind.decodable else None


def _find(inputs: Iterable[str], recursive: bool) -> Iterator[str]:
    """Yield the files of the inputs in order. Files in a folder are in natural order.

    Raises:
        DataError: An input does not exist, cannot be listed or contains no photos.
    """
    for given in inputs:
        for name in _expand(given):
            if not is_local(name) and _kind(name) is not None:
                yield name  # not checked: one request per name would be slow for a long list
                continue
            with _readable(name):
                fs, path = url_to_fs(name)
                folder = fs.isdir(path)
                if not (folder or is_local(name) or fs.exists(path)):
                    raise DataError(f"{name} does not exist; check the bucket and path")
                found = fs.find(path, maxdepth=None if recursive else 1) if folder else []
            if not folder:
                yield name
                continue
            inside = [one[len(path.rstrip("/")) :] for one in found]
            usable = [one for one in inside if _kind(one) is not None and "/." not in one]
            usable = without_twins(usable)
            if not usable:
                remedy = "pass a folder with such files"
                remedy = remedy if recursive else "add --recursive to search subfolders"
                raise DataError(f"{name} contains no photos, Parquet files or tar files; {remedy}")
            yield from (name.rstrip("/") + one for one in sorted(usable, key=natural))


def _expand(name: str) -> list[str]:
    """Return the names that match a pattern, or the name itself if it is not a pattern."""
    if not glob.has_magic(name) or (is_local(name) and os.path.lexists(name)):
        return [name]
    if is_local(name):
        found = expand_pattern(name)
    else:
        with _readable(name):
            fs, path = url_to_fs(name)
            found = [fs.unstrip_protocol(one) for one in fs.glob(path)]
    if not found:
        raise DataError(f"{name} matches no file; check the pattern and the folder")
    return sorted(found, key=natural)


_NAMES = ("path", "image", "image_path", "file_name", "filename", "file", "url", "uri")
"""Usual names for a column that contains the paths of photos."""


def _inspect_parquet(name: str, image: str | None, key: str | None) -> tuple[int, str]:
    """Return the number of rows in a Parquet file, and the name of the column with photos.

    ``image`` and ``key`` are the columns that the user chose for photos and names, or None.

    Raises:
        ConfigError: A column is missing, or the column of the photos cannot be detected.
    """
    import pyarrow.parquet as pq
    from pyarrow import types

    with fsspec.open(name, "rb") as file:
        held = pq.ParquetFile(file)
        schema, rows = held.schema_arrow, held.metadata.num_rows

    def is_bytes(kind: Any) -> bool:
        """Return whether a column of this type contains the bytes of photos."""
        if types.is_struct(kind):  # Hugging Face data sets store photos in this form
            return {"bytes", "path"} <= {field.name for field in kind}
        return bool(types.is_binary(kind) or types.is_large_binary(kind))

    with_bytes = [one.name for one in schema if is_bytes(one.type)]
    with_names = [one.name for one in schema if str(one.type) in ("string", "large_string")]
    choices = (
        ("--image-column", image, " of bytes or text", with_bytes + with_names),
        ("--key-column", key, "", schema.names),
    )
    for option, column, kind, columns in choices:
        if column is not None and column not in columns:
            raise ConfigError(
                f"{name} has no column {column}{kind}; set {option} to one of {', '.join(columns)}"
            )
    if image is not None:
        return rows, image
    found = with_bytes or [column for column in _NAMES if column in with_names]
    if len(found) != 1:
        which = f"could be {' or '.join(found)}" if found else "is unknown"
        raise ConfigError(
            f"the column of the photos in {name} {which}; set --image-column to one of "
            f"{', '.join(schema.names)}"
        )
    return rows, found[0]


# --- reading -------------------------------------------------------------------------------------


Photo = tuple[str, Any]
"""The name of a photo in the output, and its source for ``Captioner.stream``."""


class RemoteFile:
    """A binary file in memory with a photo, or with an error message if the photo is missing."""

    def __init__(self, name: str, data: bytes | str) -> None:
        """Create a file with these bytes, or with an error message that ``read`` will raise."""
        self.name, self._data = name, data

    def read(self, size: int = -1) -> bytes:
        """Return the content from its beginning, with at most ``size`` bytes. -1 returns all bytes.

        Unlike other files, this file has no position. Call the method only once.

        Raises:
            OSError: The photo is missing.
        """
        if isinstance(self._data, str):
            raise OSError(self._data)
        return self._data if size < 0 else self._data[:size]


def read_part(part: Part) -> Iterator[Photo]:
    """Yield the photos of a part in order. Except in tar files, threads read photos ahead.

    For a damaged tar or Parquet file, yield the photos before the damage. Then yield a photo that
    raises an error when it is read.
    """
    name = part.names[0]
    if part.kind == "tar":
        photos = _read_tar(name)
    else:
        given = _read_parquet(part) if part.kind == "parquet" else ((n, n) for n in part.names)
        photos = read_ahead(_open, given, ahead=2 * READERS, threads=READERS)
    try:
        yield from photos
    except (OSError, tarfile.TarError, ValueError) as error:  # pyarrow's errors are ValueErrors
        reason = f"is damaged at this point ({first_line(error)})"
        problem = f"the {part.kind} file {reason}; copy or download the file again"
        yield name, RemoteFile(name, problem)


def _open(photo: Photo) -> Photo:
    """Return a photo with a source that can be read.

    URLs are downloaded. Bytes and errors become files in memory. Reading the file of an error
    raises the error.
    """
    name, source = photo
    if source is None:
        return name, RemoteFile(
            name, "the row has no photo; add the photo, or remove the row from the Parquet file"
        )
    if isinstance(source, bytes):
        return name, RemoteFile(name, source)
    if isinstance(source, RemoteFile) or is_local(source):
        return photo
    try:
        with fsspec.open(source, "rb") as file:
            return name, RemoteFile(name, file.read(MAX_STREAM_BYTES + 1))  # more is rejected later
    except Exception as error:  # each protocol raises errors of its own classes
        return name, RemoteFile(name, first_line(error))


def _checked(name: str) -> str | RemoteFile:
    """Return a path or URL from a Parquet file, or a file with an error if it is not allowed.

    The Parquet file may come from a stranger. Its entries must not make this program send requests
    to web servers, or leave a folder by ``..``. Absolute local paths are allowed.
    """
    protocol = "" if is_local(name) else name.partition("://")[0]
    if is_local(name) and ".." in PurePath(name).parts:
        problem = (
            "the path contains '..', which is not allowed in a Parquet file; list the photos in a "
            "file and pass it with --from-file"
        )
    elif "::" in name or (protocol and protocol not in STORAGE):
        problem = (
            f"the URL is not in object storage ({', '.join(STORAGE)}); copy the photo to object "
            "storage, or to a disk that all machines share"
        )
    else:
        return name
    return RemoteFile(name, problem)


def _read_tar(name: str) -> Iterator[Photo]:
    """Yield the first photo of each sample in a tar file, and an error for damaged blocks.

    Consecutive files with names that are equal up to the first dot form one sample.
    """
    last, blocks = None, 0

    class Member(tarfile.TarInfo):
        """A member of a tar file. While its header is read, damaged blocks are counted."""

        @classmethod
        def frombuf(cls, buf: Any, encoding: str, errors: str) -> Any:
            """Decode a header, and count the block as damaged if this is not possible."""
            nonlocal blocks
            try:
                return super().frombuf(buf, encoding, errors)
            except tarfile.HeaderError:
                blocks += any(buf)  # a block of zeros marks the end of an archive
                raise

    with (
        fsspec.open(name, "rb") as file,
        # ignore_zeros: continue after damaged blocks, and read all archives of a file that consists
        # of several archives.
        tarfile.open(fileobj=file, mode="r|", ignore_zeros=True, tarinfo=Member) as tar,
    ):
        for member in chain(tar, [None]):
            if blocks:
                skipped = counted(blocks, "damaged block")
                problem = (
                    f"the tar file has {skipped} before this point; copy or download the file again"
                )
                yield name, RemoteFile(name, problem)
                blocks = 0
            if member is None:
                return
            folder, _, base = member.name.rpartition("/")
            sample = (folder, base.partition(".")[0])
            # Links are skipped, because their targets are earlier in the stream.
            content = tar.extractfile(member) if member.isfile() else None
            if content is None or sample == last or format_by_name(member.name) is None:
                continue
            last = sample
            called = f"{name}/{member.name}"
            yield called, RemoteFile(called, content.read())


def _read_parquet(part: Part) -> Iterator[Photo]:
    """Yield the name and source of the photo in each row of a part.

    Only the row groups (sections of the Parquet file) that contain these rows are read.
    """
    import pyarrow.parquet as pq

    [file_name], key = part.names, part.key_column
    columns = [part.image_column, *([key] if key else [])]
    with fsspec.open(file_name, "rb") as file:
        held = pq.ParquetFile(file)
        groups = range(held.num_row_groups)
        ends = [*accumulate((held.metadata.row_group(n).num_rows for n in groups), initial=0)]
        needed = [n for n in groups if ends[n] < part.stop and ends[n + 1] > part.start]
        first = ends[needed[0]]
        batches = held.iter_batches(batch_size=64, row_groups=needed, columns=columns)
        rows = chain.from_iterable(batch.to_pylist() for batch in batches)
        wanted = islice(rows, part.start - first, part.stop - first)
        for row, values in enumerate(wanted, part.start):
            source, name = values[part.image_column], f"{file_name}/{row}"
            if isinstance(source, dict):
                bytes_ = source["bytes"]
                source = source["path"] if bytes_ is None else bytes_
            if isinstance(source, str):
                name, source = source, _checked(source)
            if key and values[key] is not None:
                name = str(values[key])
            yield name, source
