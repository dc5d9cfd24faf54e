"""Measure the peak memory of decoding a large photo as the server does.

    python scripts/benchmarks/photo_memory.py --megapixels 120

Writes a photo in each format and decodes it in a process of its own, as `captioner serve` does: a
JPEG at a reduced size, others whole. Prints the peak of resident memory beyond what the process had
before, with the file read into memory.
"""

from __future__ import annotations

import io
import math
import tempfile
from pathlib import Path
from typing import Any

import pillow_heif
from measuring import in_child, memory, parser, print_table
from PIL import Image

from captioner.data.images import MAX_PIXELS, USUAL_FORMATS, open_reduced, reduced_side

IMAGE_SIZE = 256
"""Side of the model's input (pixels)."""

FORMATS: dict[str, tuple[str, dict[str, Any]]] = {
    "JPEG": ("RGB", {"format": "JPEG"}),
    "progressive JPEG": ("RGB", {"format": "JPEG", "progressive": True}),
    "PNG, RGB": ("RGB", {"format": "PNG", "compress_level": 1}),
    "PNG with transparency": ("RGBA", {"format": "PNG", "compress_level": 1}),
    "PNG, 16-bit grey": ("I;16", {"format": "PNG", "compress_level": 1}),
    "TIFF, RGB": ("RGB", {"format": "TIFF"}),
    "WebP with transparency": ("RGBA", {"format": "WEBP", "method": 0, "quality": 50}),
    "HEIC": ("RGB", {"format": "HEIF", "quality": 10, "enc_params": {"preset": "ultrafast"}}),
}


def peak_of(path: Path) -> float:
    """Peak memory of decoding a file, in MB."""
    warm = io.BytesIO()
    Image.new("RGB", (8, 8)).save(warm, "PNG")
    before = 0.0
    for data in (warm.getvalue(), path.read_bytes()):  # the first one loads the decoders
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
        before = memory("VmRSS")
        open_reduced(
            io.BytesIO(data),
            min_side=reduced_side(IMAGE_SIZE),
            name=path.name,
            max_pixels=MAX_PIXELS,
            formats=USUAL_FORMATS,
        )
    return memory() - before


def main() -> None:
    """Print a table."""
    given = parser(__doc__)
    given.add_argument("--megapixels", type=float, default=120)
    given.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS))
    given.add_argument("--file", type=Path, help="measure this file only")
    options = given.parse_args()
    if options.file is not None:
        print(peak_of(options.file))
        return
    pillow_heif.register_heif_opener()
    pixels = int(options.megapixels * 1e6)
    width = math.isqrt(pixels * 4 // 3)
    photo = Image.linear_gradient("L").resize((width, pixels // width))
    rows: dict[str, dict[str, float | str | None]] = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "photo"
        for name in options.formats:
            mode, written = FORMATS[name]
            photo.convert(mode).save(path, **written)
            used = in_child(__file__, "--file", path)
            rows[name] = {"peak, MiB": used * 1e6 / 2**20, "bytes per pixel": used * 1e6 / pixels}
    print_table(f"{options.megapixels:g} megapixels", rows)


if __name__ == "__main__":
    main()
