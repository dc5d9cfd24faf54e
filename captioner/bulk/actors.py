"""Actors on a Ray cluster that process the items of a job, whatever is killed.

An item is a string, such as a part in JSON. Each actor takes one at a time; an item whose actor
died is given to another one, and after `RETRIES` deaths the job fails.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import sys
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import ray
import ray.data

from captioner.errors import CaptionerError, DataError, first_line
from captioner.hardware import keep_freed_memory

RETRIES = 20
"""How often an item is given to another actor after its actor died; then the job fails."""

Found = tuple[dict[str, Any], bytes]
"""A result: JSON data and bytes."""


class Workers(NamedTuple):
    """The actors of a job."""

    number: int | None = None
    """None: as many as the cluster's CPUs and GPUs allow."""
    cpus: float = 1
    """CPUs of each."""
    gpus: float = 0
    """GPUs of each; 0.5: two actors share one."""


class Actor(ABC):
    """Processes items; models are loaded with the first one that needs them."""

    def __init__(self, *, folder: str) -> None:
        """Take the driver's working folder, which relative names start at."""
        self.folder = folder
        self._started = False

    @abstractmethod
    def process(self, item: str) -> Iterator[Found]:
        """Yield the item's results.

        Raises:
            CaptionerError: The job cannot go on.
            OSError: Likewise.
        """

    def __call__(self, batch: Mapping[str, Sequence[Any]]) -> Iterator[dict[str, list[Any]]]:
        """Process a batch of one item; an error is the last row."""
        [item] = batch["item"]
        try:
            if not self._started:
                keep_freed_memory(threads=True)  # as the command line does
                if Path(self.folder).is_dir():
                    os.chdir(self.folder)
                self._started = True
            for found, data in self.process(str(item)):
                yield {"problem": [""], "found": [json.dumps(found)], "data": [data]}
        except (CaptionerError, OSError) as error:
            # Raised here, it would arrive as a traceback through Ray.
            where = "" if isinstance(error, CaptionerError) else f"{socket.gethostname()}: "
            yield {"problem": [f"{where}{error}"], "found": ["{}"], "data": [b""]}


@contextmanager
def cluster(address: str | None, workers: Workers) -> Iterator[None]:
    """Connect to a Ray cluster, or start one on this machine.

    Args:
        address: ``auto``, ``HOST:PORT``, or None: ``RAY_ADDRESS`` if set, otherwise this machine.
        workers: The actors that a cluster of this machine has to allow.

    Raises:
        DataError: There is no cluster at this address.
    """
    address = address or os.environ.get("RAY_ADDRESS") or "local"
    # As the plain command; Ray's default (15) starves beside other processes.
    os.environ.setdefault("RAY_worker_niceness", "0")
    resources: dict[str, Any] = {}
    if address == "local" and workers.number is not None:
        wanted = workers.number * workers.cpus
        resources = {"num_cpus": max(os.cpu_count() or 1, int(wanted) + (wanted % 1 > 0))}
    try:
        with _quiet():
            ray.init(
                address=address,
                logging_level="ERROR",
                log_to_driver=False,
                include_dashboard=False if address == "local" else None,
                **resources,
            )
    except (ConnectionError, ValueError, TimeoutError) as error:
        raise DataError(
            f"--ray-address is {address}: no connection ({first_line(error)}); start a cluster "
            "with ray start --head, or leave the option out for this machine"
        ) from error
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    try:
        yield
    finally:
        ray.shutdown()


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep messages for Ray's own developers off the terminal; failures arrive as exceptions."""
    if "RAY_BACKEND_LOG_LEVEL" in os.environ:
        yield
        return
    os.environ["RAY_BACKEND_LOG_LEVEL"] = "fatal"
    sys.stderr.flush()
    terminal, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)  # Ray prints there that it was given a level
    try:
        yield
    finally:
        del os.environ["RAY_BACKEND_LOG_LEVEL"]
        os.dup2(terminal, 2)
        os.close(terminal)
        os.close(nowhere)


def run_on_actors(
    actor: type[Actor],
    items: Sequence[str],
    workers: Workers,
    *,
    arguments: Mapping[str, Any],
    missing: Callable[[], str],
    again: str,
    ordered: bool = False,
) -> Iterator[Found]:
    """Process items on the connected cluster.

    Args:
        actor: Class of the actors.
        items: What they process.
        workers: How many there are, and what each may use.
        arguments: Of the class, besides the working folder.
        missing: What is left to do after a failure, for its message.
        again: How to continue then.
        ordered: Yield the results in the order of the items, not as they are finished.

    Yields:
        The results.

    Raises:
        DataError: An actor raised an error, or actors died too often.
    """
    if not items:
        return
    count = min(workers.number or _room(workers), len(items))
    source = ray.data.from_items([{"item": one} for one in items], override_num_blocks=len(items))
    with warnings.catch_warnings():
        # Until Ray 2.64 this is the only way to limit the retries, which Ray Data does not.
        warnings.simplefilter("ignore", ray.util.annotations.RayDeprecationWarning)
        results = source.map_batches(
            actor,
            batch_size=1,
            compute=ray.data.ActorPoolStrategy(size=count),
            fn_constructor_kwargs={**arguments, "folder": str(Path.cwd())},
            num_cpus=workers.cpus,
            num_gpus=workers.gpus,
            ray_remote_args_fn=lambda: {"max_task_retries": RETRIES},
        )
    results.context.execution_options.preserve_order = ordered
    try:
        for row in results.iter_rows():
            if row["problem"]:
                raise DataError(row["problem"])
            yield json.loads(row["found"]), row["data"]
    except ray.exceptions.RayError as error:
        raise DataError(
            f"the Ray job failed ({_reason(error)}; {missing()}). The finished ones are kept: "
            f"check the machines' memory, then {again}"
        ) from error


def _reason(error: Exception) -> str:
    """What went wrong, from one of Ray's long messages."""
    if isinstance(error, ray.exceptions.RayActorError) or "ActorDied" in str(error):
        return f"a worker died again and again; the limit per part is {RETRIES}"
    return (str(error).strip().splitlines() or [type(error).__name__])[-1]


def _room(workers: Workers) -> int:
    """How many actors the cluster has room for; at least 1."""
    held = ray.cluster_resources()
    room = [held.get("CPU", 0) / workers.cpus] if workers.cpus else []
    room += [held.get("GPU", 0) / workers.gpus] if workers.gpus else []
    return max(1, int(min(room, default=1)))
