"""Measure the peak memory of decoding a large photo as the server does.

    python scripts/measure_photo_memory.py --megapixels 120

Writes a photo in each format and decodes it in a process of its own, as `captioner serve` does: a
JPEG at a reduced size, others whole. Prints the peak of resident memory beyond what the process had
before, with the file read into memory, as a Markdown table.
"""

from __future__ import annotations

import argparse
import io
import math
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from PIL import Image

from captioner.data.images import MAX_PIXELS, USUAL_FORMATS, open_reduced, reduced_side

IMAGE_SIZE = 256
"""Side of the model's input (pixels)."""


def write_heic(image: Image.Image, path: Path) -> None:
    """Write HEIC as fast as possible."""
    import pillow_heif

    pillow_heif.from_pillow(image).save(path, quality=10, enc_params={"preset": "ultrafast"})


def writer(mode: str, **options: object) -> Callable[[Image.Image, Path], None]:
    """A function that converts to a mode and saves with options."""
    return lambda image, path: image.convert(mode).save(path, **options)


FORMATS: dict[str, Callable[[Image.Image, Path], None]] = {
    "JPEG": writer("RGB", format="JPEG"),
    "progressive JPEG": writer("RGB", format="JPEG", progressive=True),
    "PNG, RGB": writer("RGB", format="PNG", compress_level=1),
    "PNG with transparency": writer("RGBA", format="PNG", compress_level=1),
    "PNG, 16-bit grey": writer("I;16", format="PNG", compress_level=1),
    "TIFF, RGB": writer("RGB", format="TIFF"),
    "WebP with transparency": writer("RGBA", format="WEBP", method=0, quality=50),
    "HEIC": write_heic,
}


def photo(pixels: int) -> Image.Image:
    """A photo of a gradient, 4 : 3."""
    width = math.isqrt(pixels * 4 // 3)
    return Image.linear_gradient("L").resize((width, pixels // width))


def memory(name: str) -> int:
    """Resident memory of this process in bytes: VmRSS now, VmHWM its peak."""
    [line] = [x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(name)]
    return int(line.split()[1]) * 1024


def measure(path: Path) -> int:
    """Peak memory of decoding a file, in bytes."""
    data = io.BytesIO(path.read_bytes())
    warm = io.BytesIO()
    Image.new("RGB", (8, 8)).save(warm, "PNG")
    for source in (io.BytesIO(warm.getvalue()), data):  # the first one loads the decoders
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
        before = memory("VmRSS")
        open_reduced(
            source,
            min_side=reduced_side(IMAGE_SIZE),
            name=path.name,
            max_pixels=MAX_PIXELS,
            formats=USUAL_FORMATS,
        )
    return memory("VmHWM") - before


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--megapixels", type=float, default=120)
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--file", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.file is not None:
        print(measure(options.file))
        return
    pixels = int(options.megapixels * 1e6)
    print(f"| {options.megapixels:g} megapixels | peak, MiB | bytes per pixel |\n|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for name in options.formats:
            path = Path(folder) / "photo"
            FORMATS[name](photo(pixels), path)
            command = [sys.executable, __file__, "--file", str(path)]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            used = int(done.stdout)
            print(f"| {name} | {used / 2**20:,.0f} | {used / pixels:.1f} |", flush=True)


if __name__ == "__main__":
    main()
