"""Captioning on a Ray cluster: many machines, or the cores and GPUs of one.

In a pipeline of your own, `Captions` is a callable class for ``Dataset.map_batches``:

    photos = ray.data.read_binary_files("s3://bucket/photos", include_paths=True)
    captioned = photos.map_batches(
        captioner.bulk.captions.Captions,
        batch_size=32,
        compute=ray.data.ActorPoolStrategy(size=4),
        num_gpus=0.5,
    )
    captioned.write_parquet("s3://bucket/captions")

`WritePart` is the task of ``captioner caption --engine ray``: the workers of
`captioner.bulk.cluster` caption one part at a time and write it before they take the next.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from functools import cached_property
from itertools import tee
from typing import Any, NamedTuple

from captioner.bulk.inputs import Part, RemoteFile, read_part
from captioner.bulk.job import Output, Row, decode_rows, encode_rows, row_schema
from captioner.errors import DataError
from captioner.hardware import Precision
from captioner.inference.captioner import Captioner, Result, load
from captioner.inference.folder import fingerprints
from captioner.options import ModelOptions, SearchOptions


class Captions:
    """Captions batches of photos; for ``Dataset.map_batches``.

    The columns of a batch are kept, except the photos themselves; these are added:

        image     name, unless the batch has names under another column
        caption   the best caption; null if the photo failed
        captions  all captions: text, words, log_prob, log_probs
        error     why the photo failed; null if it did not
    """

    def __init__(
        self,
        *folders: str,
        column: str = "bytes",
        names: str = "path",
        device: str = "auto",
        precision: Precision = "auto",
        batch_size: int = 32,
        **search: Any,
    ) -> None:
        """Load the model (see ``captioner.load``), once per actor.

        ``column`` has the photos: bytes, paths or arrays; ``names``, which need not exist, their
        names for error messages. ``search`` are fields of ``SearchOptions`` to change.
        """
        self.model = load(*folders, device=device, precision=precision)
        self.column, self.names = column, names
        self.options = {"batch_size": batch_size, **search}
        self.model.options(**search)  # an error before the first batch

    def __call__(self, batch: dict[str, Any]) -> Any:
        """A ``pyarrow.Table`` of a batch: columns as NumPy arrays, Ray's default."""
        import pyarrow as pa

        photos = list(batch[self.column])
        names = [str(one) for one in batch.get(self.names, range(len(photos)))]
        sources: list[Any] = [
            RemoteFile(name, photo) if isinstance(photo, bytes) else photo
            for name, photo in zip(names, photos, strict=True)
        ]
        results = self.model.stream(sources, **self.options)
        rows = [row(name, result) for name, result in zip(names, results, strict=True)]
        added = pa.Table.from_pylist(rows, schema=row_schema())
        best = [found["captions"][0]["text"] if "captions" in found else None for found in rows]
        added = added.append_column("caption", pa.array(best, pa.string()))
        if self.names in batch:
            added = added.drop_columns(["image"])
        kept = {name: list(values) for name, values in batch.items() if name != self.column}
        return pa.table(kept | dict(zip(added.column_names, added.columns, strict=True)))


def row(name: str, result: Result) -> Row:
    """A photo's captions, or its error, as JSON data."""
    if result.error is not None:
        return {"image": name, "error": str(result.error)}
    return {"image": name, "captions": [caption.as_dict() for caption in result.captions]}


# --- jobs ----------------------------------------------------------------------------------------


class Finished(NamedTuple):
    """A part that was written."""

    part: int
    photos: int
    failed: int
    error: str
    """The first failed photo's message; empty if there is none."""


@dataclass
class WritePart:
    """The task that captions a part of a job."""

    output: Output
    model: ModelOptions
    """What each worker loads: folders that all machines can read, or names of the hub. Batches
    never span two parts."""
    fingerprints: list[str]
    """Of the models here."""
    search: SearchOptions

    def __call__(self, part: Part) -> Finished:
        """Caption a part and write it, unless it is there."""
        name, output = self.output.part_name(part.number), self.output
        held = output.read(name)
        rows = self._rows(part) if held is None else decode_rows(held, output.format)
        if held is None:
            output.write(name, encode_rows(rows, output.format))
        errors = [one["error"] for one in rows if one.get("error") is not None]
        return Finished(part.number, len(rows), len(errors), next(iter(errors), ""))

    def _rows(self, part: Part) -> list[Row]:
        named, photos = tee(read_part(part))
        options = {"batch_size": self.model.batch_size, **vars(self.search)}
        results = self.captioner.stream((source for _, source in photos), **options)
        return [row(name, result) for (name, _), result in zip(named, results, strict=True)]

    @cached_property
    def captioner(self) -> Captioner:
        """The model, checked to be the driver's."""
        model = self.model
        if fingerprints(model.model) != self.fingerprints:
            raise DataError(
                f"{socket.gethostname()} has another model than the machine that started the job; "
                "install the same captioner, and give models in a shared folder"
            )
        return load(*model.model, device=model.device, precision=model.precision)
