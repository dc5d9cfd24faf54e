"""Functions that read photos ahead in threads, singly or in batches, and show a progress bar."""

from __future__ import annotations

import io
import os
import sys
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from itertools import islice
from typing import Any, TypeVar

from captioner.errors import ImageError

T = TypeVar("T")
R = TypeVar("R")


def reader_threads() -> int:
    """Return the number of threads that read files."""
    return min(16, os.cpu_count() or 2)


def read_ahead(
    function: Callable[[T], R], items: Iterable[T], *, ahead: int, threads: int = 1
) -> Generator[R, None, None]:
    """Call a function on items like ``map``, but in threads that run ahead of the consumer.

    Results are yielded in the order of the items. An exception is raised in place of its result. At
    most ``ahead`` calls are in flight, including the call that the consumer waits for. Items are
    consumed only as needed. Closing the generator cancels the calls that have not started.
    """
    source = iter(items)
    pending: deque[Future[R]] = deque()
    with ThreadPoolExecutor(threads) as pool:
        try:
            while True:
                for item in islice(source, ahead - len(pending)):
                    pending.append(pool.submit(function, item))
                if not pending:
                    return
                yield pending.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)


def read_batches(
    function: Callable[[T], R], items: Iterable[T], size: int, *, threads: int = 2
) -> Generator[list[tuple[T, R | ImageError]], None, None]:
    """Call a function on items, such as photos, and yield the items with their results in batches.

    While the caller uses a batch, threads read the next batch (see `read_ahead`). If the function
    raises an ``ImageError``, the error becomes the result of the item. The last batch may contain
    fewer than ``size`` items.
    """

    def call(item: T) -> tuple[T, R | ImageError]:
        """Return an item with its result or its error."""
        try:
            return item, function(item)
        except ImageError as error:
            return item, error

    with closing(read_ahead(call, items, ahead=size + threads - 1, threads=threads)) as results:
        while batch := list(islice(results, size)):
            yield batch


def photo_bar(photos: Iterable[Any] | None = None, *, shown: bool = True, **options: Any) -> Any:
    """Return a progress bar that counts photos.

    If standard error is not a terminal, such as in a log file, the progress is a line per minute.

    Args:
        photos: Photos to iterate over. If this is None, the caller has to call ``update``.
        shown: Show the progress.
        **options: Options of tqdm.
    """
    from tqdm import tqdm  # imported here, because most callers show no progress

    class Lines(tqdm):  # type: ignore[type-arg]
        """Progress in lines, because a log cannot show a bar that is drawn again and again."""

        def display(self, msg: str | None = None, pos: int | None = None) -> None:  # noqa: ARG002
            """Write a line, unless the work has ended, which disables the bar."""
            if not self.disable:
                sys.stderr.write(f"{self}\n")

    how: dict[str, Any] = {"unit": "photo", "disable": not shown or sys.stderr is None} | options
    if how["disable"] or sys.stderr.isatty():
        return tqdm(photos, **{"dynamic_ncols": True} | how)
    lines: dict[str, Any] = {
        "bar_format": "{desc}{n_fmt} of {total_fmt} {unit}s, {rate_fmt}, {remaining} left",
        "delay": 60, "mininterval": 60, "maxinterval": 60, "miniters": 1, "leave": False,
        "file": io.StringIO(),  # tqdm.write would print the lines on standard error again
    }  # fmt: skip
    return Lines(photos, **lines | how)
