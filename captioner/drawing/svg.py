"""Drawings as SVG.

matplotlib's SVG holds letters either as outlines, which cannot be searched, or with the bare name
of a font that other machines lack. Here letters are text and the glyphs used are embedded;
characters that the font lacks fall back to the viewer's fonts (PNG and PDF show a box).
"""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from functools import lru_cache
from xml.sax.saxutils import escape

from captioner.drawing.fonts import FAMILY, font_file, printable
from captioner.drawing.primitives import OUTLINE, Box, Contour, Item, Picture, Text, encoded

# Always embedded: most figures then share one subset of the font, which is slow to make.
_COMMON = "".join(chr(code) for code in range(32, 127)) + "βé×·–−…▸⁻⁰¹²³⁴⁵⁶⁷⁸⁹"


def to_svg(width: int, height: int, background: str, title: str, items: Sequence[Item]) -> str:
    """Write a drawing as an SVG document."""
    from captioner.version import __version__

    size = f'width="{width}" height="{height}"'
    lines = [
        '<?xml version="1.0" encoding="UTF-8"?>',
        f'<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
        f'version="1.1" {size} viewBox="0 0 {width} {height}" '
        f"font-family=\"'{FAMILY}', Verdana, sans-serif\">",
        f"<title>{_xml(title)}</title>",
        f"<desc>captioner {__version__}</desc>",
        f"<style>{_font_faces(items)}</style>",
        f'<rect {size} fill="{background}"/>',
        *(_element(item) for item in items),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def _element(item: Item) -> str:
    if isinstance(item, Text):
        return _text(item)
    if isinstance(item, Box):
        return (
            f'<rect x="{item.left:g}" y="{item.top:g}" width="{item.right - item.left:g}" '
            f'height="{item.bottom - item.top:g}" fill="{item.colour}"/>'
        )
    return _picture(item) if isinstance(item, Picture) else _contour(item)


def _text(item: Text) -> str:
    anchor = {"left": "", "right": ' text-anchor="end"', "center": ' text-anchor="middle"'}
    bold = ' font-weight="700"' if item.bold else ""
    return (
        f'<text x="{item.x:g}" y="{item.y:g}" font-size="{item.size:g}" fill="{item.colour}"'
        f'{bold}{anchor[item.align]} xml:space="preserve">{_xml(item.text)}</text>'
    )


def _picture(item: Picture) -> str:
    data = base64.b64encode(encoded(item.image, "PNG", compress_level=4)).decode()
    title = f"<title>{_xml(item.title)}</title>" if item.title else ""
    return (
        f'<image x="{item.x}" y="{item.y}" width="{item.image.width}" '
        f'height="{item.image.height}" preserveAspectRatio="none" '
        f'xlink:href="data:image/png;base64,{data}">{title}</image>'
    )


def _contour(item: Contour) -> str:
    frame = f'x="{item.x}" y="{item.y}" width="{item.width}" height="{item.height}"'
    path = ""
    for line in item.lines:
        points = line * (item.width, item.height)
        path += "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points) + "Z"
    strokes = "".join(
        f'<path d="{path}" stroke="{colour}" stroke-width="{thick * item.hairline:g}"/>'
        for thick, colour in OUTLINE
    )
    return f'<svg {frame} overflow="hidden" fill="none" stroke-linejoin="round">{strokes}</svg>'


def _xml(text: str) -> str:
    return escape(printable(text))


def _font_faces(items: Sequence[Item]) -> str:
    faces = ""
    for bold in (False, True):
        texts = [item.text for item in items if isinstance(item, Text) and item.bold == bold]
        letters = "".join(sorted({*_COMMON, *printable("".join(texts))}))
        faces += (
            f"@font-face{{font-family:'{FAMILY}';font-weight:{700 if bold else 400};"
            f"src:url(data:font/woff;base64,{_font_subset(letters, bold)})}}"
        )
    return faces


@lru_cache(maxsize=16)
def _font_subset(letters: str, bold: bool) -> str:
    """The font with these letters only, as Base64 of WOFF."""
    import logging

    from fontTools import subset
    from fontTools.ttLib import TTFont

    options = subset.Options(hinting=False, drop_tables=["FFTM"], layout_features=["kern"])
    with TTFont(font_file(bold), recalcTimestamp=False) as font:
        subsetter = subset.Subsetter(options)
        subsetter.populate(text=letters)
        logger = logging.getLogger("fontTools.subset")
        level = logger.level
        logger.setLevel(logging.ERROR)
        try:
            subsetter.subset(font)
        finally:
            logger.setLevel(level)
        font.flavor = "woff"
        buffer = io.BytesIO()
        font.save(buffer, reorderTables=False)
    return base64.b64encode(buffer.getvalue()).decode()
