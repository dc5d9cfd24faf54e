"""Photos with metadata as cameras and programs write them, built byte by byte."""

from __future__ import annotations

import io
import struct
import zlib
from typing import Any

import numpy as np
from mutated_photos import chunk, encoded
from PIL import Image, TiffImagePlugin

XMP, EXTENSION = b"http://ns.adobe.com/xap/1.0/\0", b"http://ns.adobe.com/xmp/extension/\0"
RDF = 'xmlns:r="http://www.w3.org/1999/02/22-rdf-syntax-ns#"'


def packet(inside: str = "", *, end: str = "w", padding: int = 100, attributes: str = "") -> bytes:
    """An XMP packet with a rating, an author and ``inside``."""
    return f"""<?xpacket begin='\ufeff' id='W5M0MpCehiHzreSzNTczkc9d'?>
<x:xmpmeta xmlns:x='adobe:ns:meta/'><r:RDF {RDF}><r:Description r:about=''
  xmlns:xmp='http://ns.adobe.com/xap/1.0/' xmp:Rating='3' {attributes}>
<dc:creator xmlns:dc='http://purl.org/dc/elements/1.1/'><r:Seq><r:li>Zoë</r:li></r:Seq></dc:creator>
{inside}</r:Description></r:RDF></x:xmpmeta>{" " * padding}
<?xpacket end='{end}'?>""".encode()


def described(text: str) -> str:
    """A description for `packet`."""
    item = f"<r:Alt><r:li xml:lang='x-default'>{text}</r:li></r:Alt>"
    return f"<d:description xmlns:d='http://purl.org/dc/elements/1.1/'>{item}</d:description>"


def segment(marker: int, data: bytes) -> bytes:
    return struct.pack(">BBH", 0xFF, marker, len(data) + 2) + data


def dataset(record: int, number: int, value: bytes) -> bytes:
    return struct.pack(">BBBH", 0x1C, record, number, len(value)) + value


def resource(number: int, data: bytes, signature: bytes = b"8BIM", name: bytes = b"\0\0") -> bytes:
    head = signature + struct.pack(">H", number) + name + struct.pack(">I", len(data))
    return head + data + b"\0" * (len(data) % 2)


def app13(*parts: bytes) -> bytes:
    """A Photoshop segment for each part."""
    return b"".join(segment(0xED, b"Photoshop 3.0\0" + part) for part in parts)


def with_segments(*segments: bytes, after: bytes = b"") -> bytes:
    """A JPEG photo with these segments after JFIF, and bytes after its end."""
    data = plain("JPEG")
    return data[:20] + b"".join(segments) + data[20:] + after


def plain(kind: str, **options: Any) -> bytes:
    pixels = np.random.default_rng(0).integers(256, size=(24, 32, 3), dtype=np.uint8)
    return encoded(Image.fromarray(pixels), kind, **options)


def two_pictures(before: bytes = b"", after: bytes = b"") -> bytes:
    """Multi-Picture Format with segments before and after that of MPF."""
    second = plain("JPEG", quality=30)

    def mpf(first: int, offset: int) -> bytes:
        entries = struct.pack("<IIIHH", 0x20030000, first, 0, 0, 0)
        entries += struct.pack("<IIIHH", 0, len(second), offset, 0, 0)
        ifd = struct.pack("<HHHI4s", 3, 0xB000, 7, 4, b"0100")
        ifd += struct.pack("<HHIIHHIII", 0xB001, 4, 1, 2, 0xB002, 7, 32, 50, 0)
        return segment(0xE2, b"MPF\0II*\0" + struct.pack("<I", 8) + ifd + entries)

    whole = with_segments(before, mpf(0, 0), after)
    base = whole.index(b"MPF\0") + 4
    return with_segments(before, mpf(len(whole), len(whole) - base), after, after=second)


def preview_after() -> bytes:
    """EXIF whose maker's part names a preview after the photo, as Sony's does."""
    preview = plain("JPEG", quality=30)

    def exif(offset: int) -> bytes:
        ifd = struct.pack("<HHHIIHHII", 2, 0x0111, 4, 1, offset, 0x0117, 4, 1, len(preview))
        return segment(0xE1, b"Exif\0\0II*\0" + struct.pack("<I", 8) + ifd + bytes(4))

    whole = with_segments(exif(0))
    offset = len(whole) - whole.index(b"Exif\0\0") - 6
    return with_segments(exif(offset), after=preview)


def extended() -> bytes:
    """Extended XMP, in two parts."""
    body = packet("<n:Notes xmlns:n='http://example.org/n/'>" + "x" * 500 + "</n:Notes>", padding=0)
    body = body[body.index(b"<x:") : body.index(b"<?xpacket end")]
    guid = b"0123456789ABCDEF0123456789ABCDEF"
    note = "xmlns:xmpNote='http://ns.adobe.com/xmp/note/' xmpNote:HasExtendedXMP='"
    parts = []
    for start, stop in ((0, 300), (300, len(body))):
        head = guid + struct.pack(">II", len(body), start)
        parts.append(segment(0xE1, EXTENSION + head + body[start:stop]))
    main = XMP + packet(attributes=f"{note}{guid.decode()}'")
    return with_segments(segment(0xE1, main), *parts)


def png_text(kind: bytes, keyword: bytes, text: bytes) -> bytes:
    data = plain("PNG")
    body = {b"tEXt": text, b"zTXt": b"\0" + zlib.compress(text), b"iTXt": bytes(4) + text}[kind]
    return data[:33] + chunk(kind, keyword + b"\0" + body) + data[33:]


def raw_profile(data: bytes) -> bytes:
    """As ImageMagick writes it."""
    return b"\nxmp\n%8d\n" % len(data) + data.hex().encode() + b"\n"


def tiff(order: str = "<", *, big: bool = False, **tags: bytes) -> bytes:
    """A TIFF file of two pages with text, and IPTC, XMP or a version of DNG."""
    info = TiffImagePlugin.ImageFileDirectory_v2()
    info[270], info[315] = "taken at sea", "Me"
    numbers = {"iptc": 33723, "xmp": 700, "raw": 50706}
    for number, value in ((numbers[name], value) for name, value in tags.items()):
        info[number], info.tagtype[number] = value, 1
    pages = [Image.new("RGB", (9, 7), colour) for colour in ("red", "blue")]
    options = {"save_all": True, "append_images": pages[1:], "tiffinfo": info, "big_tiff": big}
    if order == ">":
        pages = [Image.new("I;16B", (9, 7), value) for value in (7, 9)]
        options["append_images"] = pages[1:]
    out = io.BytesIO()
    pages[0].save(out, "TIFF", **options)
    return out.getvalue()


def table() -> dict[str, bytes]:
    """Photos by file name."""
    iptc = dataset(1, 90, b"\x1b%G") + dataset(2, 80, b"Me") + dataset(2, 101, b"Norway")
    latin = dataset(2, 80, "Zoë".encode("latin-1")) + dataset(2, 25, b"sea")
    preview = struct.pack(">BBBHI", 0x1C, 2, 202, 0x8004, 40_000) + bytes(40_000)
    xmp = segment(0xE1, XMP + packet())
    large = resource(0x0FA0, bytes(range(256)) * 300) + resource(0x0404, iptc)
    webp = {"xmp": packet(), "exif": b"Exif\0\0II*\0\x08\0\0\0\0\0\0\0\0\0", "icc_profile": b"icc"}
    rgba = Image.new("RGBA", (9, 8), (255, 0, 0, 99))
    return {
        "zeros.jpg": with_segments(segment(0xE1, XMP + packet() + bytes(1))),
        "empty.jpg": with_segments(segment(0xE1, XMP)),
        "empty_first.jpg": with_segments(segment(0xE1, XMP), xmp),
        "read_only.jpg": with_segments(segment(0xE1, XMP + packet(end="r"))),
        "padding.jpg": with_segments(segment(0xE1, XMP + packet(padding=64_800))),
        "attribute.jpg": with_segments(segment(0xE1, XMP + packet(attributes=(
            "xmlns:photoshop='http://ns.adobe.com/photoshop/1.0/' photoshop:City='Bergen'")))),
        "utf16.jpg": with_segments(segment(0xE1, XMP + packet().decode().encode("utf-16"))),
        "extended.jpg": extended(),
        "two_packets.jpg": with_segments(xmp, segment(0xE1, XMP + packet(
            "<t:City xmlns:t='http://ns.adobe.com/photoshop/1.0/'>Oslo</t:City>"))),
        "late_xmp.jpg": with_segments(segment(0xFE, b"comment"), xmp),
        "split.jpg": with_segments(app13(large[:60_000], large[60_000:])),
        "two_streams.jpg": with_segments(app13(
            resource(0x03ED, b"resolution"), resource(0x0404, iptc + bytes(3)) + bytes(20))),
        "signatures.jpg": with_segments(app13(b"".join(
            resource(0x03F3 + n, b"data%d" % n, signature)
            for n, signature in enumerate((b"AgHg", b"DCSR", b"PHUT", b"8BIM"))))),
        "of_a_kind.jpg": with_segments(app13(
            resource(0x0404, iptc) + resource(0x0404, dataset(2, 90, b"Oslo"))
            + resource(0x0FA1, b"a", name=b"\4Path\0") + resource(0x0FA1, b"bc"))),
        "odd.jpg": with_segments(app13(resource(0x0404, iptc) + resource(0x0FA1, b"abc")[:-1])),
        "latin.jpg": with_segments(app13(resource(0x0404, latin))),
        "preview_dataset.jpg": with_segments(app13(resource(0x0404, iptc + preview))),
        "damaged_iptc.jpg": with_segments(app13(b"8BIM\4\4\0\0\0\0\xff\xff" + iptc)),
        "mpf.jpg": two_pictures(xmp),
        "mpf_first.jpg": two_pictures(b"", xmp + app13(resource(0x0404, iptc))),
        "mpf_between.jpg": two_pictures(xmp, app13(resource(0x0404, iptc))),
        "mpf_alone.jpg": two_pictures(),
        "preview.jpg": preview_after(),
        "after.jpg": with_segments(xmp, after=b"SEFT" + bytes(40)),
        "text.png": png_text(b"tEXt", b"XML:com.adobe.xmp", packet()),
        "compressed.png": png_text(b"zTXt", b"XML:com.adobe.xmp", packet()),
        "profile.png": png_text(b"zTXt", b"Raw profile type xmp", raw_profile(packet())),
        "comment.png": png_text(b"iTXt", b"Comment", b"mine"),
        "lossy.webp": plain("WEBP"),
        "lossless.webp": plain("WEBP", lossless=True),
        "alpha.webp": encoded(rgba, "WEBP", lossless=True),
        "all.webp": plain("WEBP", **webp),
        "frames.webp": plain("WEBP", save_all=True, append_images=[Image.new("RGB", (32, 24))]),
        "plain.tif": tiff(),
        "motorola.tif": tiff(">"),
        "xmp.tif": tiff(xmp=packet()),
        "iptc.tif": tiff(iptc=iptc, xmp=packet()),
        "big.tif": tiff(big=True, xmp=packet()),
    }  # fmt: skip
