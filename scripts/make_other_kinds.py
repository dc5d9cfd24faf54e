"""Make images that are not photos, in one folder per kind, for ``captioner calibrate``.

From these images, a model learns to have no confidence in captions of images that are not photos.

    pip install fontawesomefree playwright      # and Chromium, and an emoji font
    python scripts/make_other_kinds.py PHOTOS FOLDER [--count 100]

Chromium renders pages, screenshots, icons, emoji, logos and diagrams. matplotlib draws charts.
Gradients, plain colours, noise and patterns are computed. Scans are made from pages. Drawings, very
blurred photos and very dark photos are made from PHOTOS. The same arguments produce the same
images, unless the versions of the programs change.

Each function that makes an image takes its random choices from the generator ``r``.
"""

from __future__ import annotations

import argparse
import io
import random
from collections.abc import Callable, Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from PIL import Image, ImageFilter, ImageOps

from captioner.data.images import open_image

_TEXT = """the of and report data model time year value price order account total invoice city
music travel results search settings help contact water energy market health school history world
method figure table section project team email password name address phone"""
_FONTS = ("serif", "sans-serif", "monospace", "cursive")
_CENTRED = "margin:0; display:grid; place-items:center; height:100vh;"
_EMOJI = [*range(0x1F300, 0x1F320), *range(0x1F400, 0x1F43F), *range(0x1F600, 0x1F645)]


def _text(r: random.Random, words: int) -> str:
    """Return random words as text."""
    return " ".join(r.choice(_TEXT.split()) for _ in range(words)).capitalize()


@cache
def _symbols() -> list[Path]:
    """Return the SVG files of all Font Awesome symbols."""
    import fontawesomefree

    folder = Path(fontawesomefree.__file__).parent / "static/fontawesomefree/svgs"
    return sorted(folder.rglob("*.svg"))


def _colour(r: random.Random, lowest: int = 0, highest: int = 255) -> str:
    """Return a random colour such as ``#09a1ff``. The limits apply to red, green and blue."""
    return "#" + "".join(f"{r.randint(lowest, highest):02x}" for _ in range(3))


# --- markup, rendered by Chromium ----------------------------------------------------------------


def page(r: random.Random) -> str:
    """Return the markup of a page of text with headings, and sometimes with columns or tables."""
    parts = []
    for _ in range(r.randint(3, 8)):
        parts.append(f"<h2>{_text(r, r.randint(2, 6))}</h2>" * r.randint(0, 1))
        parts.append(f"<p>{_text(r, r.randint(20, 120))}.</p>")
        if r.random() < 0.3:
            cells = "".join(f"<td>{_text(r, 1)}<td>{r.randint(1, 9999)}" for _ in range(4))
            parts.append("<table border=1>" + f"<tr>{cells}" * r.randint(2, 6) + "</table>")
    style = f"font: {r.randint(9, 20)}px {r.choice(_FONTS[:3])}; columns: {r.choice((1, 1, 2))}"
    return f"<body style='margin: {r.randint(10, 60)}px; {style}'>{''.join(parts)}"


def screenshot(r: random.Random) -> str:
    """Return the markup of a light or dark program window with a bar, buttons and cards."""
    ranges = ((0, 60), (180, 255)) if r.random() < 0.5 else ((225, 255), (0, 80))
    back, front, accent = (_colour(r, *each) for each in (*ranges, (30, 220)))
    button = "<button style='background:{}'>{}</button>"
    buttons = "".join(button.format(accent, _text(r, 1)) for _ in range(r.randint(2, 6)))
    items = "".join(
        f"<div style='border:1px solid {accent}; margin:6px; padding:{r.randint(4, 20)}px'>"
        f"<b>{_text(r, 2)}</b><br>{_text(r, r.randint(3, 20))}</div>"
        for _ in range(r.randint(3, 12))
    )
    style = f"margin:0; background:{back}; color:{front}; font: 14px {r.choice(_FONTS[1:3])}"
    return (
        f"<body style='{style}'>"
        f"<div style='background:{accent}; padding:10px'>{_text(r, 4)} {buttons}</div>"
        f"<div style='columns:{r.randint(1, 3)}'>{items}</div>"
    )


def icon(r: random.Random) -> str:
    """Return the markup of a Font Awesome symbol on a plain background."""
    svg = r.choice(_symbols()).read_text()
    fill, back = _colour(r), r.choice(("white", "black", _colour(r)))
    shape = f"<div style='width:{r.randint(25, 90)}vmin; fill:{fill}'>{svg}</div>"
    return f"<body style='{_CENTRED} background:{back}'>{shape}"


def emoji(r: random.Random) -> str:
    """Return the markup of one to four emoji."""
    signs = "".join(chr(r.choice(_EMOJI)) for _ in range(r.choice((1, 1, 2, 4))))
    size = r.randint(25, 80) // len(signs)
    style = f"background:{r.choice(('white', _colour(r)))}; font-size:{size}vmin"
    return f"<body style='{_CENTRED} {style}'>{signs}"


def logo(r: random.Random) -> str:
    """Return the markup of a logo: a shape, with a name next to it or below it."""
    radius = r.choice((0, 20, 50))
    shape = (
        f"<div style='width:{r.randint(15, 40)}vmin; height:{r.randint(15, 40)}vmin; "
        f"background:linear-gradient({r.randint(0, 360)}deg, {_colour(r)}, {_colour(r)}); "
        f"border-radius:{radius}%; transform:rotate({r.choice((0, 0, 45))}deg)'></div>"
    )
    name = f"<b style='font: bold {r.randint(6, 18)}vmin {r.choice(_FONTS)}'>{_text(r, 1)}</b>"
    return (
        f"<body style='margin:0; background:{r.choice(('white', _colour(r)))}; color:{_colour(r)}; "
        f"height:100vh; display:flex; gap:5vmin; align-items:center; justify-content:center; "
        f"flex-direction:{r.choice(('row', 'column'))}'>{shape}{name}"
    )


def diagram(r: random.Random) -> str:
    """Return the markup of a diagram: boxes with text, joined by lines."""
    boxes = [(r.randint(0, 80), r.randint(0, 85)) for _ in range(r.randint(4, 12))]
    lines = "".join(
        f"<line x1={a + 8} y1={b + 4} x2={c + 8} y2={d + 4} stroke=black stroke-width=0.4 />"
        for (a, b), (c, d) in pairwise(boxes)
    )
    shapes = "".join(
        f"<rect x={x} y={y} width=17 height=9 rx={r.choice((0, 2, 5))} fill='{_colour(r, 170)}' "
        f"stroke=black stroke-width=0.3 />"
        f"<text x={x + 1} y={y + 5} font-size=3>{_text(r, 2)}</text>"
        for x, y in boxes
    )
    return f"<body style='margin:0'><svg viewBox='0 0 100 100'>{lines}{shapes}</svg>"


# --- pictures ------------------------------------------------------------------------------------


def chart(r: random.Random) -> Image.Image:
    """Draw a chart with one to four series: lines, bars, points, histograms or pies."""
    figure = Figure(figsize=(r.uniform(3, 6), r.uniform(3, 5)), facecolor=_colour(r, 215))
    axes = figure.subplots()
    data = np.random.default_rng(r.getrandbits(32))
    x = np.arange(r.randint(4, 40))
    for _ in range(r.randint(1, 4)):
        y, colour = data.normal(size=len(x)).cumsum(), _colour(r)
        kind = r.choice(("line", "bar", "scatter", "hist", "pie"))
        if kind == "line":
            axes.plot(x, y, color=colour, label=_text(r, 1))
        elif kind == "bar":
            axes.bar(x, abs(y), color=colour, alpha=0.7)
        elif kind == "scatter":
            axes.scatter(data.normal(size=200), data.normal(size=200), s=r.randint(3, 40), c=colour)
        elif kind == "hist":
            axes.hist(data.normal(size=500), bins=r.randint(5, 40), color=colour, alpha=0.6)
        else:
            axes.pie(abs(y[:6]) + 0.1, labels=[_text(r, 1) for _ in y[:6]])
    axes.set_title(_text(r, r.randint(1, 5)))
    axes.grid(r.random() < 0.5)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=80)
    return Image.open(buffer)


def gradient(r: random.Random) -> Image.Image:
    """Draw a colour gradient along a line or around a point."""
    y, x = np.mgrid[-1:1:256j, -1:1:256j]
    angle = r.uniform(0, 2 * np.pi)
    along = x * np.cos(angle) + y * np.sin(angle) if r.random() < 0.6 else np.hypot(x, y)
    share = (along - along.min()) / np.ptp(along)
    ends = np.array([[r.randint(0, 255) for _ in range(3)] for _ in range(2)])
    return Image.fromarray((ends[0] + share[..., None] * (ends[1] - ends[0])).astype(np.uint8))


def blank(r: random.Random) -> Image.Image:
    """Draw a plain colour, sometimes with sensor noise, like a photo with a covered lens."""
    colour = [r.randint(0, 255)] * 3 if r.random() < 0.5 else [r.randint(0, 255) for _ in range(3)]
    grain = np.random.default_rng(r.getrandbits(32)).normal(0, r.choice((0, 2, 6)), (256, 256, 3))
    return Image.fromarray(np.clip(np.array(colour) + grain, 0, 255).astype(np.uint8))


def noise(r: random.Random) -> Image.Image:
    """Draw uniform, normal or binary noise, in colour or grey, with a random grain size."""
    data = np.random.default_rng(r.getrandbits(32))
    side, channels = 256 // r.choice((1, 1, 2, 4, 16)), r.choice((1, 3))
    kind = r.choice(("uniform", "normal", "binary"))
    if kind == "uniform":
        values = data.integers(0, 256, (side, side, channels))
    elif kind == "normal":
        values = data.normal(r.randint(60, 200), r.randint(15, 70), (side, side, channels))
    else:
        values = 255 * (data.random((side, side, channels)) < r.uniform(0.05, 0.95))
    pixels = np.clip(values, 0, 255).astype(np.uint8).repeat(3 // channels, axis=2)
    return Image.fromarray(pixels).resize((256, 256), r.choice((0, 3)))


def pattern(r: random.Random) -> Image.Image:
    """Draw stripes, squares, dots or rings."""
    y, x = np.mgrid[0:256, 0:256]
    size, angle = r.randint(4, 60), r.uniform(0, np.pi)
    u, v = x * np.cos(angle) + y * np.sin(angle), y * np.cos(angle) - x * np.sin(angle)
    inside = {
        "stripes": u // size % 2 == 0,
        "squares": (u // size + v // size) % 2 == 0,
        "dots": (u % size - size / 2) ** 2 + (v % size - size / 2) ** 2 < size**2 / 9,
        "rings": np.hypot(u - r.randint(0, 256), v) // size % 2 == 0,
    }[r.choice(("stripes", "squares", "dots", "rings"))]
    colours = np.array([[r.randint(0, 255) for _ in range(3)] for _ in range(2)], np.uint8)
    return Image.fromarray(colours[inside.astype(int)])


# --- from photos and pages -----------------------------------------------------------------------


def blurred(photo: Image.Image, r: random.Random) -> Image.Image:
    """Blur a photo until nothing can be recognized."""
    return photo.filter(ImageFilter.GaussianBlur(min(photo.size) / r.uniform(6, 12)))


def dark(photo: Image.Image, r: random.Random) -> Image.Image:
    """Return a photo that is almost black and has sensor noise."""
    pixels = np.asarray(photo, np.float32) * r.uniform(0.005, 0.03)
    grain = np.random.default_rng(r.getrandbits(32)).normal(0, r.uniform(0, 3), pixels.shape)
    return Image.fromarray(np.clip(pixels + grain, 0, 255).astype(np.uint8))


def drawing(photo: Image.Image, r: random.Random) -> Image.Image:
    """Turn a photo into a pencil drawing of its edges, or into a few flat colours."""
    if r.random() < 0.3:
        return ImageOps.posterize(photo.filter(ImageFilter.MedianFilter(7)), 1)
    grey = photo.convert("L")
    soft = np.asarray(ImageOps.invert(grey).filter(ImageFilter.GaussianBlur(r.uniform(1, 3))))
    lines = np.asarray(grey, np.float32) * 255 / np.maximum(255 - soft.astype(np.float32), 1)
    return Image.fromarray(np.clip(2 * lines - 255, 0, 255).astype(np.uint8)).convert("RGB")


def scan(paper: Image.Image, r: random.Random) -> Image.Image:
    """Turn a page into a scan that is slightly rotated, tinted and noisy."""
    tint = np.array([r.randint(200, 255), r.randint(200, 255), r.randint(180, 255)])
    turned = paper.rotate(r.uniform(-6, 6), expand=True, fillcolor=(r.randint(0, 255),) * 3)
    pixels = np.asarray(turned.filter(ImageFilter.GaussianBlur(r.uniform(0, 1.2))), np.float32)
    grain = np.random.default_rng(r.getrandbits(32)).normal(0, r.uniform(1, 12), pixels.shape)
    return Image.fromarray(np.clip(pixels * tint / 255 + grain, 0, 255).astype(np.uint8))


MARKUP: dict[str, Callable[[random.Random], str]] = {
    each.__name__: each for each in (page, screenshot, icon, emoji, logo, diagram)
}
"""Functions that write the markup of an image, by kind. Chromium renders the markup."""
PICTURES: dict[str, Callable[[random.Random], Image.Image]] = {
    each.__name__: each for each in (chart, gradient, blank, noise, pattern)
}
"""Functions that draw an image, by kind."""
CHANGED: dict[str, Callable[[Image.Image, random.Random], Image.Image]] = {
    each.__name__: each for each in (blurred, dark, drawing, scan)
}
"""Functions that change a photo or, for a scan, a rendered page, by kind."""


def images(tab: Any, photos: list[Path], count: int) -> Iterator[tuple[str, int, Image.Image]]:
    """Yield ``count`` images of each kind, as tuples of kind, number and image.

    ``tab`` is a tab of Chromium, as a Playwright page.
    """

    def rendered(markup: str, r: random.Random) -> Image.Image:
        """Render markup in a window of random size."""
        tab.set_viewport_size({"width": r.randint(320, 800), "height": r.randint(320, 800)})
        tab.set_content(markup)
        return Image.open(io.BytesIO(tab.screenshot())).convert("RGB")

    for number in range(count):
        r = random.Random(number)
        for kind, write in MARKUP.items():
            yield kind, number, rendered(write(r), r)
        for kind, draw in PICTURES.items():
            yield kind, number, draw(r)
        for kind, change in CHANGED.items():
            source = rendered(page(r), r) if kind == "scan" else open_image(r.choice(photos))
            yield kind, number, change(source, r)


def main() -> None:
    """Make the images, and write each kind to its own folder."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("photos", type=Path, help="folder with photos (.jpg)")
    parser.add_argument("folder", type=Path, help="write a subfolder for each kind to this folder")
    parser.add_argument("--count", type=int, default=100, help="number of images of each kind")
    given = parser.parse_args()

    from playwright.sync_api import sync_playwright

    photos = sorted(given.photos.glob("*.jpg"))
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path="/usr/bin/chromium")
        for kind, number, image in images(chromium.new_page(), photos, given.count):
            (given.folder / kind).mkdir(parents=True, exist_ok=True)
            image.convert("RGB").save(given.folder / kind / f"{number:03}.jpg", quality=90)


if __name__ == "__main__":
    main()
