"""A matplotlib figure at fixed positions, in pixels from the upper left corner.

One pixel is one point (1/72 inch) of SVG and PDF, where text and lines are vectors and letters are
text. Pictures are never resampled; SVG embeds them as JPEG.
"""

from __future__ import annotations

import io
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import matplotlib
import numpy as np
from matplotlib.artist import Artist
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.patches import PathPatch, Rectangle
from matplotlib.path import Path
from matplotlib.transforms import Affine2D, Bbox, TransformedBbox
from numpy.typing import NDArray
from PIL import Image

from captioner.drawing.document import data_uri
from captioner.drawing.style import printable
from captioner.version import __version__

_OUTLINE = ((3.6, "#000000"), (1.6, "#ffffff"))
"""Strokes of an outline, as width in hairlines and colour: they stand out on any photo."""

# Set explicitly, so that the user's matplotlibrc has no effect.
_SETTINGS: Any = {
    "font.sans-serif": ["DejaVu Sans", "Verdana", "Arial"],  # the others in viewers of SVG
    "savefig.bbox": None,
    "savefig.transparent": False,
    "text.usetex": False,
    "text.antialiased": True,
    "text.hinting": "none",
    "path.sketch": None,
    "path.effects": [],
    "path.simplify": False,
    "pdf.fonttype": 42,
    "pdf.compression": 4,
    "pdf.use14corefonts": False,
    "pdf.inheritcolor": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "captioner",
}
_LOCK = threading.Lock()  # matplotlib's settings are global


@contextmanager
def matplotlib_settings() -> Iterator[None]:
    """Apply our settings, one thread at a time, and restore the caller's."""
    with _LOCK, matplotlib.rc_context(_SETTINGS), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font")  # drawn as a box
        yield


class Canvas:
    """Text, boxes, pictures and outlines, drawn in order on a background."""

    def __init__(self, background: str) -> None:
        self.figure = Figure(dpi=72, facecolor=background, edgecolor="none")
        self._down = Affine2D()  # pixels from the top, once the height is known
        self._count = 0

    def finish(self, width: int, height: int) -> None:
        """Set the size, after everything was added."""
        self.figure.set_size_inches(width / 72, height / 72)
        self._down.scale(1, -1).translate(0, height)

    def text(
        self,
        x: float,
        y: float,
        text: str,
        size: float,
        colour: str,
        *,
        bold: bool = False,
        align: Literal["left", "right", "center"] = "left",
    ) -> None:
        """One line of text; ``y`` is its baseline."""
        if text := printable(text).rstrip():
            weight = "bold" if bold else "normal"
            font = FontProperties(family="sans-serif", weight=weight, size=size)
            self.figure.text(
                x, y, text, color=colour, ha=align, va="baseline", parse_math=False,
                transform=self._down, fontproperties=font, zorder=self._order(),
            )  # fmt: skip

    def box(self, left: float, top: float, right: float, bottom: float, colour: str) -> None:
        """A filled rectangle."""
        corner, size = (left, top), (right - left, bottom - top)
        self._add(Rectangle(corner, *size, facecolor=colour, linewidth=0, snap=False))

    def bar(self, box: tuple[int, int, int, int], share: float, *, track: str, fill: str) -> None:
        """A horizontal bar, filled from the left; not at all if ``share`` is 0 or NaN."""
        left, top, right, bottom = box
        self.box(left, top, right, bottom, track)
        if share > 0:
            length = max(round((right - left) * min(share, 1.0)), 1)
            self.box(left, top, left + length, bottom, fill)

    def picture(self, x: int, y: int, image: Image.Image, title: str) -> None:
        """A picture with its alternative text."""
        self._add(_Picture(x, y, image, title))

    def outline(
        self, x: int, y: int, size: tuple[int, int], mask: NDArray[np.bool_], hairline: float
    ) -> None:
        """The border of a mask that covers the picture at this place."""
        area = Bbox.from_bounds(x, y, *size)
        lines = [Path(line * size + (x, y), closed=True) for line in mask_contours(mask)]
        if not lines:
            return
        for thick, colour in _OUTLINE:
            patch = PathPatch(
                Path.make_compound_path(*lines),
                fill=False, edgecolor=colour, linewidth=thick * hairline, joinstyle="round",
            )  # fmt: skip
            self._add(patch)
            patch.set_clip_box(TransformedBbox(area, self._down))

    def _add(self, artist: Artist) -> None:
        artist.set(transform=self._down, zorder=self._order())
        self.figure.add_artist(artist)

    def _order(self) -> int:
        """The next place in the order of drawing, in which screen readers read an SVG too."""
        self._count += 1
        return self._count


class _Picture(Artist):
    """An RGB picture at whole pixels."""

    def __init__(self, x: int, y: int, image: Image.Image, title: str) -> None:
        super().__init__()
        self.x, self.y, self.image, self.title = x, y, image, title

    def draw(self, renderer: Any) -> None:
        """Draw it with a renderer of matplotlib's, or write an element of an SVG."""
        if (writer := getattr(renderer, "writer", None)) is not None:
            sides = {"width": str(self.image.width), "height": str(self.image.height)}
            uri = {"xlink:href": data_uri(self.image, quality=92, subsampling=0)}
            writer.start("image", x=str(self.x), y=str(self.y), **sides, attrib=uri)
            writer.element("title", printable(self.title))
            writer.end("image")
            return
        figure: Any = self.get_figure()
        bottom = round(figure.bbox.height) - self.y - self.image.height
        pixels = np.asarray(self.image.convert("RGBA"))[::-1].copy()  # from the bottom up
        context = renderer.new_gc()
        renderer.draw_image(context, self.x, bottom, pixels)
        context.restore()


def mask_contours(mask: NDArray[np.bool_]) -> list[NDArray[np.float64]]:
    """Trace the border of a mask, half way between the pixels inside and outside.

    Args:
        mask: (H, W); closed at the border of the photo.

    Returns:
        Closed lines (N, 2) of x and y, 0 to 1 over the mask.
    """
    from contourpy import contour_generator

    padded = np.pad(np.asarray(mask, dtype=np.float32), 1)
    lines = contour_generator(z=padded).lines(0.5)
    height, width = mask.shape
    # Pixel i of the mask is i + 1 of the padded one, and its centre lies at i + 0.5.
    return [np.clip((np.asarray(line) - 0.5) / (width, height), 0.0, 1.0) for line in lines]


def to_image(figure: Figure) -> Image.Image:
    """Render a figure as an antialiased RGB picture."""
    with matplotlib_settings():
        canvas: Any = FigureCanvasAgg(figure)
        canvas.draw()
        pixels = np.asarray(canvas.buffer_rgba())
    return Image.fromarray(np.ascontiguousarray(pixels[..., :3]))


def to_vectors(figure: Figure, kind: Literal["svg", "pdf"], title: str) -> bytes:
    """The content of an SVG or PDF file, without a date."""
    buffer = io.BytesIO()
    date = "Date" if kind == "svg" else "CreationDate"
    about = {"Title": printable(title), "Creator": f"captioner {__version__}", date: None}
    with matplotlib_settings():
        figure.savefig(buffer, format=kind, dpi=72, facecolor="auto", metadata=about)
    # matplotlib measures SVG in points, with which browsers show it larger than the PNG.
    return buffer.getvalue().replace(b'pt"', b'px"', 2 if kind == "svg" else 0)
