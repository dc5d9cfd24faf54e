"""Progress bars."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tqdm import tqdm


def photo_bar(photos: Iterable[Any] | None = None, *, shown: bool = True, **options: Any) -> Any:
    """A progress bar of photos on standard error, if that is a terminal.

    Args:
        photos: What to iterate over; None: the caller calls ``update``.
        shown: False: never.
        **options: Of ``tqdm``, such as ``total``.
    """
    hidden = None if shown else True  # None: unless it is a terminal
    shown_as = {"unit": "photo", "disable": hidden, "dynamic_ncols": True}
    return tqdm(photos, **shown_as | options)
