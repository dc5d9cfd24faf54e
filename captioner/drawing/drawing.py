"""A drawing, and its renderers, which figures and animations share.

Figures are rendered by matplotlib as PNG and PDF, and written as SVG by ``svg``; frames of
animations are rendered by Pillow, which is fast and fits letters to whole pixels. Pictures are
never resampled; everything else is vectors in SVG and PDF.
"""

from __future__ import annotations

import io
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image, ImageDraw

from captioner.drawing.fonts import FAMILY, drawable, pillow_font, printable
from captioner.drawing.primitives import OUTLINE, Box, Contour, Item, Picture, Text
from captioner.drawing.svg import to_svg
from captioner.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure as MatplotlibFigure

_MAX_SIDE = 65_500  # pixels; matplotlib's renderer uses 16-bit coordinates
_MAX_PIXELS = 89_478_485  # what Pillow reads without a warning; twice that needs 5 GB

# Set explicitly, so that the user's matplotlibrc has no effect.
_RC_PARAMS: Any = {
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
}
_LOCK = threading.Lock()  # matplotlib's settings are global


@dataclass
class Drawing:
    """Items drawn in order on a background."""

    width: int
    height: int
    background: str
    title: str = ""
    items: list[Item] = field(default_factory=list)

    def __post_init__(self) -> None:
        check_size("figure", self.width, self.height)

    def image(self) -> Image.Image:
        """Render as an antialiased RGB picture."""
        from matplotlib.backends.backend_agg import FigureCanvasAgg

        with _rc_params():
            canvas: Any = FigureCanvasAgg(self._figure())
            canvas.draw()
            pixels = np.asarray(canvas.buffer_rgba())
        return Image.fromarray(np.ascontiguousarray(pixels[..., :3]))

    def frame(self) -> Image.Image:
        """Render as an RGB frame of an animation; contours are not supported."""
        image = Image.new("RGB", (self.width, self.height), self.background)
        draw = ImageDraw.Draw(image)
        for item in self.items:
            if isinstance(item, Picture):
                image.paste(item.image, (item.x, item.y))
            elif isinstance(item, Text):
                anchor = {"left": "ls", "right": "rs", "center": "ms"}[item.align]
                font = pillow_font(round(item.size), item.bold)
                draw.text((item.x, item.y), drawable(item.text), item.colour, font, anchor=anchor)
            elif isinstance(item, Box) and item.radius:
                _rounded_box(image, item)
            elif isinstance(item, Box):
                corners = (item.left, item.top, item.right - 1, item.bottom - 1)
                draw.rectangle(corners, item.colour)
            else:
                raise NotImplementedError("contours in animation frames")
        return image

    def pdf(self) -> bytes:
        """Render as a PDF page on which one pixel is one point (1/72 inch)."""
        from matplotlib.backends.backend_pdf import FigureCanvasPdf

        buffer = io.BytesIO()
        metadata = {"Title": printable(self.title), "Creator": "captioner", "CreationDate": None}
        with _rc_params():
            canvas: Any = FigureCanvasPdf(self._figure())
            canvas.print_pdf(buffer, metadata=metadata)
        return buffer.getvalue()

    def svg(self) -> str:
        """Write as SVG."""
        return to_svg(self.width, self.height, self.background, self.title, self.items)

    def _figure(self) -> MatplotlibFigure:
        """The drawing for matplotlib, one point per pixel."""
        from matplotlib.figure import Figure as MatplotlibFigure

        figure = MatplotlibFigure(
            figsize=(self.width / 72, self.height / 72),
            dpi=72,
            facecolor=self.background,
            edgecolor="none",
        )
        figure.suppressComposite = True  # keep each panel a separate picture
        for order, item in enumerate(self.items):
            for artist in _artists(figure, self.height, item):
                artist.set_zorder(order)
        return figure


def check_size(
    kind: str, width: int, height: int, max_side: int = _MAX_SIDE, max_pixels: int = _MAX_PIXELS
) -> None:
    """Raise ConfigError if a drawing is too large to render."""
    if max(width, height) > max_side or width * height > max_pixels:
        raise ConfigError(
            f"the {kind} would have {width} x {height} pixels (limits: {max_pixels:,} pixels, "
            f"{max_side:,} per side); use a smaller panel_size or fewer words"
        )


def check_suffix(kind: str, path: str | Path, suffixes: Sequence[str]) -> str:
    """Return the lower-case file extension; raise ConfigError if it is not supported."""
    suffix = Path(path).suffix.lower()
    if suffix not in suffixes:
        wanted = suffix or "a file without extension"
        raise ConfigError(f"{path}: cannot write {wanted} as {kind}; use {', '.join(suffixes)}")
    return suffix


@contextmanager
def _rc_params() -> Iterator[None]:
    """Apply our matplotlib settings, one thread at a time, and restore the caller's."""
    import matplotlib

    with _LOCK, matplotlib.rc_context(_RC_PARAMS):
        yield


def _artists(figure: MatplotlibFigure, page_height: int, item: Item) -> list[Any]:
    """Add an item to a matplotlib figure, whose y axis points up."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.lines import Line2D
    from matplotlib.patches import Rectangle
    from matplotlib.text import Text as MatplotlibText
    from matplotlib.transforms import Bbox, IdentityTransform

    pixels = IdentityTransform()
    if isinstance(item, Picture):
        y = page_height - item.y - item.image.height
        return [figure.figimage(np.asarray(item.image), item.x, y, origin="upper")]
    if isinstance(item, Box):
        corner = item.left, page_height - item.bottom
        size = item.right - item.left, item.bottom - item.top
        box = Rectangle(
            corner, *size, transform=pixels, facecolor=item.colour, linewidth=0, snap=False
        )
        return [figure.add_artist(box)]
    if isinstance(item, Contour):
        low = item.x, page_height - item.y - item.height
        clip = Bbox.from_bounds(*low, item.width, item.height)
        strokes = []
        for thick, colour in OUTLINE:
            for line in item.lines:
                across = item.x + line[:, 0] * item.width
                up = page_height - item.y - line[:, 1] * item.height
                stroke = Line2D(across, up, linewidth=thick * item.hairline, color=colour)
                stroke.set(transform=pixels, solid_joinstyle="round", solid_capstyle="round")
                stroke.set_clip_box(clip)
                strokes.append(figure.add_artist(stroke))
        return strokes
    weight = "bold" if item.bold else "normal"
    text = MatplotlibText(
        item.x, page_height - item.y, drawable(printable(item.text)),
        color=item.colour, ha=item.align, va="baseline", parse_math=False, transform=pixels,
        fontproperties=FontProperties(family=FAMILY, weight=weight, size=item.size),
    )  # fmt: skip
    return [figure.add_artist(text)]


def _rounded_box(image: Image.Image, box: Box) -> None:
    """Draw a box with antialiased round corners: drawn at four times its size, then reduced."""
    left, top = round(box.left), round(box.top)
    width, height = max(1, round(box.right) - left), max(1, round(box.bottom) - top)
    mask = Image.new("L", (4 * width, 4 * height))
    corners = (0, 0, 4 * width - 1, 4 * height - 1)
    ImageDraw.Draw(mask).rounded_rectangle(corners, 4 * box.radius, fill=255)
    mask = mask.resize((width, height), Image.Resampling.BOX)
    image.paste(Image.new("RGB", (width, height), box.colour), (left, top), mask)
