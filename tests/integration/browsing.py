"""Helpers for browser tests."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from playwright.sync_api import Page as Tab


def drawn(tab: Tab) -> NDArray[np.int64]:
    """The pixels of the canvas."""
    size, values = tab.evaluate(
        """() => {
            const canvas = document.querySelector(".stage canvas");
            const {data} = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
            return [[canvas.height, canvas.width], [...data]];
        }"""
    )
    return np.array(values).reshape(*size, 4)[..., :3]
