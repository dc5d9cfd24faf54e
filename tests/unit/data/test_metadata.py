"""Descriptions in XMP packets, JPEG and PNG, read back with exiftool."""

from __future__ import annotations

import hashlib
import io
import json
import re
import shutil
import struct
import subprocess
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tagged_photos
from mutated_photos import chunk
from PIL import Image, ImageSequence
from tagged_photos import app13, dataset, plain, resource

from captioner.data.metadata import (
    Mark,
    can_embed,
    embed_description,
    embedded_description,
    find_embedded,
    find_in_sidecar,
    read_description,
    remove_embedded,
    remove_from_sidecar,
    set_description,
    sidecar_from,
)
from captioner.errors import DataError

KINDS = ("JPEG", "PNG", "WEBP", "TIFF")
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


def exiftool(path: Path, *options: str) -> list[dict[str, Any]]:
    """The tags of each file as exiftool reads them, by group and name."""
    if shutil.which("exiftool") is None:
        pytest.skip("exiftool is not installed (apt-get install libimage-exiftool-perl)")
    command = ["exiftool", "-j", *options, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


def tags_of(path: Path) -> dict[str, Any]:
    return exiftool(path, "-G1", "-all", "-validate", "-CurrentIPTCDigest")[0]


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


def test_other_forms_of_packets_are_edited() -> None:
    """As cameras and programs write them: bytes around the XML, UTF-16, attributes, no content."""
    meta = '<x:xmpmeta xmlns:x="adobe:ns:meta/">{}</x:xmpmeta>'
    rdf = '<rdf:RDF xmlns:rdf="http://www.w3.org/1999/02/22-rdf-syntax-ns#"{}'
    attribute = ' xmlns:d="http://purl.org/dc/elements/1.1/" d:description="mine"'
    resource = f"><rdf:Description{attribute} rdf:about=''/></rdf:RDF>"
    packet = sidecar(IN_TWO_LANGUAGES)
    cases = {
        "zeros": packet + bytes(3),
        "zeros before": bytes(1) + packet,
        "BOM": b"\xef\xbb\xbf" + packet,
        "UTF-16": packet.decode().encode("utf-16"),
        "UTF-16, big": b"\xfe\xff" + packet.decode().encode("utf-16-be"),
        "UTF-16 without BOM": packet.decode().encode("utf-16-le"),
        "attribute": meta.format(rdf.format(resource)).encode(),
        "empty": b"",
        "blank": b" \0\n",
        "no RDF": meta.format("").encode(),
        "no content": meta.format(rdf.format("/>")).encode(),
        "root": rdf.format("/>").encode(),
        "no items": sidecar('<d:description xmlns:d="http://purl.org/dc/elements/1.1/"/>'),
    }
    before = {name: read_description(packet) for name, packet in cases.items()}
    new = {name: set_description(packet, TEXT) for name, packet in cases.items()}
    again = {name: set_description(packet, "other") for name, packet in new.items()}

    assert before == dict.fromkeys(cases, "A dog") | {"attribute": "mine"} | dict.fromkeys(
        ("empty", "blank", "no RDF", "no content", "root", "no items"), ""
    )
    assert {read_description(packet) for packet in new.values()} == {TEXT}
    assert {read_description(packet) for packet in again.values()} == {"other"}
    for name in ("zeros", "zeros before", "BOM", "UTF-16", "UTF-16, big"):
        assert new[name][:2] == cases[name][:2], name
        assert new[name][-3:] == cases[name][-3:], name
        assert b"Ein Hund" in new[name].replace(b"\0", b""), name
    assert b"mine" not in new["attribute"]


# --- what captioner wrote ---


def test_a_caption_of_captioner_is_known_until_it_is_changed() -> None:
    own = set_description(sidecar(), TEXT, ["dog", "été"], mark=Mark(0.25))
    assert (find_in_sidecar(own).own, find_in_sidecar(own).keywords) == (True, ("dog",))
    assert b"<photoshop:CaptionWriter" in own
    for changed in (
        own.replace(b"a man", b"a woman"),  # by another program
        set_description(own, "mine"),
        set_description(own, TEXT),  # chosen by a person
        set_description(None, TEXT),
    ):
        assert not find_in_sidecar(changed).own
        kept = remove_from_sidecar(changed) or b""
        assert read_description(kept) == read_description(changed)
        assert not find_in_sidecar(kept).digests
    assert b"CaptionWriter" not in set_description(own, "mine")
    kept = set_description(sidecar().replace(b"crs:Exp", b'ps:CaptionWriter="Me" '
        b'xmlns:ps="http://ns.adobe.com/photoshop/1.0/" crs:Exp'), "mine")  # fmt: skip
    assert b'ps:CaptionWriter="Me"' in kept


def test_what_captioner_wrote_is_removed_alone() -> None:
    """Also after captioner has replaced its own caption."""
    for before in (sidecar(), sidecar("<!-- -->")):
        once = set_description(before, "first", ["dog"], mark=Mark())
        own = set_description(once, TEXT, ["dog", "cat"], mark=Mark(0.25))
        assert find_in_sidecar(own).keywords == ("dog", "cat")
        removed = remove_from_sidecar(own)
        assert removed is not None
        assert remove_from_sidecar(once) == removed.replace(b"<rdf:li>cat</rdf:li>", b"")
        assert read_description(removed) == ""
        assert removed.count(b"dog") == removed.count(b"captioner") == 0
        assert removed.count("été".encode()) == 1
    assert remove_from_sidecar(set_description(None, TEXT, ["dog"], mark=Mark())) is None
    two = set_description(sidecar(IN_TWO_LANGUAGES), TEXT, mark=Mark())
    assert b"Ein Hund" in (remove_from_sidecar(two) or b"")


@pytest.mark.parametrize("kind", KINDS)
def test_what_captioner_wrote_in_a_photo_is_removed(kind) -> None:
    original = plain(kind)
    own = embed_description(original, TEXT, ["dog", "grass"], mark=Mark(0.5))
    assert find_embedded(own)[:3] == (TEXT, True, ("dog", "grass"))

    removed = remove_embedded(own)

    if kind in ("JPEG", "PNG"):
        assert removed == original
    assert embedded_description(removed) == ""
    assert b"grass</rdf" not in removed.partition(b"II*")[0]
    assert pixels_of(removed) == pixels_of(original)
    corrected = remove_embedded(embed_description(own, "mine"))
    assert embedded_description(corrected) == "mine"
    assert b"grass</rdf" not in corrected.partition(b"II*")[0]
    mine = embed_description(original, "mine", ["dog"])
    assert remove_embedded(mine) == mine


def test_texts_of_people_in_iptc_stay() -> None:
    """A person corrected IPTC alone, and had a keyword there already."""
    original = with_segment(iptc((2, 25, b"dog"), (2, 80, b"Me")))
    own = embed_description(original, TEXT, ["dog", "cat"], mark=Mark())
    removed = remove_embedded(own)
    assert iptc((2, 25, b"dog"), (2, 80, b"Me")) in removed

    corrected = own.replace(TEXT.encode() + b"\x1c", TEXT.upper().encode() + b"\x1c")
    assert corrected != own
    assert not find_embedded(corrected).own
    cleaned = remove_embedded(corrected)
    assert find_embedded(cleaned) == (TEXT.upper(), False, (), ())
    assert b"captioner" not in cleaned


def test_a_new_sidecar_begins_with_the_title_and_keywords_of_people() -> None:
    title = "<d:title xmlns:d='http://purl.org/dc/elements/1.1/'>A &amp; B</d:title>"
    latin = (2, 25, "Zoë".encode("latin-1"))
    with_iptc = with_segment(iptc((2, 5, b"A & B"), (2, 25, "été".encode()), latin))
    with_xmp = tagged_photos.png_text(b"iTXt", b"XML:com.adobe.xmp", sidecar(title))
    for data in (with_iptc, with_xmp):
        new = sidecar_from(embed_description(data, TEXT, ["cat"], mark=Mark()))
        assert new is not None
        assert remove_from_sidecar(set_description(new, TEXT, ["cat"], mark=Mark())) == new
        for text, count in {"A &amp; B": 1, "<rdf:li>": 1, ">été<": 1, TEXT: 0}.items():
            assert new.count(text.encode()) == count
    assert sidecar_from(plain("PNG")) is None


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
        (b"<x/>", "rdf:RDF is missing"),
        ("<x>été</x>".encode("latin-1"), "not encoded in UTF-8"),
        (b"<a>" * 200 + b"</a>" * 200, "more than 100 levels"),
        (b'<!DOCTYPE x [<!ENTITY a "b">]><x/>', "document type"),
    ],
)
def test_other_files_are_refused(packet, problem) -> None:
    with pytest.raises(DataError, match=problem):
        set_description(packet, TEXT)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", [TEXT, "собака на траве"])
def test_exiftool_reads_the_description(kind, text, tmp_path) -> None:
    original = plain(kind)
    assert embedded_description(original) == ""

    new = embed_description(embed_description(original, "another"), text)

    (tmp_path / "photo").write_bytes(new)
    assert embedded_description(new) == text
    assert pixels_of(new) == pixels_of(original)
    if kind in ("JPEG", "PNG"):
        assert new[:20] == original[:20]  # JFIF, or the header, comes first
    if kind == "JPEG":
        assert new.endswith(original[original.index(b"\xff\xda") :])  # not encoded again
    found = tags_of(tmp_path / "photo")
    assert found["XMP-dc:Description"] == text
    if kind != "TIFF":  # of Pillow's, exiftool misses tags
        assert found["ExifTool:Validate"] == "OK"
    if kind == "JPEG":
        assert found["IPTC:Caption-Abstract"] == text


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_keywords_are_appended_once_whatever_their_case(kind, tmp_path) -> None:
    """To those of the photo: in XMP "été", in IPTC "Dog"."""
    original = plain(kind, **({"xmp": sidecar()} if kind == "JPEG" else {}))
    if kind == "JPEG":
        original = original[:2] + iptc((1, 90, b"\x1b%G"), (2, 25, b"Dog")) + original[2:]

    once = embed_description(original, TEXT, ["dog", "Été", "teddy bear"])
    again = embed_description(once, TEXT, ["grass & soil", "DOG"])

    assert embed_description(once, TEXT, ["teddy bear"]) == once
    (tmp_path / "photo").write_bytes(again)
    found = tags_of(tmp_path / "photo")
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
    original = plain("JPEG", exif=exif, icc_profile=b"profile", comment=b"mine", xmp=sidecar())

    new = embed_description(original, TEXT)

    (tmp_path / "photo.jpg").write_bytes(new)
    found = tags_of(tmp_path / "photo.jpg")
    assert found["IFD0:Make"] == "Canon"
    assert found["File:Comment"] == "mine"
    assert found["XMP-crs:Exposure2012"] in ("+0.35", 0.35)
    assert found["XMP-dc:Subject"] == "été"
    assert found["XMP-dc:Description"] == TEXT
    with Image.open(io.BytesIO(new)) as image:
        assert image.info["icc_profile"] == b"profile"


CHANGED = re.compile(
    r"(System|ExifTool|XMP-captioner|File):|.*:(Copy\d+:)?(Description|Subject|CaptionWriter"
    r"|Caption-Abstract|Writer-Editor|Keywords|CodedCharacterSet|PhotoshopDigest|IPTCDigest"
    r"|MPImageStart)$|MPImage1:(Copy\d+:)?MPImageLength$|IFD0:StripOffsets$"
    r"|RIFF:(Copy1:Image(Width|Height)|WebP_Flags)$"
)
"""What a description changes, and places in the file."""


def frames_of(data: bytes) -> list[bytes]:
    with Image.open(io.BytesIO(data)) as image:
        return [frame.tobytes() for frame in ImageSequence.Iterator(image)]


def all_tags(folder: Path) -> dict[str, dict[str, Any]]:
    """All tags, also those that are there twice, with the pictures and profiles in them."""
    read = exiftool(folder, "-a", "-G1:4", "-b", "-q", "-ee")
    found = {Path(one["SourceFile"]).name: one for one in read}
    for tags in found.values():
        del tags["SourceFile"]
        for name in [*filter(CHANGED.match, tags)]:
            del tags[name]
    return found


def test_exiftool_finds_all_that_other_programs_wrote(tmp_path) -> None:
    """Before and after a description with keywords is written twice, and after it is removed."""
    photos = tagged_photos.table()
    for name, data in photos.items():
        (tmp_path / name).write_bytes(data)
    before = all_tags(tmp_path)
    for remove in (False, True):
        for name, data in photos.items():
            new = embed_description(data, "first", ["dog"], mark=Mark(0.5))
            new = embed_description(new, TEXT, ["cat"], mark=Mark(0.5))
            assert find_embedded(new)[:3] == (TEXT, True, ("dog", "cat")), name
            if remove:
                new = remove_embedded(new)
                assert find_embedded(new).text == "", name
            (tmp_path / name).write_bytes(new)
            assert frames_of(new) == frames_of(data), name
        assert all_tags(tmp_path) == before


@pytest.mark.parametrize("name", ["mpf.jpg", "mpf_first.jpg", "mpf_between.jpg", "preview.jpg"])
def test_pictures_after_the_photo_are_found_where_they_are_named(name) -> None:
    data = tagged_photos.table()[name]
    new = embed_description(data, TEXT)
    for one in (data, new):
        base = one.index(b"II*\0")
        if name == "preview.jpg":
            (offset,) = struct.unpack_from("<I", one, base + 18)
            second = one[base + offset :]
        else:
            first, *_, length, offset = struct.unpack_from("<6I", one, base + 54)
            second = one[base + offset :][:length]
            assert one[:first].endswith(b"\xff\xd9")
            assert len(one) == first + length
        assert second == plain("JPEG", quality=30)


def test_an_offset_in_an_unknown_field_of_exif_is_refused() -> None:
    """Here a picture is 70,000 bytes after the photo, in a field of the maker's own."""
    gap, second = bytes(70_000), plain("JPEG")
    empty = tagged_photos.segment(0xE1, b"Exif\0\0II*\0" + bytes(8))
    base = with_segment(empty).index(b"II*\0")
    offset = struct.pack("<I", len(with_segment(empty) + gap) - base)
    exif = tagged_photos.segment(0xE1, b"Exif\0\0II*\0" + bytes(4) + offset)
    with pytest.raises(DataError, match=r"EXIF.*; use --sidecar xmp"):
        embed_description(with_segment(exif) + gap + second, TEXT)


def test_what_cannot_be_kept_is_refused() -> None:
    """Each in one line that names --sidecar xmp."""
    part = tagged_photos.packet(tagged_photos.described("mine"), padding=0)
    head = b"0" * 32 + struct.pack(">II", len(part), 0)
    large = tagged_photos.packet("<!--" + "x" * 64_900 + "-->", padding=0)
    cases = {
        "AFCP": with_segment(b"") + b"AXS!" + bytes(8),
        "in extended XMP": with_segment(
            tagged_photos.segment(0xE1, tagged_photos.EXTENSION + head + part)
        ),
        "too large": with_segment(tagged_photos.segment(0xE1, tagged_photos.XMP + large)),
        "not encoded in UTF-8": with_segment(
            tagged_photos.segment(0xE1, tagged_photos.XMP + b"<a>\xe9</a>")
        ),
        "IPTC caption": tagged_photos.tiff(iptc=dataset(2, 120, b"mine")),
        "camera RAW": tagged_photos.tiff(raw=b"\1\4\0\0"),
    }
    for problem, data in cases.items():
        with pytest.raises(DataError, match=rf"{problem}.*; use --sidecar xmp$"):
            embed_description(data, TEXT)
    assert embedded_description(cases["IPTC caption"]) == "mine"
    assert embedded_description(cases["in extended XMP"]) == "mine"


def iptc(*datasets: tuple[int, int, bytes], digest: bool = False) -> bytes:
    """A Photoshop segment with IPTC data after another resource."""
    parts = [resource(0x03ED, b"resolution")]
    parts.append(resource(0x0404, b"".join(dataset(*one) for one in datasets)))
    parts += [resource(0x0425, bytes(16))] * digest
    return app13(b"".join(parts))


def with_segment(segment: bytes) -> bytes:
    data = plain("JPEG")
    return data[:2] + segment + data[2:]


def test_other_iptc_data_is_kept_and_its_digest_updated(tmp_path) -> None:
    old = iptc((2, 80, b"Me"), (2, 120, b"old"), (2, 122, b"Writer"), digest=True)
    assert embedded_description(with_segment(old)) == "old"

    (tmp_path / "photo.jpg").write_bytes(embed_description(with_segment(old), TEXT))

    found = tags_of(tmp_path / "photo.jpg")
    assert found["IPTC:By-line"] == "Me"
    assert found["IPTC:Writer-Editor"] == "Writer"
    assert found["IPTC:Caption-Abstract"] == TEXT
    assert found["Photoshop:IPTCDigest"] == found["File:CurrentIPTCDigest"]


def test_the_digest_of_iptc_data_that_another_program_changed_stays() -> None:
    """Readers prefer XMP if it is right."""
    caption = dataset(2, 120, b"old")
    for data, right in ((caption, True), (b"other", False)):
        digest = hashlib.md5(data, usedforsecurity=False).digest()
        parts = [resource(n, d) for n, d in ((0x0404, caption), (0x0425, digest))]
        new = embed_description(with_segment(app13(b"".join(parts))), TEXT)
        assert (digest in new) != right
        now = dataset(2, 120, TEXT.encode())
        assert (hashlib.md5(now, usedforsecurity=False).digest() in new) == right


def test_iptc_in_another_character_set_is_left_alone() -> None:
    old = iptc((2, 80, "été".encode("latin-1")))

    assert old in embed_description(with_segment(old), "été")


def test_a_compressed_xmp_chunk_is_read_and_replaced() -> None:
    data = plain("PNG")
    body = b"XML:com.adobe.xmp\0\1\0\0\0" + zlib.compress(sidecar(IN_TWO_LANGUAGES))
    data = data[:33] + chunk(b"iTXt", body) + data[33:]

    assert embedded_description(data) == "A dog"
    assert embedded_description(embed_description(data, TEXT)) == TEXT


def test_other_formats_are_refused() -> None:
    kinds = ("JPEG", "PNG", "WEBP", "TIFF", "GIF", "BMP")
    assert [kind for kind in kinds if can_embed(plain(kind)[:16])] == [*KINDS]


@pytest.mark.parametrize("kind", KINDS)
def test_damaged_files_are_refused_or_embedded_but_never_crash(kind) -> None:
    given = {} if kind == "TIFF" else {"xmp": sidecar(IN_TWO_LANGUAGES)}
    data, rng = bytearray(plain(kind, **given)), np.random.default_rng(0)
    if kind == "TIFF":
        data = bytearray(embed_description(bytes(data), TEXT))
    if kind == "JPEG":
        data[2:2] = iptc((2, 80, b"Me"))
    embedded = 0
    for _ in range(300):
        broken = bytearray(data)
        for at in rng.integers(8, 1500, size=3):
            broken[at % len(broken)] = rng.integers(256)
        for part in (broken, broken[: rng.integers(8, len(broken))]):
            try:
                embedded_description(bytes(part))
                embed_description(bytes(part), TEXT)
                remove_embedded(bytes(part))
                embedded += 1
            except DataError:
                pass
    assert 0 < embedded < 600
