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

`caption_parts` runs the parts of a job, which ``captioner caption --engine ray`` creates, on the
workers of `captioner.bulk.cluster`: each captions one part at a time and writes it before it takes
the next.
"""

from __future__ import annotations

import dataclasses
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from captioner.bulk.cluster import Workers, run_on_cluster
from captioner.bulk.inputs import Part, RemoteFile, read_part
from captioner.bulk.job import JOB, Job, Output, Row, decode_rows, encode_rows, row_schema
from captioner.errors import DataError
from captioner.hardware import Precision
from captioner.inference.captioner import Captioner, Result, load
from captioner.inference.folder import SHIPPED_MODEL, fingerprint
from captioner.options import SearchOptions


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
        """Load the model; once per actor.

        Args:
            *folders: See ``captioner.load``, also for device and precision.
            column: Column of the photos: bytes, paths or arrays.
            names: Column of names for error messages; ignored if there is none.
            device: See above.
            precision: See above.
            batch_size: Photos that are captioned together.
            **search: Fields of ``SearchOptions`` to change.
        """
        self.model = load(*folders, device=device, precision=precision)
        self.column, self.names = column, names
        self.options = {"batch_size": batch_size, **search}
        self.model.options(**search)  # an error before the first batch

    def __call__(self, batch: dict[str, Any]) -> Any:
        """Caption a batch.

        Args:
            batch: Columns as NumPy arrays, Ray's default.

        Returns:
            A ``pyarrow.Table``.
        """
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


@dataclass(frozen=True)
class Model:
    """What a worker loads."""

    folders: tuple[str, ...] = ()
    """Model folders that every machine can read, or names of the hub; empty: the shipped model."""
    device: str = "auto"
    precision: Precision = "auto"

    def fingerprints(self) -> list[str]:
        """One for each folder."""
        return [fingerprint(folder) for folder in self.folders or [SHIPPED_MODEL]]


class Finished(NamedTuple):
    """A part that was written."""

    part: int
    photos: int
    failed: int
    error: str
    """The first failed photo's message; empty if there is none."""


def caption_parts(
    job: Job, model: Model, search: SearchOptions, *, batch_size: int, workers: Workers
) -> Iterator[Finished]:
    """Caption the missing parts of a job on the connected cluster.

    Args:
        job: From ``open_job``.
        model: What each worker loads.
        search: Search options.
        batch_size: Photos that are captioned together; a batch never spans two parts.
        workers: How many there are, and what each may use.

    Returns:
        The parts, as they are written.

    Raises:
        DataError: A part cannot be read or written, or workers died too often.
    """
    if model.device == "auto" and not workers.gpus:
        model = dataclasses.replace(model, device="cpu")  # not a GPU of others

    options = {"batch_size": batch_size, **vars(search)}
    task = WritePart(job.output, job.id, model, model.fingerprints(), options)
    return run_on_cluster(
        task, job.missing(), workers, missing=job.name_missing, again="give --resume"
    )


@dataclass
class WritePart:
    """The task."""

    output: Output
    job_id: str
    model: Model
    fingerprints: list[str]
    options: dict[str, Any]
    """Of ``Captioner.stream``."""

    def __call__(self, part: Part) -> Finished:
        """Caption a part and write it, unless it is there."""
        name, output = self.output.part_name(part.number), self.output
        held = output.read(name)
        if held is None:  # otherwise written just before the worker or the driver died
            rows = list(self._rows(part))
            if part.photos not in (None, len(rows)):
                raise DataError(
                    f"{part.names[0]} has changed while the job was running; start over with "
                    "--force"
                )
            owner = output.read(JOB)
            if owner is None or f'"{self.job_id}"'.encode() not in owner:
                raise DataError(f"{output.url}: another process has started over with --force")
            output.write(name, encode_rows(rows, output.format))
        else:
            rows = decode_rows(held, output.format)
        errors = [one["error"] for one in rows if one.get("error") is not None]
        return Finished(part.number, len(rows), len(errors), next(iter(errors), ""))

    def _rows(self, part: Part) -> Iterator[Row]:
        names: list[str] = []

        def sources() -> Iterator[Any]:
            for photo in read_part(part):
                names.append(photo.name)
                yield photo.source

        for number, result in enumerate(self.captioner.stream(sources(), **self.options)):
            yield row(names[number], result)

    @cached_property
    def captioner(self) -> Captioner:
        """The model, checked to be the driver's."""
        model = self.model
        if model.fingerprints() != self.fingerprints:
            raise DataError(
                f"{socket.gethostname()} has another model than the machine that started the job; "
                "install the same captioner, and give models in a shared folder"
            )
        return load(*model.folders, device=model.device, precision=model.precision)
