"""Test photos in every format and mode, undamaged, damaged, and made to cost time or memory."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Callable, Iterator

import numpy as np
from PIL import Image, features

Random = np.random.Generator

SIZES = ((65_535, 65_535), (60_000, 3), (2**31 - 1, 2**31 - 1), (3000, 2000), (1, 65_535), (0, 0))
"""Sizes written into headers: above and below the pixel limit."""


def original_photos() -> dict[str, bytes]:
    """Small undamaged photos by file name: all formats and modes, rotated, with several frames."""
    noise = np.random.default_rng(0).integers(0, 256, (33, 47, 3), dtype=np.uint8)
    rgb = Image.fromarray(noise)
    deep = noise[..., 0].astype(np.uint16) * 257
    grey16 = Image.fromarray(deep)
    turned = Image.Exif()
    turned[0x0112] = 6
    rgba = rgb.copy()
    rgba.putalpha(Image.fromarray(noise[..., 1]))
    palette = rgb.quantize(16)
    photos = {
        "plain.jpg": encoded(rgb, "JPEG"),
        "progressive.jpg": encoded(rgb, "JPEG", progressive=True),
        "cmyk.jpg": encoded(rgb.convert("CMYK"), "JPEG"),
        "grey.jpg": encoded(rgb.convert("L"), "JPEG"),
        "rotated.jpeg": encoded(rgb, "JPEG", exif=turned),
        "restarts.jfif": encoded(rgb, "JPEG", restart_marker_rows=1, subsampling=2),
        "plain.png": encoded(rgb, "PNG"),
        "palette.png": encoded(palette, "PNG", transparency=0),
        "deep.png": encoded(grey16, "PNG"),
        "bits.png": encoded(rgb.convert("1"), "PNG"),
        "transparent.png": encoded(rgba, "PNG", exif=turned),
        "frames.gif": encoded(palette, "GIF", save_all=True, append_images=[rgb.quantize(8)]),
        "plain.bmp": encoded(rgb, "BMP"),
        "palette.bmp": encoded(palette, "BMP"),
        "plain.tif": encoded(rgb, "TIFF"),
        "deep.tiff": encoded(grey16, "TIFF"),
        "rotated.tif": encoded(rgb, "TIFF", exif=turned),
        "plain.ppm": encoded(rgb, "PPM"),
        "deep.pgm": b"P5\n%d %d\n65535\n" % grey16.size + deep.astype(">u2").tobytes(),
        "bits.pbm": encoded(rgb.convert("1"), "PPM"),
        "icon.ico": encoded(rgba, "ICO", sizes=[(16, 16), (32, 32)]),
        "plain.tga": encoded(rgba, "TGA", compression="tga_rle"),
    }
    if features.check("libtiff"):
        photos["packed.tif"] = encoded(rgb, "TIFF", compression="tiff_lzw")
        photos["jpeg.tif"] = encoded(rgb, "TIFF", compression="jpeg")
    if features.check("webp"):
        photos["plain.webp"] = encoded(rgb, "WEBP", exif=turned)
        photos["frames.webp"] = encoded(
            rgba, "WEBP", save_all=True, append_images=[rgb], lossless=True
        )
    if features.check("jpg_2000"):
        photos["plain.jp2"] = encoded(rgb, "JPEG2000")
    if "avif" in features.modules and features.check("avif"):
        photos["plain.avif"] = encoded(rgb, "AVIF", speed=10, exif=turned)
    return photos


def encoded(image: Image.Image, kind: str, **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def mutated_photos(seed: int, count: int) -> Iterator[tuple[str, bytes]]:
    """Yield unique file names and contents; each original once undamaged if ``count`` allows."""
    random = np.random.default_rng(seed)
    originals = list(original_photos().items())
    for number in range(count):
        name, content = originals[number % len(originals)]
        if number >= len(originals):
            other = originals[random.integers(len(originals))][1]
            for _ in range(random.integers(1, 4)):
                mutate = MUTATIONS[random.integers(len(MUTATIONS))]
                content = mutate(content, other, random)
        yield f"{number:05}-{name}", content


def truncate(content: bytes, _: bytes, random: Random) -> bytes:
    return content[: random.integers(len(content) + 1)]


def flip_bits(content: bytes, _: bytes, random: Random) -> bytes:
    """Half of the time only in the first bytes, where the header is."""
    changed = bytearray(content)
    reach = len(changed) if random.random() < 0.5 else min(len(changed), 64)
    for place in random.integers(0, max(reach, 1), random.integers(1, 9)):
        if place < len(changed):
            changed[place] ^= 1 << random.integers(8)
    return bytes(changed)


def swap_header(content: bytes, other: bytes, random: Random) -> bytes:
    """Replace the header by that of another photo."""
    length = random.choice([4, 16, 64])
    return other[:length] + content[length:]


def claim_size(content: bytes, _: bytes, random: Random) -> bytes:
    """Write another width and height wherever the header has those of an original."""
    size = width, height = SIZES[random.integers(len(SIZES))]
    for form, most in ((">II", 2**32 - 1), ("<II", 2**32 - 1), (">HH", 65_535), ("<HH", 65_535)):
        for known, new in (((47, 33), size), ((33, 47), size[::-1])):
            claimed = struct.pack(form, *(side & most for side in new))
            content = content.replace(struct.pack(form, *known), claimed, 1)
    for known, new in ((47, width), (33, height)):  # TIFF: one value of a tag
        content = content.replace(struct.pack("<II", 1, known), struct.pack("<II", 1, new), 1)
    claimed = b"".join((side & 0xFFFFFF).to_bytes(3, "little") for side in size)
    content = content.replace(b"\x2e\0\0\x20\0\0", claimed, 1)  # WebP: one less
    content = content.replace(b"47 33", b"%d %d" % size, 1)  # PPM
    if content.startswith(b"\x89PNG") and len(content) > 33:
        content = content[:29] + struct.pack(">I", zlib.crc32(content[12:29])) + content[33:]
    return content


def replace_part(content: bytes, _: bytes, random: Random) -> bytes:
    """A long part comes twice, or a short one is left out or zeroed."""
    how, length = random.integers(3), (len(content), 32, 128)
    start = int(random.integers(0, len(content) + 1))
    part = content[start : start + int(random.integers(1, length[how] + 2))]
    new = (part + part, b"", bytes(len(part)))[how]
    return content[:start] + new + content[start + len(part) :]


def append(content: bytes, other: bytes, random: Random) -> bytes:
    """Add bytes after the end, which readers ignore."""
    return content + other[: random.integers(1, 400)]


Mutation = Callable[[bytes, bytes, Random], bytes]
MUTATIONS: tuple[Mutation, ...] = (
    truncate, flip_bits, flip_bits, swap_header, claim_size, *[replace_part] * 3, append,
)  # fmt: skip


# --- Bombs ---


def png(
    size: tuple[int, int],
    *extra: bytes,
    rows: bytes | None = None,
    after: int = 0,
    kind: tuple[int, int] = (8, 6),
) -> bytes:
    """An RGBA PNG, or of another kind; ``after`` further chunks follow the pixels."""
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", *size, *kind, 0, 0, 0))
    before, behind = extra[: len(extra) - after], extra[len(extra) - after :]
    rows = (b"\4" + bytes(4 * size[0])) * size[1] if rows is None else rows
    pixels = chunk(b"IDAT", zlib.compress(rows, 1))
    end = chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + header + b"".join((*before, pixels, *behind)) + end


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def progressive(size: tuple[int, int], more: int) -> bytes:
    """A progressive JPEG of 10 scans, the last of which is repeated."""
    jpeg = encoded(Image.new("RGB", size), "JPEG", progressive=True)
    last = jpeg[jpeg.rindex(b"\xff\xda") : -2]
    return jpeg[:-2] + more * last + jpeg[-2:]


def tiled(side: int) -> bytes:
    """A TIFF of 16 x 16 uncompressed tiles, all of them the same bytes."""
    tiles, pixels = (-(-side // 16)) ** 2, bytes(768)
    bits, offsets = 8 + len(pixels), 8 + len(pixels) + 6
    counts = offsets + 4 * tiles
    long, short = 4, 3
    tags = [
        (256, long, 1, side), (257, long, 1, side), (258, short, 3, bits), (259, short, 1, 1),
        (262, short, 1, 2), (277, short, 1, 3), (284, short, 1, 1), (322, short, 1, 16),
        (323, short, 1, 16), (324, long, tiles, offsets), (325, long, tiles, counts),
    ]  # fmt: skip
    arrays = struct.pack("<3H", 8, 8, 8) + struct.pack("<I", 8) * tiles
    arrays += struct.pack("<I", len(pixels)) * tiles
    entries = b"".join(struct.pack("<HHII", *tag) for tag in tags)
    start = 8 + len(pixels) + len(arrays)
    return (
        b"II*\0" + struct.pack("<I", start) + pixels + arrays
        + struct.pack("<H", len(tags)) + entries + bytes(4)
    )  # fmt: skip


def bombs() -> dict[str, bytes]:
    """Files of less than 3 MB that ask for far more time or memory than a photo."""
    small, gif = (8, 8), encoded(Image.new("L", (8, 8)), "GIF")
    text, private = chunk(b"tEXt", b"a\0b"), chunk(b"abCd", b"")
    grey = Image.new("L", (8, 8))
    pages = encoded(grey, "TIFF", save_all=True, append_images=[grey] * 500)
    return {
        "scans.jpg": progressive((6000, 4000), 3000),
        "few-scans-of-many-pixels.jpg": progressive((8000, 8000), 60),
        "wide.png": png((120_000_000, 1), rows=b"\0"),
        "tall.png": png((1, 120_000_000), rows=b"\0"),
        "chunks.png": png(small, *[text] * 200_000),
        "chunks-at-the-end.png": png(small, *[text] * 200_000, after=200_000),
        "unknown-chunks.png": png(small, *[private] * 200_000),
        "empty-data.png": png(small, *[chunk(b"IDAT", b"")] * 200_000),
        "texts.png": png(small, *[chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(900_000)))] * 1000),
        "profile.png": png(small, chunk(b"iCCP", b"a\0\0" + zlib.compress(bytes(10**8)))),
        "palette.png": png(small, chunk(b"PLTE", bytes(3 * 10**6))),
        "extensions.gif": gif[:13] + b"\x21\xfe\0" * 1_000_000 + gif[13:],
        "comment.gif": gif[:13] + b"\x21\xfe" + b"\1a" * 1_000_000 + b"\0" + gif[13:],
        "frames.gif": gif[:-1] + gif[gif.index(b"\x2c") : -1] * 50_000 + b";",
        "pages.tif": pages,
        "tiles.tif": tiled(5000),
        "comment.ppm": b"P6\n#" + b"a" * 3_000_000 + b"\n8 8 255\n" + bytes(192),
    }
