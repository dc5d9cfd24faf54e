"""The positions of the regions of an attention map in a photo.

A convolution with symmetric padding does not centre its outputs on equal cells of its input. For
example, the first of ResNet's 7 regions is centred on the first of 224 pixels, not on pixel 16. All
code that draws or measures attention takes the positions from here:

    centre(i) = first + i * pitch             i = 0 to G - 1, per axis
    cell(i)   = the pixels nearest to centre(i), within start to stop

The outer cells therefore reach the edge of the part that the encoder sees. Pixels outside start to
stop belong to no region, because the encoder never sees them.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from captioner.errors import ConfigError

Array = NDArray[np.float64]


class Axis(NamedTuple):
    """The regions along one axis, in pixels of the encoder's input or as fractions of a photo."""

    first: float
    """Centre of the first region."""
    pitch: float
    """Distance between the centres of neighbouring regions."""
    start: float = 0.0
    """Beginning of the part that the encoder sees."""
    stop: float = 1.0
    """End of the part that the encoder sees."""

    @classmethod
    def even(cls, count: int, start: float = 0.0, stop: float = 1.0) -> Axis:
        """Return ``count`` equal cells between start and stop."""
        pitch = (stop - start) / max(count, 1)
        return cls(start + pitch / 2, pitch, start, stop)

    def mapped(self, scale: float, offset: float = 0.0) -> Axis:
        """Return the same regions in the coordinates ``scale * x + offset``."""
        first, start, stop = (scale * x + offset for x in (self.first, self.start, self.stop))
        return Axis(first, scale * self.pitch, start, stop)

    def centres(self, count: int) -> Array:
        """Return the centres of the regions, (count,)."""
        return self.first + self.pitch * np.arange(count, dtype=np.float64)

    def borders(self, count: int) -> Array:
        """Return the borders of the cells, (count + 1,).

        The outer borders are start and stop. All other borders are half way between two centres.
        """
        between = self.centres(count)[:-1] + self.pitch / 2
        borders: Array = np.concatenate([[self.start], between, [self.stop]])
        return borders.clip(self.start, self.stop)

    def middles(self, count: int) -> Array:
        """Return a point in each region that represents it, (count,).

        This is the centre. If a region reaches beyond start or stop, it is the middle of the part
        inside.
        """
        centres = self.centres(count)
        low, high = centres - self.pitch / 2, centres + self.pitch / 2
        middles: Array = (low.clip(self.start, self.stop) + high.clip(self.start, self.stop)) / 2
        return middles

    def samples(
        self, pixels: int, count: int, *, smooth: bool
    ) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
        """Return the positions of a photo's pixels among regions that are in fractions.

        Args:
            pixels: Number of pixels of the photo along the axis.
            count: Number of regions.
            smooth: Return fractional positions instead of the nearest region.

        Returns:
            The position of each pixel centre, (pixels,), from 0 at the first centre to count - 1 at
            the last one and constant beyond them; and whether the encoder sees the pixel,
            (pixels,).
        """
        points = (np.arange(pixels) + 0.5) / pixels
        seen = (points >= self.start) & (points < self.stop)
        sample = np.clip((points - self.first) / self.pitch, 0.0, count - 1.0)
        return (sample if smooth else np.floor(sample + 0.5)).astype(np.float32), seen


class Geometry(NamedTuple):
    """The regions along both axes."""

    y: Axis
    x: Axis

    @classmethod
    def even(
        cls,
        grid: tuple[int, ...],
        left: float = 0.0,
        top: float = 0.0,
        right: float = 1.0,
        bottom: float = 1.0,
    ) -> Geometry:
        """Return equal cells of a grid (Gh, Gw) over a box."""
        return cls(Axis.even(grid[0], top, bottom), Axis.even(grid[1], left, right))

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Geometry:
        """Return the geometry that `to_dict` described.

        Raises:
            ConfigError: A number is missing or impossible.
        """
        try:
            y, x = [Axis(*[float(data[axis][name]) for name in Axis._fields]) for axis in "yx"]
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"geometry {data!r:.80} lacks a number ({error})") from error
        for axis in (y, x):
            if not (math.isfinite(axis.first) and axis.pitch > 0 and axis.start < axis.stop):
                raise ConfigError(f"geometry has {axis}; it needs pitch > 0 and start < stop")
        return cls(y, x)

    def from_centre(self, grid: tuple[int, ...]) -> Array:
        """Return the squared distance of each region from the centre, (Gh, Gw).

        The unit is the side of the part that the encoder sees.
        """
        y, x = (
            (axis.middles(count) - (axis.start + axis.stop) / 2) / (axis.stop - axis.start)
            for axis, count in zip(self, grid, strict=True)
        )
        distances: Array = y[:, None] ** 2 + x**2
        return distances

    @property
    def covers_photo(self) -> bool:
        """True if the regions cover the whole photo. The geometry must be in fractions."""
        return all(axis.start < 1e-6 and axis.stop > 1 - 1e-6 for axis in self)

    def to_dict(self) -> dict[str, dict[str, float]]:
        """Return ``x`` and ``y``, each with ``first``, ``pitch``, ``start`` and ``stop``."""
        return {
            name: {key: round(value, 6) for key, value in axis._asdict().items()}
            for name, axis in (("x", self.x), ("y", self.y))
        }

    def placed(self, size: float, left: float, top: float, right: float, bottom: float) -> Geometry:
        """Return the regions in a photo, given the box that became the encoder's input.

        Args:
            size: Side of the square input, in the unit of this geometry.
            left: Left side of the box, as a fraction of the photo's width.
            top: Top of the box, as a fraction of the photo's height.
            right: Right side of the box.
            bottom: Bottom of the box.

        Returns:
            The regions as fractions of the photo's height and width.
        """
        return Geometry(
            self.y.mapped((bottom - top) / size, top), self.x.mapped((right - left) / size, left)
        )
