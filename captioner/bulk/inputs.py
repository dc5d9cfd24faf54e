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
"""Protocols of URLs in Parquet files."""
READERS = 8
"""Photos of object storage that are downloaded at the same time."""

Kind = Literal["photos", "parquet", "tar"]


@dataclass(frozen=True)
class Part:
    """What one output file holds."""

    number: int
    kind: Kind
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


def divide(
    inputs: Iterable[str],
    *,
    size: int,
    recursive: bool = False,
    image_column: str | None = None,
    key_column: str | None = None,
) -> list[Part]:
    """Divide photos, Parquet and tar files, folders of these, and patterns; paths or URLs.

    ``size`` photos or rows are a part. For columns see ``CaptionRayOptions``.

    Raises:
        ConfigError: A Parquet file has no such column, or several could be meant.
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
    """Whether a name is a path, not a URL."""
    return "://" not in name


@contextmanager
def _readable(name: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ImportError, ValueError) as error:  # pyarrow's errors are ValueErrors
        raise unreadable(name, error) from error


def _kind(name: str) -> Kind | None:
    """What a file is by its name; None: not an input."""
    if name.lower().endswith((".parquet", ".tar")):
        return "tar" if name.lower().endswith(".tar") else "parquet"
    kind = format_by_name(name)
    return "photos" if kind is not None and kind.decodable else None


def _find(inputs: Iterable[str], recursive: bool) -> Iterator[str]:
    """The files of the inputs, in their order; those of folders in natural order."""
    for given in inputs:
        for name in _expand(given):
            if not is_local(name) and _kind(name) is not None:
                yield name  # without a request for each of a long list
                continue
            with _readable(name):
                fs, path = url_to_fs(name)
                folder = fs.isdir(path)
                if not (folder or is_local(name) or fs.exists(path)):
                    raise DataError(f"{name}: no such file or folder; check the bucket and path")
                found = fs.find(path, maxdepth=None if recursive else 1) if folder else []
            if not folder:
                yield name
                continue
            inside = [one[len(path.rstrip("/")) :] for one in found]
            usable = [one for one in inside if _kind(one) is not None and "/." not in one]
            usable = without_twins(usable)
            if not usable:
                subfolders = "" if recursive else "; subfolders are not searched"
                raise DataError(f"{name}: no photos, Parquet or tar files{subfolders}")
            yield from (name.rstrip("/") + one for one in sorted(usable, key=natural))


def _expand(name: str) -> list[str]:
    """The names that match a pattern; a name that is none is returned as it is."""
    if not glob.has_magic(name) or (is_local(name) and os.path.lexists(name)):
        return [name]
    if is_local(name):
        found = expand_pattern(name)
    else:
        with _readable(name):
            fs, path = url_to_fs(name)
            found = [fs.unstrip_protocol(one) for one in fs.glob(path)]
    if not found:
        raise DataError(f"{name}: no file matches this pattern; check it and the folder")
    return sorted(found, key=natural)


_NAMES = ("path", "image", "image_path", "file_name", "filename", "file", "url", "uri")
"""Usual names of columns with paths."""


def _inspect_parquet(name: str, image: str | None, key: str | None) -> tuple[int, str]:
    """Number of rows, and the column of the photos."""
    import pyarrow.parquet as pq
    from pyarrow import types

    with fsspec.open(name, "rb") as file:
        held = pq.ParquetFile(file)
        schema, rows = held.schema_arrow, held.metadata.num_rows

    def is_bytes(kind: Any) -> bool:
        if types.is_struct(kind):  # as Hugging Face's
            return {"bytes", "path"} <= {field.name for field in kind}
        return bool(types.is_binary(kind) or types.is_large_binary(kind))

    with_bytes = [one.name for one in schema if is_bytes(one.type)]
    with_names = [one.name for one in schema if str(one.type) in ("string", "large_string")]
    choices = (image, " of bytes or text", with_bytes + with_names), (key, "", schema.names)
    for column, kind, columns in choices:
        if column is not None and column not in columns:
            raise ConfigError(f"{name} has no column {column}{kind}; it has {', '.join(columns)}")
    if image is not None:
        return rows, image
    found = with_bytes or [column for column in _NAMES if column in with_names]
    if len(found) != 1:
        which = f"could be {' or '.join(found)}" if found else "is not known"
        raise ConfigError(
            f"{name}: the column of the photos {which}; give --image-column, one of "
            f"{', '.join(schema.names)}"
        )
    return rows, found[0]


# --- reading -------------------------------------------------------------------------------------


Photo = tuple[str, Any]
"""Its name in the output, and what ``Captioner.stream`` reads."""


class RemoteFile:
    """A photo as an open binary file: its bytes, or the text of an error, which ``read`` raises."""

    def __init__(self, name: str, data: bytes | str) -> None:
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
    name = part.names[0]
    if part.kind == "tar":
        photos = _read_tar(name)
    else:
        given = _read_parquet(part) if part.kind == "parquet" else ((n, n) for n in part.names)
        photos = read_ahead(_open, given, ahead=2 * READERS, threads=READERS)
    try:
        yield from photos
    except (OSError, tarfile.TarError, ValueError) as error:  # pyarrow's errors are ValueErrors
        problem = f"the {part.kind} file is damaged here: {first_line(error)}"
        yield name, RemoteFile(name, problem)


def _open(photo: Photo) -> Photo:
    """A photo whose source is a path, URL or bytes."""
    name, source = photo
    if source is None:
        return name, RemoteFile(name, "no image in this row")
    if isinstance(source, bytes):
        return name, RemoteFile(name, source)
    if isinstance(source, RemoteFile) or is_local(source):
        return photo
    try:
        with fsspec.open(source, "rb") as file:
            return name, RemoteFile(name, file.read(MAX_STREAM_BYTES + 1))  # at most that is read
    except Exception as error:  # each protocol has its own
        return name, RemoteFile(name, first_line(error))


def _checked(name: str) -> str | RemoteFile:
    """A path or URL in a table, which may be a stranger's: what fetches nothing unexpected."""
    protocol = "" if is_local(name) else name.partition("://")[0]
    if is_local(name) and ".." in PurePath(name).parts:
        problem = "a path in a table may not contain .."
    elif "::" in name or (protocol and protocol not in STORAGE):
        problem = f"a table may name paths and object storage ({', '.join(STORAGE)}), no other URLs"
    else:
        return name
    return RemoteFile(name, f"{problem}; give --from-file a list of the photos instead")


def _read_tar(name: str) -> Iterator[Photo]:
    """The first photo of each sample; consecutive files up to the first dot are one sample."""
    last, blocks = None, 0

    class Member(tarfile.TarInfo):
        """Counts the blocks that should be a member's header and are damaged."""

        @classmethod
        def frombuf(cls, buf: Any, encoding: str, errors: str) -> Any:
            nonlocal blocks
            try:
                return super().frombuf(buf, encoding, errors)
            except tarfile.HeaderError:
                blocks += any(buf)  # zeros are the end of an archive
                raise

    with (
        fsspec.open(name, "rb") as file,
        # Blocks are skipped until the next member; the next of several archives is read too.
        tarfile.open(fileobj=file, mode="r|", ignore_zeros=True, tarinfo=Member) as tar,
    ):
        for member in chain(tar, [None]):
            if blocks:
                problem = f"the tar file is damaged before here: {counted(blocks, 'block')} skipped"
                yield name, RemoteFile(name, problem)
                blocks = 0
            if member is None:
                return
            folder, _, base = member.name.rpartition("/")
            sample = (folder, base.partition(".")[0])
            # No link: its target would be in what was read before.
            content = tar.extractfile(member) if member.isfile() else None
            if content is None or sample == last or format_by_name(member.name) is None:
                continue
            last = sample
            called = f"{name}/{member.name}"
            yield called, RemoteFile(called, content.read())


def _read_parquet(part: Part) -> Iterator[Photo]:
    """Name and source of each row; only the row groups that hold the part are read."""
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
