"""A drawing as a list of texts, boxes, pictures and contours, and the same drawing in every format.

Coordinates are pixels from the upper left corner. Pictures lie on whole pixels and are never
resampled: in PNG they are there pixel for pixel, in SVG and PDF they are embedded whole.
Everything else is vectors in SVG and PDF.

PNG and PDF are drawn by matplotlib. SVG is written here: matplotlib's would hold either outlines
of letters, which nobody can search, or the bare name of a font that other machines lack. Here the
letters are text and the font's letters that are used come along, so that it looks the same
everywhere; letters that the font does not have are left to the viewer's fonts, where PNG and PDF
have to draw a box.
"""

from __future__ import annotations

import base64
import io
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal
from xml.sax.saxutils import escape

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from captioner.errors import ConfigError
from captioner.visualization.lettering import FAMILY, drawable, font_file, printable

if TYPE_CHECKING:
    from matplotlib.figure import Figure as MatplotlibFigure

Align = Literal["left", "right", "center"]

_MAX_SIDE = 65_500  # pixels; the renderer counts with 16 bits
_MAX_PIXELS = 89_478_485  # what Pillow reads without a warning; twice that fills 5 GB
_OUTLINE = ((3.6, "#000000"), (1.6, "#ffffff"))  # width in hairlines: dark edges, light middle

# Whatever the reader's matplotlibrc says, a picture is the same.
_SETTINGS: Any = {
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
# Always in an SVG's font: most figures then share one part of it, which takes a while to cut out.
_USUAL = "".join(chr(code) for code in range(32, 127)) + "βé×·–−…▸⁻⁰¹²³⁴⁵⁶⁷⁸⁹"
_LOCK = threading.Lock()  # matplotlib's settings belong to the process


@dataclass(frozen=True)
class Text:
    """One line of text."""

    x: float
    y: float
    """Of the baseline."""
    text: str
    size: float
    colour: str
    bold: bool = False
    align: Align = "left"


@dataclass(frozen=True)
class Box:
    """A filled rectangle."""

    left: float
    top: float
    right: float
    bottom: float
    colour: str


@dataclass(frozen=True)
class Picture:
    """An RGB picture, pixel for pixel."""

    x: int
    y: int
    image: Image.Image
    title: str = ""
    """What it shows, for those who cannot see it."""


@dataclass(frozen=True)
class Contour:
    """The border of a mask over a picture, in two tones that show on light and on dark."""

    x: int
    y: int
    width: int
    height: int
    lines: list[NDArray[np.float64]]
    """Closed lines of (N, 2) x and y, 0 to 1 within the picture."""
    hairline: float


Item = Text | Box | Picture | Contour


@dataclass
class Drawing:
    """Items on a page, drawn one over the other."""

    width: int
    height: int
    paper: str
    title: str = ""
    items: list[Item] = field(default_factory=list)

    def __post_init__(self) -> None:
        check_size(self.width, self.height)

    def image(self) -> Image.Image:
        """The drawing as an RGB picture."""
        from matplotlib.backends.backend_agg import FigureCanvasAgg

        with _settings():
            canvas: Any = FigureCanvasAgg(self._figure())
            canvas.draw()
            pixels = np.asarray(canvas.buffer_rgba())
        return Image.fromarray(np.ascontiguousarray(pixels[..., :3]))

    def pdf(self) -> bytes:
        """The drawing as one page; a pixel is a point of 1/72 inch."""
        from matplotlib.backends.backend_pdf import FigureCanvasPdf

        buffer = io.BytesIO()
        about = {"Title": printable(self.title), "Creator": "captioner", "CreationDate": None}
        with _settings():
            canvas: Any = FigureCanvasPdf(self._figure())
            canvas.print_pdf(buffer, metadata=about)
        return buffer.getvalue()

    def svg(self) -> str:
        """The drawing as SVG."""
        from captioner import __version__

        size = f'width="{self.width}" height="{self.height}"'
        lines = [
            '<?xml version="1.0" encoding="UTF-8"?>',
            f'<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
            f'version="1.1" {size} viewBox="0 0 {self.width} {self.height}" '
            f"font-family=\"'{FAMILY}', Verdana, sans-serif\">",
            f"<title>{_xml(self.title)}</title>",
            f"<desc>captioner {__version__}</desc>",
            f"<style>{self._font_faces()}</style>",
            f'<rect {size} fill="{self.paper}"/>',
            *(_SVG[type(item)](item) for item in self.items),
            "</svg>",
        ]
        return "\n".join(lines) + "\n"

    def _font_faces(self) -> str:
        faces = ""
        for bold in (False, True):
            texts = [i.text for i in self.items if isinstance(i, Text) and i.bold == bold]
            letters = "".join(sorted({*_USUAL, *printable("".join(texts))}))
            faces += (
                f"@font-face{{font-family:'{FAMILY}';font-weight:{700 if bold else 400};"
                f"src:url(data:font/woff;base64,{_font_part(letters, bold)})}}"
            )
        return faces

    def _figure(self) -> MatplotlibFigure:
        """The drawing for matplotlib, one pixel a point."""
        from matplotlib.figure import Figure as MatplotlibFigure

        inches = self.width / 72, self.height / 72
        figure = MatplotlibFigure(figsize=inches, dpi=72, facecolor=self.paper, edgecolor="none")
        figure.suppressComposite = True  # each panel stays a picture of its own
        for order, item in enumerate(self.items):
            for artist in _artists(figure, self.height, item):
                artist.set_zorder(order)
        return figure


def check_size(width: int, height: int) -> None:
    """Refuse a page that is too large to draw."""
    if max(width, height) > _MAX_SIDE or width * height > _MAX_PIXELS:
        raise ConfigError(
            f"the figure would have {width} x {height} pixels; give a smaller panel_size, or fewer "
            f"words ({_MAX_PIXELS:,} pixels and a side of {_MAX_SIDE:,} at most)"
        )


def contour(mask: NDArray[np.bool_]) -> list[NDArray[np.float64]]:
    """The border of a mask (H, W) as closed lines of (N, 2) x and y, 0 to 1 over the mask.

    A line runs half way between the pixels inside and the pixels outside; the mask ends at the
    photo's border.
    """
    from contourpy import contour_generator

    padded = np.pad(np.asarray(mask, dtype=np.float32), 1)
    lines = contour_generator(z=padded).lines(0.5)
    height, width = mask.shape
    # Pixel i of the mask is i + 1 of the padded one, and its centre lies at i + 0.5.
    return [np.clip((np.asarray(line) - 0.5) / (width, height), 0.0, 1.0) for line in lines]


@contextmanager
def _settings() -> Iterator[None]:
    """Give matplotlib our settings, one thread at a time; the caller's come back after."""
    import matplotlib

    with _LOCK, matplotlib.rc_context(_SETTINGS):
        yield


def _artists(figure: MatplotlibFigure, page_height: int, item: Item) -> list[Any]:
    """What matplotlib draws for an item; its y axis points up."""
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
        for thick, colour in _OUTLINE:
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


def _svg_text(item: Text) -> str:
    anchor = {"left": "", "right": ' text-anchor="end"', "center": ' text-anchor="middle"'}
    bold = ' font-weight="700"' if item.bold else ""
    return (
        f'<text x="{item.x:g}" y="{item.y:g}" font-size="{item.size:g}" fill="{item.colour}"'
        f'{bold}{anchor[item.align]} xml:space="preserve">{_xml(item.text)}</text>'
    )


def _svg_box(item: Box) -> str:
    return (
        f'<rect x="{item.left:g}" y="{item.top:g}" width="{item.right - item.left:g}" '
        f'height="{item.bottom - item.top:g}" fill="{item.colour}"/>'
    )


def _svg_picture(item: Picture) -> str:
    buffer = io.BytesIO()
    item.image.save(buffer, format="PNG", compress_level=4)
    data = base64.b64encode(buffer.getvalue()).decode()
    title = f"<title>{_xml(item.title)}</title>" if item.title else ""
    return (
        f'<image x="{item.x}" y="{item.y}" width="{item.image.width}" '
        f'height="{item.image.height}" preserveAspectRatio="none" '
        f'xlink:href="data:image/png;base64,{data}">{title}</image>'
    )


def _svg_contour(item: Contour) -> str:
    frame = f'x="{item.x}" y="{item.y}" width="{item.width}" height="{item.height}"'
    path = ""
    for line in item.lines:
        points = line * (item.width, item.height)
        path += "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points) + "Z"
    strokes = "".join(
        f'<path d="{path}" stroke="{colour}" stroke-width="{thick * item.hairline:g}"/>'
        for thick, colour in _OUTLINE
    )
    return f'<svg {frame} overflow="hidden" fill="none" stroke-linejoin="round">{strokes}</svg>'


_SVG: dict[type, Any] = {
    Text: _svg_text,
    Box: _svg_box,
    Picture: _svg_picture,
    Contour: _svg_contour,
}


def _xml(text: str) -> str:
    """Text inside an XML element; what XML cannot hold became a space."""
    return escape(printable(text))


@lru_cache(maxsize=16)
def _font_part(letters: str, bold: bool) -> str:
    """The font with these letters only, WOFF in Base64."""
    import logging

    from fontTools import subset
    from fontTools.ttLib import TTFont

    options = subset.Options(hinting=False, drop_tables=["FFTM"], layout_features=["kern"])
    with TTFont(font_file(bold), recalcTimestamp=False) as whole:
        chosen = subset.Subsetter(options)
        chosen.populate(text=letters)
        level = logging.getLogger("fontTools.subset").level
        logging.getLogger("fontTools.subset").setLevel(logging.ERROR)
        try:
            chosen.subset(whole)
        finally:
            logging.getLogger("fontTools.subset").setLevel(level)
        whole.flavor = "woff"
        buffer = io.BytesIO()
        whole.save(buffer, reorderTables=False)
    return base64.b64encode(buffer.getvalue()).decode()
