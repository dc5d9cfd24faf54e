"""A canvas that draws on a matplotlib figure, at positions in pixels from the upper left corner.

SVG and PDF files store text as text, lines as vectors, and pictures as JPEG. A picture is scaled
down only if its resolution is higher than needed.
"""

from __future__ import annotations

import io
import re
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, Literal

import contourpy
import numpy as np
from numpy.typing import NDArray
from PIL import Image

from captioner.drawing.backend import matplotlib  # must come before its modules
from captioner.drawing.picture_files import base64_uri, encoded
from captioner.drawing.style import Theme, printable
from captioner.version import __version__

# isort: split

from matplotlib.artist import Artist
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.patches import PathPatch, Rectangle
from matplotlib.path import Path
from matplotlib.transforms import Affine2D, Bbox, TransformedBbox

_SETTINGS: Any = {
    # A viewer of SVG uses the first font in this list that it has.
    "font.sans-serif": ["DejaVu Sans", "Verdana", "Arial"],
    "text.hinting": "none",
    "path.simplify": False,
    "pdf.fonttype": 42,
    "svg.fonttype": "none",
    "svg.hashsalt": "captioner",
}
_QUALITY = 88  # JPEG quality of pictures in SVG and PDF files
_LOCK = threading.Lock()  # matplotlib's settings are global


@contextmanager
def matplotlib_settings() -> Iterator[None]:
    """Apply captioner's settings of matplotlib in the block, then restore the user's settings.

    Only one thread at a time can enter such a block, because the settings are global.
    """
    with _LOCK, matplotlib.rc_context(), warnings.catch_warnings():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_SETTINGS)
        warnings.filterwarnings("ignore", "Glyph .* missing from font")  # shown as a box
        yield


class Canvas:
    """Text, boxes, pictures and outlines, drawn in order on a background."""

    def __init__(self, theme: Theme, text_size: float, dpi: float, max_dpi: float) -> None:
        """Create an empty canvas.

        Args:
            theme: Colours.
            text_size: Default text size (pixels).
            dpi: Number of pixels that make one inch in SVG and PDF files.
            max_dpi: Limit on the pixels per inch of photos in SVG and PDF files.
        """
        self.theme, self.text_size, self._max_dpi = theme, text_size, max_dpi
        self.figure = Figure(dpi=dpi, facecolor=theme.background, edgecolor="none")
        self._from_top = Affine2D()  # to coordinates from the bottom; `set_size` completes it
        self._down = self._from_top + Affine2D().scale(1 / dpi) + self.figure.dpi_scale_trans
        self._point = 72 / dpi  # points per pixel

    def set_size(self, width: int, height: int) -> None:
        """Set the width and height in pixels, after all drawing is done."""
        tiny = 1e-3  # matplotlib rounds down
        self.figure.set_size_inches(
            (width + tiny) / self.figure.dpi, (height + tiny) / self.figure.dpi
        )
        self._from_top.scale(1, -1).translate(0, height)

    def text(
        self,
        x: float,
        y: float,
        text: str,
        size: float | None = None,
        colour: str | None = None,
        *,
        bold: bool = False,
        align: Literal["left", "right", "center"] = "left",
    ) -> None:
        """Draw one line of text.

        Args:
            x: Left edge, right edge or centre of the text, depending on ``align``.
            y: Baseline of the text.
            text: The text. Characters that cannot be printed become spaces.
            size: Text size (pixels). None selects the canvas's default.
            colour: Colour (#rrggbb). None selects the theme's text colour.
            bold: Draw bold letters.
            align: The part of the text that is at ``x``.
        """
        if text := printable(text).rstrip():
            font = FontProperties(
                family="sans-serif",
                weight="bold" if bold else "normal",
                size=self._point * (size or self.text_size),
            )
            self.figure.text(
                x, y, text, color=colour or self.theme.text, ha=align, va="baseline",
                parse_math=False, transform=self._down, fontproperties=font, zorder=self._order(),
            )  # fmt: skip

    def box(self, left: float, top: float, right: float, bottom: float, colour: str) -> None:
        """Draw a filled rectangle."""
        size = right - left, bottom - top
        self._add(Rectangle((left, top), *size, facecolor=colour, linewidth=0, snap=False))

    def bar(self, box: tuple[int, int, int, int], share: float, fill: str) -> None:
        """Draw a horizontal bar, and fill a share of it from the left.

        Args:
            box: Left, top, right and bottom edges.
            share: The share, 0 to 1. If it is 0 or NaN, nothing is filled.
            fill: Colour of the filled part.
        """
        left, top, right, bottom = box
        self.box(left, top, right, bottom, self.theme.track)
        if share > 0:
            length = max(round((right - left) * min(share, 1.0)), 1)
            self.box(left, top, left + length, bottom, fill)

    def picture(self, x: int, y: int, image: Image.Image, title: str) -> None:
        """Draw a picture with its upper left corner at ``x``, ``y``.

        ``title`` is the text alternative of the picture in SVG files.
        """
        self._add(_Picture(x, y, image, title, min(1.0, self._max_dpi / self.figure.dpi)))

    def outline(
        self, x: int, y: int, size: tuple[int, int], mask: NDArray[np.bool_], hairline: float
    ) -> None:
        """Draw the border of a mask over a picture.

        Args:
            x: Left edge of the picture.
            y: Top edge of the picture.
            size: Width and height of the picture.
            mask: The mask, (H, W). True is inside the border.
            hairline: Unit of the line's thickness (pixels).
        """
        padded = np.pad(np.asarray(mask, dtype=np.float32), 1)
        # The line runs halfway between pixels inside and outside the mask. Pixel i of the mask is
        # pixel i + 1 of the padded mask, and its centre is at i + 0.5.
        lines = [
            np.clip((np.asarray(line) - 0.5) / mask.shape[::-1], 0.0, 1.0)
            for line in contourpy.contour_generator(z=padded).lines(0.5)
        ]
        # A white line with a black border stands out on any photo.
        for thick, colour in ((3.6, "#000000"), (1.6, "#ffffff")) if lines else ():
            paths = (Path(line * size + (x, y), closed=True) for line in lines)
            patch = PathPatch(
                Path.make_compound_path(*paths),
                fill=False, edgecolor=colour, linewidth=thick * hairline * self._point,
                joinstyle="round",
            )  # fmt: skip
            self._add(patch)
            patch.set_clip_box(TransformedBbox(Bbox.from_bounds(x, y, *size), self._down))

    def _add(self, artist: Artist) -> None:
        """Add a shape to the figure, above everything that was drawn before."""
        artist.set(transform=self._down, zorder=self._order())
        self.figure.add_artist(artist)

    def _order(self) -> int:
        """Return the next place in the drawing order, which is also the reading order of an SVG."""
        return len(self.figure.get_children())


class _Picture(Artist):
    """An RGB picture in a matplotlib figure, at whole pixels."""

    def __init__(self, x: int, y: int, image: Image.Image, title: str, shrink: float) -> None:
        """Place a picture with its upper left corner at ``x``, ``y`` (pixels).

        ``title`` is the text alternative of the picture in SVG files.

        In SVG and PDF files, its width and height are multiplied by ``shrink``.
        """
        super().__init__()
        self.x, self.y, self.image, self.title, self.shrink = x, y, image, title, shrink

    def jpeg(self) -> tuple[bytes, tuple[int, int]]:
        """Return the JPEG data for SVG and PDF files, and its width and height."""
        small = self.image
        if self.shrink < 1:
            small = small.resize([max(1, round(side * self.shrink)) for side in small.size])
        return encoded(small, "JPEG", quality=_QUALITY, optimize=True), small.size

    def draw(self, renderer: Any) -> None:
        """Draw the picture with a matplotlib renderer, or write it as an element of an SVG file."""
        width, height = self.image.size
        corners = [(self.x, self.y + height), (self.x + width, self.y)]
        (left, bottom), (right, top) = self.get_transform().transform(corners)
        if (writer := getattr(renderer, "writer", None)) is not None:
            place = {"x": left, "y": renderer.height - top}
            place |= {"width": right - left, "height": top - bottom}
            shown = {name: f"{value:.6g}" for name, value in place.items()}
            uri = {"xlink:href": base64_uri("jpeg", self.jpeg()[0])}
            writer.start("image", **shown, attrib=uri)
            writer.element("title", printable(self.title))
            writer.end("image")
            return
        pixels = np.asarray(self.image.convert("RGBA"))[::-1].copy()  # from the bottom up
        context = renderer.new_gc()
        renderer.draw_image(context, left, bottom, pixels)
        context.restore()


def to_image(figure: Figure) -> Image.Image:
    """Render a figure as an antialiased RGB picture."""
    with matplotlib_settings():
        canvas: Any = FigureCanvasAgg(figure)
        canvas.draw()
        return Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB")


def to_vectors(figure: Figure, kind: str, title: str) -> bytes:
    """Return the content of an ``svg`` or ``pdf`` file.

    The file contains no date, so that equal figures produce equal files.
    """
    buffer = io.BytesIO()
    date = "Date" if kind == "svg" else "CreationDate"
    about = {"Title": printable(title), "Creator": f"captioner {__version__}", date: None}
    with matplotlib_settings():
        figure.savefig(buffer, format=kind, dpi="figure", facecolor="auto", metadata=about)
    if kind == "svg":
        return buffer.getvalue()
    pictures = [one.jpeg() for one in figure.get_children() if isinstance(one, _Picture)]
    return _with_jpeg(buffer.getvalue(), pictures)


def _with_jpeg(pdf: bytes, pictures: Sequence[tuple[bytes, tuple[int, int]]]) -> bytes:
    """Replace the images in a PDF, in order, by JPEG data, because matplotlib cannot write JPEG.

    Each picture is a pair of its JPEG data, and its width and height.
    """
    start = int(pdf.rsplit(b"startxref\n", 1)[1].split()[0])
    table, remaining, moved = pdf[start:], iter(pictures), {}
    offsets = sorted(int(line[:10]) for line in table.splitlines() if line.endswith(b" n "))
    result = pdf[: offsets[0]]
    for begin, end in pairwise([*offsets, start]):
        moved[begin], part = len(result), pdf[begin:end]
        if b"/Subtype /Image" in part[:200]:
            data, size = next(remaining)
            part = (
                b"%s 0 obj\n<< /Type /XObject /Subtype /Image /ColorSpace /DeviceRGB "
                b"/BitsPerComponent 8 /Filter /DCTDecode /Width %d /Height %d /Length %d >>\n"
                b"stream\n%s\nendstream\nendobj\n"
            ) % (part.split(maxsplit=1)[0], *size, len(data), data)
        result += part
    table = re.sub(rb"\d{10}(?= \d{5} n )", lambda at: b"%010d" % moved[int(at[0])], table)
    return result + table.replace(b"startxref\n%d" % start, b"startxref\n%d" % len(result))
