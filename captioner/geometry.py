"""The positions of the regions of an attention map in a photo.

A convolution with symmetric padding does not centre its outputs on equal cells of its input. For
example, the first of ResNet's 7 regions is centred on the first of 224 pixels, not on pixel 16. All
code that draws or measures attention takes the positions from this module:

    centre(i) = first + i * pitch             i = 0 to G - 1, per axis
    cell(i)   = the pixels nearest to centre(i), within start to stop

The outer cells therefore reach the edge of the part that the encoder sees. Pixels before start or
after stop do not belong to a region, because the encoder never sees them.
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
    """Beginning of the part of the photo that the encoder sees."""
    stop: float = 1.0
    """End of the part of the photo that the encoder sees."""

    @classmethod
    def even(cls, count: int, start: float = 0.0, stop: float = 1.0) -> Axis:
        """Return the axis for ``count`` equal cells (regions) between start and stop."""
        pitch = (stop - start) / max(count, 1)
        return cls(start + pitch / 2, pitch, start, stop)

    def mapped(self, scale: float, offset: float = 0.0) -> Axis:
        """Return the same regions in coordinates in which x becomes ``scale * x + offset``."""
        first, start, stop = (scale * x + offset for x in (self.first, self.start, self.stop))
        return Axis(first, scale * self.pitch, start, stop)

    def centres(self, count: int) -> Array:
        """Return the centres of ``count`` regions, (count,), in the unit of the axis."""
        return self.first + self.pitch * np.arange(count, dtype=np.float64)

    def borders(self, count: int) -> Array:
        """Return the borders between the cells of ``count`` regions along the axis, (count + 1,).

        The cell of a region contains the points that are nearest to its centre.

        The outer borders are start and stop. All other borders are half way between two centres.
        """
        between = self.centres(count)[:-1] + self.pitch / 2
        borders: Array = np.concatenate([[self.start], between, [self.stop]])
        return borders.clip(self.start, self.stop)

    def middles(self, count: int) -> Array:
        """Return one point in each region that the encoder sees, (count,).

        The point is the region's centre. If the region extends beyond start or stop, the point is
        the middle of the part between them.
        """
        centres = self.centres(count)
        low, high = centres - self.pitch / 2, centres + self.pitch / 2
        middles: Array = (low.clip(self.start, self.stop) + high.clip(self.start, self.stop)) / 2
        return middles

    def samples(
        self, pixels: int, count: int, *, smooth: bool
    ) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
        """Return the index of the region at each pixel along the axis, for drawing maps.

        The axis must be in fractions of the photo.

        Args:
            pixels: Number of pixels of the photo along the axis.
            count: Number of regions.
            smooth: Return fractional indices between the centres of two regions, instead of the
                index of the nearest region.

        Returns:
            The first array contains the index at each pixel, (pixels,), float32. It is 0 up to the
            centre of the first region, and count - 1 from the centre of the last region on. The
            second array is True at pixels that the encoder sees, (pixels,).
        """
        points = (np.arange(pixels) + 0.5) / pixels
        seen = (points >= self.start) & (points < self.stop)
        sample = np.clip((points - self.first) / self.pitch, 0.0, count - 1.0)
        return (sample if smooth else np.floor(sample + 0.5)).astype(np.float32), seen


class Geometry(NamedTuple):
    """The positions of the regions of an attention map, along both axes of a photo.

    The unit of both axes is a pixel of the encoder's input, or a fraction of the photo's height (y)
    and width (x).
    """

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
        """Return the geometry of Gh x Gw equal regions that fill a box.

        ``grid`` is (Gh, Gw), the number of rows and columns. The sides of the box have the unit of
        the geometry: pixels, or fractions of the photo (default: the whole photo).
        """
        return cls(Axis.even(grid[0], top, bottom), Axis.even(grid[1], left, right))

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Geometry:
        """Return the geometry for a dictionary from `to_dict`.

        Raises:
            ConfigError: A number is missing or invalid.
        """
        try:
            y, x = [Axis(*[float(data[axis][name]) for name in Axis._fields]) for axis in "yx"]
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"geometry is {data!r:.80}, in which a number is missing or invalid ({error}); "
                "use a dictionary from Geometry.to_dict()"
            ) from error
        for axis in (y, x):
            if not (math.isfinite(axis.first) and axis.pitch > 0 and axis.start < axis.stop):
                raise ConfigError(
                    f"geometry has an invalid {axis}; use a pitch above 0 and start below stop"
                )
        return cls(y, x)

    def from_centre(self, grid: tuple[int, ...]) -> Array:
        """Return the square of each region's distance from the centre of all regions, (Gh, Gw).

        ``grid`` is (Gh, Gw), the number of rows and columns of regions. Distances are fractions of
        the height and width of the part of the photo that the encoder sees.
        """
        y, x = (
            (axis.middles(count) - (axis.start + axis.stop) / 2) / (axis.stop - axis.start)
            for axis, count in zip(self, grid, strict=True)
        )
        distances: Array = y[:, None] ** 2 + x**2
        return distances

    @property
    def covers_photo(self) -> bool:
        """True if the regions cover the whole photo, so that the encoder sees all of it.

        The positions must be fractions of the photo's height and width, not pixels.
        """
        return all(axis.start < 1e-6 and axis.stop > 1 - 1e-6 for axis in self)

    def to_dict(self) -> dict[str, dict[str, float]]:
        """Return the positions of the regions as JSON values, rounded to 6 decimals.

        The keys ``x`` and ``y`` each contain ``first`` (centre of the first region), ``pitch``
        (distance between neighbouring centres), and ``start`` and ``stop`` (limits of the part that
        the encoder sees).
        """
        return {
            name: {key: round(value, 6) for key, value in axis._asdict().items()}
            for name, axis in (("x", self.x), ("y", self.y))
        }

    def placed(self, size: float, left: float, top: float, right: float, bottom: float) -> Geometry:
        """Convert the regions from the encoder's input to a photo in which the encoder sees a box.

        Args:
            size: Side of the encoder's square input, in the unit of this geometry.
            left: Left side of the box, as a fraction of the photo's width.
            top: Top of the box, as a fraction of the photo's height.
            right: Right side of the box, as a fraction of the photo's width.
            bottom: Bottom of the box, as a fraction of the photo's height.

        Returns:
            The regions as fractions of the photo's height and width.
        """
        return Geometry(
            self.y.mapped((bottom - top) / size, top), self.x.mapped((right - left) / size, left)
        )
