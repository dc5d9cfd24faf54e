"""Reading ahead with threads."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import TypeVar

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

    Yields:
        The results.
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
