"""Descriptions in XMP packets, JPEG and PNG, read back with exiftool."""

from __future__ import annotations

import io
import json
import shutil
import struct
import subprocess
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mutated_photos import chunk, encoded
from PIL import Image

from captioner.data.metadata import (
    can_embed,
    embed_description,
    embedded_description,
    read_description,
    set_description,
)
from captioner.errors import DataError

TEXT = "a man's hat <on> the grass & a dog"

LIGHTROOM = """<x:xmpmeta xmlns:x="adobe:ns:meta/" x:xmptk="Adobe XMP Core 5.6">
 <!-- mine -->
 <r:RDF xmlns:r="http://www.w3.org/1999/02/22-rdf-syntax-ns#">
  <r:Description r:about="uuid:1" xmlns:crs="http://ns.adobe.com/camera-raw-settings/1.0/"
    crs:ToneCurve="0, 0&#xA;255, 255" crs:Exposure2012="+0.35">
   <d:subject xmlns:d="http://purl.org/dc/elements/1.1/"><r:Bag><r:li>été</r:li></r:Bag></d:subject>
DESCRIPTION  </r:Description>
 </r:RDF>
</x:xmpmeta>
"""
IN_TWO_LANGUAGES = """   <d:description xmlns:d="http://purl.org/dc/elements/1.1/"><r:Alt>
     <r:li xml:lang="de">Ein Hund</r:li><r:li xml:lang="x-default">A dog</r:li>
   </r:Alt></d:description>
"""


def sidecar(description: str = "") -> bytes:
    return LIGHTROOM.replace("DESCRIPTION", description).encode()


def exiftool(path: Path) -> dict[str, Any]:
    """The file's tags as exiftool reads them, by group and name."""
    if shutil.which("exiftool") is None:
        pytest.skip("exiftool is not installed (apt-get install libimage-exiftool-perl)")
    done = subprocess.run(
        ["exiftool", "-j", "-G1", "-all", "-validate", "-CurrentIPTCDigest", str(path)],
        capture_output=True,
        text=True,
        check=True,
    )
    found: dict[str, Any] = json.loads(done.stdout)[0]
    return found


def photo(kind: str, **options: Any) -> bytes:
    pixels = np.random.default_rng(0).integers(256, size=(24, 32, 3), dtype=np.uint8)
    return encoded(Image.fromarray(pixels), kind, **options)


def pixels_of(data: bytes) -> bytes:
    with Image.open(io.BytesIO(data)) as image:
        return image.convert("RGB").tobytes()


def test_keywords_keep_the_bytes_of_the_rest() -> None:
    before = sidecar(IN_TWO_LANGUAGES)
    new = set_description(before, "A dog", ["dog", "ÉTÉ", "dog"])
    before = set_description(before, "A dog")
    start, end = before.index(b"<d:subject"), before.index(b"</d:subject>") + len(b"</d:subject>")

    assert new.startswith(before[:start])
    assert new.endswith(before[end:])
    assert new.count(b"<rdf:li>") == 2
    assert read_description(new) == "A dog"


def test_everything_else_in_a_sidecar_keeps_its_bytes() -> None:
    head, _, tail = sidecar("|").partition(b"|")
    replaced = set_description(sidecar(IN_TWO_LANGUAGES), TEXT)
    assert read_description(replaced) == TEXT
    assert replaced.startswith(head)
    assert replaced.endswith(tail)
    assert b'<r:li xml:lang="de">Ein Hund</r:li>' in replaced
    assert b"A dog" not in replaced

    added = set_description(sidecar(), TEXT)
    assert read_description(added) == TEXT
    assert added.startswith(head + tail[: tail.index(b" </r:RDF>")])
    assert b'rdf:about="uuid:1"' in added


def test_setting_a_description_twice_gives_the_same_packet() -> None:
    once = set_description(sidecar(), TEXT)

    assert set_description(set_description(sidecar(), "other"), TEXT) == once


def test_a_plain_description_is_read_and_replaced() -> None:
    plain = '<d:description xmlns:d="http://purl.org/dc/elements/1.1/">mine</d:description>'

    assert read_description(sidecar(plain)) == "mine"
    assert b"mine</" not in set_description(sidecar(plain), TEXT)


@pytest.mark.parametrize(
    ("packet", "problem"),
    [
        (b"<x", "damaged"),
        (b"<x/>", "no rdf:RDF"),
        ("<x>été</x>".encode("latin-1"), "not in UTF-8"),
        (b'<!DOCTYPE x [<!ENTITY a "b">]><x/>', "document type"),
        (b'<rdf:RDF xmlns:rdf="http://www.w3.org/1999/02/22-rdf-syntax-ns#"/>', "no rdf:RDF"),
    ],
)
def test_other_files_are_refused(packet, problem) -> None:
    with pytest.raises(DataError, match=problem):
        set_description(packet, TEXT)


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
@pytest.mark.parametrize("text", [TEXT, "собака на траве"])
def test_exiftool_reads_the_description(kind, text, tmp_path) -> None:
    original = photo(kind)
    assert embedded_description(original) == ""

    new = embed_description(embed_description(original, "another"), text)

    (tmp_path / "photo").write_bytes(new)
    assert embedded_description(new) == text
    assert pixels_of(new) == pixels_of(original)
    assert new[:20] == original[:20]  # JFIF, or the header, comes first
    if kind == "JPEG":
        assert new.endswith(original[original.index(b"\xff\xda") :])  # not encoded again
    found = exiftool(tmp_path / "photo")
    assert found["XMP-dc:Description"] == text
    assert found["ExifTool:Validate"] == "OK"
    if kind == "JPEG":
        assert found["IPTC:Caption-Abstract"] == text


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_keywords_are_appended_once_whatever_their_case(kind, tmp_path) -> None:
    """To those of the photo: in XMP "été", in IPTC "Dog"."""
    original = photo(kind, **({"xmp": sidecar()} if kind == "JPEG" else {}))
    if kind == "JPEG":
        original = original[:2] + iptc((1, 90, b"\x1b%G"), (2, 25, b"Dog")) + original[2:]

    once = embed_description(original, TEXT, ["dog", "Été", "teddy bear"])
    again = embed_description(once, TEXT, ["grass & soil", "DOG"])

    assert embed_description(once, TEXT, ["teddy bear"]) == once
    (tmp_path / "photo").write_bytes(again)
    found = exiftool(tmp_path / "photo")
    new = ["dog", "teddy bear", "grass & soil"]
    old = ["été"] if kind == "JPEG" else []
    assert found["XMP-dc:Subject"] == [*old, *(new if old else ["dog", "Été", *new[1:]])]
    assert found["XMP-dc:Description"] == TEXT
    if kind == "PNG":
        assert found["ExifTool:Validate"] == "OK"
    if kind == "JPEG":
        assert found["IPTC:Keywords"] == ["Dog", "Été", "teddy bear", "grass & soil"]
        assert found["XMP-crs:Exposure2012"] in ("+0.35", 0.35)


def test_other_metadata_is_kept(tmp_path) -> None:
    exif = Image.Exif()
    exif[0x010F] = "Canon"
    exif[0x0112] = 6
    original = photo("JPEG", exif=exif, icc_profile=b"profile", comment=b"mine", xmp=sidecar())

    new = embed_description(original, TEXT)

    (tmp_path / "photo.jpg").write_bytes(new)
    found = exiftool(tmp_path / "photo.jpg")
    assert found["IFD0:Make"] == "Canon"
    assert found["File:Comment"] == "mine"
    assert found["XMP-crs:Exposure2012"] in ("+0.35", 0.35)
    assert found["XMP-dc:Subject"] == "été"
    assert found["XMP-dc:Description"] == TEXT
    with Image.open(io.BytesIO(new)) as image:
        assert image.info["icc_profile"] == b"profile"


def iptc(*datasets: tuple[int, int, bytes], digest: bool = False) -> bytes:
    """A Photoshop segment with IPTC data after another resource."""
    data = b"".join(struct.pack(">BBBH", 0x1C, r, n, len(v)) + v for r, n, v in datasets)
    resources = [(0x03ED, b"resolution"), (0x0404, data)]
    if digest:
        resources.append((0x0425, b"\0" * 16))
    body = b"Photoshop 3.0\0"
    for number, value in resources:
        body += b"8BIM" + struct.pack(">HHI", number, 0, len(value)) + value
        body += b"\0" * (len(value) % 2)
    return b"\xff\xed" + struct.pack(">H", len(body) + 2) + body


def with_segment(segment: bytes) -> bytes:
    data = photo("JPEG")
    return data[:2] + segment + data[2:]


def test_other_iptc_data_is_kept_and_its_digest_updated(tmp_path) -> None:
    old = iptc((2, 80, b"Me"), (2, 120, b"old"), (2, 122, b"Writer"), digest=True)
    assert embedded_description(with_segment(old)) == "old"

    (tmp_path / "photo.jpg").write_bytes(embed_description(with_segment(old), TEXT))

    found = exiftool(tmp_path / "photo.jpg")
    assert found["IPTC:By-line"] == "Me"
    assert found["IPTC:Writer-Editor"] == "Writer"
    assert found["IPTC:Caption-Abstract"] == TEXT
    assert found["Photoshop:IPTCDigest"] == found["File:CurrentIPTCDigest"]


def test_iptc_in_another_character_set_is_left_alone() -> None:
    old = iptc((2, 80, "été".encode("latin-1")))

    assert old in embed_description(with_segment(old), "été")


def test_a_compressed_xmp_chunk_is_read_and_replaced() -> None:
    data = photo("PNG")
    body = b"XML:com.adobe.xmp\0\1\0\0\0" + zlib.compress(sidecar(IN_TWO_LANGUAGES))
    data = data[:33] + chunk(b"iTXt", body) + data[33:]

    assert embedded_description(data) == "A dog"
    assert embedded_description(embed_description(data, TEXT)) == TEXT


def test_other_formats_are_refused() -> None:
    kinds = ("JPEG", "PNG", "WEBP", "TIFF", "GIF")
    assert [kind for kind in kinds if can_embed(photo(kind)[:8])] == ["JPEG", "PNG"]


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_damaged_files_are_refused_or_embedded_but_never_crash(kind) -> None:
    data, rng = bytearray(photo(kind, xmp=sidecar(IN_TWO_LANGUAGES))), np.random.default_rng(0)
    if kind == "JPEG":
        data[2:2] = iptc((2, 80, b"Me"))
    for _ in range(300):
        broken = bytearray(data)
        for at in rng.integers(8, 1500, size=3):
            broken[at] = rng.integers(256)
        for part in (broken, broken[: rng.integers(8, len(broken))]):
            try:
                embedded_description(bytes(part))
                embed_description(bytes(part), TEXT)
            except DataError:
                pass
