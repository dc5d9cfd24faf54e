"""Functions that run a task for many items on a Ray cluster, even if worker processes are lost.

If a worker process dies, Ray passes its item to another process. If this happens more than
`RETRIES` times for the same item, the job fails. The process that starts the job is called the
driver. Ray is imported inside functions, because `cluster` must first decide whether Ray may accept
connections from other machines.
"""

from __future__ import annotations

import functools
import math
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from captioner.bulk.options import RayOptions
from captioner.errors import CaptionerError, DataError
from captioner.memory import keep_freed_memory
from captioner.messages import first_line

RETRIES = 20
"""Number of times that an item is passed to another process because its process died. At the next
death, the job fails."""

Item = TypeVar("Item")
Outcome = TypeVar("Outcome")


def run_on_cluster(
    task: Callable[[Item], Outcome],
    items: Sequence[Item],
    workers: RayOptions,
    *,
    ordered: bool = False,
) -> Iterator[Outcome]:
    """Run a task for every item on the connected cluster, and yield the results.

    Each process keeps its copy of the task, including the model that the task has loaded.

    Args:
        task: A callable that can be pickled. It receives an item and returns a result.
        items: The items. The task is called once for each item.
        workers: Number of processes, and number of CPUs and GPUs of each process.
        ordered: Yield results in the order of the items, not in the order in which they finish.

    Raises:
        DataError: The task raised a CaptionerError or OSError, or processes died too often.
    """
    import ray
    from ray import cloudpickle

    count = workers.workers or _room(workers)
    # max_calls=0 keeps a process, with its loaded model, for the next item, even on a GPU.
    remote = ray.remote(max_calls=0)(_process).options(
        name=type(task).__name__,
        num_cpus=workers.worker_cpus,
        num_gpus=workers.worker_gpus,
        max_retries=RETRIES,
    )
    given = ray.put(cloudpickle.dumps(task)), str(Path.cwd())
    running: dict[Any, int] = {}
    done: dict[int, tuple[Any, str]] = {}
    submitted = yielded = 0
    try:
        while yielded < len(items):
            # With ``ordered``, finished items wait until the items before them are finished. To
            # limit how many wait, at most 2 * count items after the next result are submitted.
            while len(running) < count and submitted < min(len(items), yielded + 2 * count):
                running[remote.remote(*given, items[submitted])] = submitted
                submitted += 1
            [ready], _ = ray.wait(list(running))
            done[running.pop(ready)] = ray.get(ready)
            while done and (yielded in done or not ordered):
                found, problem = done.pop(yielded if ordered else next(iter(done)))
                if problem:
                    raise DataError(problem)
                yield found
                yielded += 1
    except ray.exceptions.RayError as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[-1]
        if isinstance(error, ray.exceptions.WorkerCrashedError | ray.exceptions.NodeDiedError):
            reason = f"workers died more than {RETRIES} times on the same photos"
        raise DataError(
            f"the Ray job failed ({reason}); if memory ran out, use a smaller --batch-size or "
            "fewer --workers, then continue the job (finished parts are kept)"
        ) from error


def _process(task: bytes, folder: str, item: Any) -> tuple[Any, str]:
    """Return the result of the task for an item and an empty text, or None and an error message.

    ``task`` is the pickled task, and ``folder`` is the working folder of the driver, the process
    that started the job.

    This function runs in a process of the cluster. It returns errors as text, because Ray would
    turn an exception into a traceback.
    """
    try:
        return _loaded(task, folder)(item), ""
    except CaptionerError as error:
        return None, str(error)
    except OSError as error:
        return None, f"{socket.gethostname()}: {error}"


@functools.lru_cache(maxsize=1)
def _loaded(task: bytes, folder: str) -> Callable[[Any], Any]:
    """Load the task from its pickled bytes, and change to the driver's working folder.

    The driver is the process that started the job. A process loads the task once, and then calls
    it for item after item.
    """
    keep_freed_memory(threads=True)  # as the command line does
    if Path(folder).is_dir():
        os.chdir(folder)
    from ray import cloudpickle

    loaded: Callable[[Any], Any] = cloudpickle.loads(task)  # trusted, as it comes from the driver
    return loaded


def _room(workers: RayOptions) -> int:
    """Return the number of worker processes that the cluster has room for, but at least 1."""
    import ray

    held, needed = ray.cluster_resources(), {"CPU": workers.worker_cpus, "GPU": workers.worker_gpus}
    room = [held.get(kind, 0) / each for kind, each in needed.items() if each]
    return max(1, int(min(room, default=1)))


@contextmanager
def cluster(options: RayOptions) -> Iterator[None]:
    """Connect to a Ray cluster, or start a cluster on this machine with room for the workers.

    Raises:
        DataError: The cluster at this address cannot be reached.
    """
    address = options.ray_address or os.environ.get("RAY_ADDRESS") or "local"
    # Give workers the same priority as the plain command. With Ray's default niceness of 15, they
    # get hardly any processor time while other programs are busy.
    os.environ.setdefault("RAY_worker_niceness", "0")
    settings: dict[str, Any] = {}
    if address == "local":
        # Ray has no authentication, so it must listen on 127.0.0.1 only. This variable is meant for
        # systems with a firewall dialog and has that effect. Ray reads it during its import.
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
        wanted = math.ceil((options.workers or 0) * options.worker_cpus)
        settings = {"include_dashboard": False, "num_cpus": max(os.cpu_count() or 1, wanted)}
    import ray

    try:
        ray.init(address=address, logging_level="ERROR", log_to_driver=False, **settings)
    except (ConnectionError, ValueError, TimeoutError) as error:
        raise DataError(
            f"the Ray cluster at {address} cannot be reached ({first_line(error)}); start one with "
            "'ray start --head', or leave out --ray-address to use this machine"
        ) from error
    try:
        yield
    finally:
        ray.shutdown()
