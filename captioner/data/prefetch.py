"""Reading ahead with threads."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from itertools import islice
from typing import TypeVar

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

    Closing the generator cancels the calls that have not started.

    Args:
        function: Called on each item; its exception is raised where its result would be yielded.
        items: Consumed as they are needed.
        ahead: Calls in flight, at least 1, the one that is waited for included.
        threads: Calls that run at the same time.
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

    Args:
        function: See `read_ahead`; its ``ImageError`` is the result of its item, and so is a lack
            of memory.
        items: Consumed as they are needed.
        size: Items per batch; the last batch may have fewer.
        threads: See `read_ahead`.
    """

    def call(item: T) -> tuple[T, R | ImageError]:
        try:
            return item, function(item)
        except ImageError as error:
            return item, error
        except MemoryError:
            path = getattr(item, "path", item)
            name = path if isinstance(path, str | os.PathLike) else "the photo"
            return item, ImageError(f"{name}: out of memory; make the image smaller")

    with closing(read_ahead(call, items, ahead=size + threads - 1, threads=threads)) as results:
        while batch := list(islice(results, size)):
            yield batch
