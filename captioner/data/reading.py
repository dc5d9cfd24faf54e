"""Reading photos: ahead in threads, in batches, and with a progress bar."""

from __future__ import annotations

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
    """Number of threads that read files."""
    return min(16, os.cpu_count() or 2)


def read_ahead(
    function: Callable[[T], R], items: Iterable[T], *, ahead: int, threads: int = 1
) -> Generator[R, None, None]:
    """``map`` in threads that run ahead of the consumer; results keep their order.

    An exception is raised where the result would be yielded. Items are consumed as they are needed:
    ``ahead`` calls are in flight, the one that is waited for included. Closing the generator
    cancels the calls that have not started.
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
    """Call a function on items, such as photos, in batches; while one is used, the next is read.

    An ``ImageError`` is the result of its item. See `read_ahead`; the last batch may have fewer
    items than ``size``.
    """

    def call(item: T) -> tuple[T, R | ImageError]:
        try:
            return item, function(item)
        except ImageError as error:
            return item, error

    with closing(read_ahead(call, items, ahead=size + threads - 1, threads=threads)) as results:
        while batch := list(islice(results, size)):
            yield batch


def photo_bar(photos: Iterable[Any] | None = None, *, shown: bool = True, **options: Any) -> Any:
    """A progress bar of photos on standard error, if that is a terminal; options are tqdm's.

    Without ``photos`` to iterate over, the caller calls ``update``.
    """
    from tqdm import tqdm  # here, for what shows no progress

    hidden = None if shown and sys.stderr is not None else True  # None: unless it is a terminal
    return tqdm(photos, **{"unit": "photo", "disable": hidden, "dynamic_ncols": True} | options)
