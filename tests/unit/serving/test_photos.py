"""Photos and options in forms, in JSON and as bytes."""

from __future__ import annotations

import base64
import json
import tracemalloc
from typing import Any

import httpx
import pytest
from colour_server import OWN, png, until

from captioner.serving.json_body import LONG, JsonBody, Upload

JSON = {"content-type": "application/json"}


def form(files: Any = (), **fields: Any) -> tuple[bytes, dict[str, str]]:
    """Return the body and headers of a form, options first."""
    request = httpx.Request("POST", "http://localhost", files=files, data=fields)
    return request.read(), {"content-type": request.headers["content-type"]}


def parts(*given: tuple[str, bytes]) -> tuple[bytes, dict[str, str]]:
    """Return the body and headers of a form with parts of these headers and contents."""
    body = b"".join(
        b"--x\r\n" + head.encode() + b"\r\n\r\n" + content + b"\r\n" for head, content in given
    )
    return body + b"--x--\r\n", {"content-type": "multipart/form-data; boundary=x"}


def option(name: str, value: str) -> tuple[str, bytes]:
    return f'Content-Disposition: form-data; name="{name}"', value.encode()


def file(data: bytes, name: str = "image") -> tuple[str, bytes]:
    return f'Content-Disposition: form-data; name="{name}"; filename="a.png"', data


def as_json(value: Any) -> tuple[bytes, dict[str, str]]:
    return json.dumps(value).encode(), JSON


def text(data: bytes) -> str:
    return base64.b64encode(data).decode()


BODIES = {
    "httpx": form({"image": png()}),
    "file name of other letters": form({"image": ("Füße 'x'.png", png(), "image/png")}),
    "file name as in RFC 5987": parts(
        ("Content-Disposition: form-data; name=image; filename*=UTF-8''a%20b.png", png())
    ),
    "no file name": parts(
        ('Content-Disposition: form-data; name="image"\r\nContent-Type: image/png', png())
    ),
    "json": as_json({"image": text(png())}),
    "json with charset": (
        as_json({"image": text(png())})[0],
        {"content-type": "Application/JSON; charset=utf-8"},
    ),
    "data URL": as_json({"image": "data:image/png;base64," + text(png())}),
    "line breaks": as_json({"image": base64.encodebytes(png()).decode()}),
    "URL-safe, no padding": as_json(
        {"image": base64.urlsafe_b64encode(png()).decode().rstrip("=")}
    ),
    "bytes": (png(), {"content-type": "application/octet-stream"}),
    "curl --data-binary": (png(), {"content-type": "application/x-www-form-urlencoded"}),
}


async def test_responses_do_not_depend_on_how_the_photo_is_sent(serve):
    server = await serve()
    plain = await server.post(png()).response()
    assert plain.status == 200
    for name, (body, headers) in BODIES.items():
        assert (await server.post(body, headers=headers).response()).body == plain.body, name


@pytest.mark.parametrize("size", [1, 7])
async def test_forms_arrive_in_parts(serve, size):
    body, headers = parts(option("beam_size", "3"), file(png((9, 8, 7))), option("words", "a dog"))
    body = body.replace(b"beam_size", b"alternatives")

    server = await serve()
    exchange = server.open(headers=headers)
    for start in range(0, len(body), size):
        exchange.send(body[start : start + size], more=True)
    response = await exchange.send(b"").response()
    assert response.texts == ["9-8-7 a dog"]
    assert len(response.json["captions"][0]["alternatives"][0]) == 3


async def test_options_in_the_body_are_those_of_the_query(serve, model):
    query = {"beam_size": "3", "num_captions": "2", "banned_words": "a,b"}
    query |= {"alternatives": "1", "attention": "true"}
    several = [option(*one) for one in query.items()]
    twice = [option("banned_words", "a"), option("banned_words", "b")]
    in_json = {**query, "banned_words": ["a", "b"], "attention": True, "seed": None}
    defaults = {"alternatives": 0, "attention": "false"}  # Swagger UI puts them into the query

    server = await serve()
    responses = [
        await server.post(body, headers=headers, **parameters).response()
        for (body, headers), parameters in (
            ((png(), {}), query),
            (parts(file(png()), *several), {}),  # the photo first, as people type it
            (parts(*several[:2], *twice, *several[3:], file(png())), defaults),
            (as_json({"image": text(png()), **in_json}), {}),
        )
    ]
    assert len({one.body for one in responses}) == 1
    first, _ = responses[0].json["captions"]
    assert "alphas" in first
    assert len(first["alternatives"][0]) == 1
    assert model.searches == [OWN.changed(beam_size=3, num_captions=2, banned_words=("a", "b"))] * 4


async def test_large_json_takes_more_slots(serve, model):
    """A slot stands for max_bytes of memory.

    Requests with several slots share a quarter of all slots.
    """
    photo = text(png() + bytes(90_000))
    body = json.dumps({"images": [photo] * 3}).encode()

    server = await serve(max_bytes=100_000, max_queue=12)
    headers = JSON | {"content-length": str(len(body))}
    exchange = server.open("/v1/batch", headers=headers).send(body[:-1], more=True)
    await until(lambda: exchange.read == 1)
    assert server.service.in_flight == 3
    small = server.post(json.dumps({"image": photo}).encode(), headers=JSON)
    assert (await small.response()).status == 200
    refused = await server.open("/v1/batch", headers=headers).send(body).response()
    assert refused.status == 429
    assert server.service.in_flight == 3
    results = (await exchange.send(body[-1:]).response()).json["results"]
    assert [one["status"] for one in results] == [200] * 3
    assert server.service.in_flight == 0
    # alone, it may take more
    server = await serve(max_bytes=100_000, max_queue=1)
    assert (await server.open("/v1/batch", headers=JSON).send(body).response()).status == 200


LONG_PHOTO = png() + bytes(range(256)) * 40
WRAPPED = base64.encodebytes(LONG_PHOTO).decode()
LETTERS = text(LONG_PHOTO)
ESCAPED = {  # how encoders of JSON write base64
    "plain": LETTERS,
    "PHP": LETTERS.replace("/", "\\/"),
    ".NET": LETTERS.replace("+", "\\u002B"),
    "lower case": LETTERS.replace("+", "\\u002b").replace("/", "\\u002f").replace("=", "\\u003d"),
    "line breaks": WRAPPED.replace("\n", "\\r\\n"),
    "URL-safe": LETTERS.replace("+", "-").replace("/", "_").rstrip("="),
    "data URL": "data:image/png;base64," + LETTERS,
    "data URL of PHP": "data:image\\/png;base64," + LETTERS.replace("/", "\\/"),
}


@pytest.mark.parametrize("size", [3, 64, 1 << 20])
def test_long_strings_of_json_are_photos(size):
    """A parser reads the rest, wherever the body is cut into parts."""
    others = ['"', "\\", '\\"', 'a"b\\', "\\" * 9 + '"', "", "ä😀", "/", '"' * 50, "\\" * LONG]
    rest = {"a": others, 'b"\\': {"c": [1, 2.5, None, True, [], {}]}, "d": "x" * LONG}
    for name, letters in ESCAPED.items():
        body = json.dumps([rest, "IMAGE", rest, {"e": "IMAGE"}]).replace("IMAGE", letters).encode()
        reader = JsonBody(100_000)
        for start in range(0, len(body), size):
            reader.receive(body[start : start + size])
        first, photo, second, third = reader.parsed()
        assert isinstance(first["a"].pop(), Upload)  # the long run of backslashes
        assert isinstance(second["a"].pop(), Upload)
        assert first == second == rest | {"a": others[:-1]}, name
        for found in (photo, third["e"]):
            assert (found.error, found.data.getvalue()) == (None, LONG_PHOTO), name


NO_PHOTOS = [LETTERS + "=" + LETTERS, LETTERS[:-9] + "*"]
NO_PHOTOS += [start + LETTERS for start in ("ä", "http://", "data:,x")]


@pytest.mark.parametrize("letters", NO_PHOTOS)
def test_long_strings_that_are_no_photos(letters):
    for size in (7, 1 << 20):
        reader = JsonBody(100_000)
        body = json.dumps(letters, ensure_ascii=False).encode()
        for start in range(0, len(body), size):
            reader.receive(body[start : start + size])
        found = reader.parsed()
        assert (found.error.status, found.data.getvalue()) == (422, b"")


BOMBS = {
    "lists": b'{"images":[' + b"[]," * 500_000,
    "keys": b"{" + b",".join(b'"k%d":0' % n for n in range(11_000)) + b"}",
    "depth": b"[" * 2_000_000,
    "objects": b'{"a":' * 11_000,
    "numbers": b'{"images":' + b"9" * 2_000_000 + b"}",
    "long number": b'{"images":' + b"9" * 500_000 + b"}",
    "space": b'{"images":' + b" " * 2_000_000 + b"}",
    "short strings": b'{"images":[' + b'"",' * 11_000,
    "quotes": b'{"images":"' + b'\\"' * 500_000 + b'"}',
    "backslashes": b'{"images":"' + b"\\\\" * 500_000 + b'"}',
    "escapes": b'{"images":"' + b"\\u0041" * 500_000 + b'"}',
    "wide": '{"images":"😀'.encode() + b"A" * 2_000_000 + b'"}',
    "surrogates": b'{"images":"' + b"\\ud83d\\ude00" * 100_000 + b'"}',
    "long key": b'{"prompt":"x","' + b"k" * 2_000_000 + b'":0}',
}


async def test_bombs_of_json_are_refused(serve, model):
    """They are rejected before they are parsed. A parser would need up to 20 times their size."""
    server = await serve()
    await server.post(png()).response()
    for name, body in BOMBS.items():
        tracemalloc.start()
        exchange = server.open("/v1/batch", headers=JSON)
        for start in range(0, len(body), 1 << 16):
            exchange.send(body[start : start + (1 << 16)], more=True)
        response = await exchange.send(b"").response()
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        results = response.json.get("results", []) or [{"status": response.status}]
        assert results[0]["status"] in (400, 413, 422), name
        assert peak < 12 << 20, name
    assert len(model.batches) == 1


async def test_bombs_are_refused_before_they_have_arrived(serve):
    exchange = (await serve()).open("/v1/batch", headers=JSON)
    exchange.send(b'{"images":[' + b"[]," * 400_000, more=True)
    response = await exchange.response()
    assert response.status == 413
    assert "more than 1,048,576 bytes besides its photos" in response.error


async def test_number_of_options_is_limited(serve):
    """This holds for every way to send them, because naming each wrong option would take long."""
    names = {f"o{n}": "1" for n in range(101)}
    server = await serve()
    for response in (
        await server.open(**names).response(),
        await server.post(*as_json({"image": text(png())} | names)[:1], headers=JSON).response(),
        await server.open(banned_words=["a"] * 101).response(),
    ):
        assert response.status == 422
        assert "the request has 101 options; send at most 100" in response.error


REFUSED = {
    "wrong name": (
        parts(option("seed", "3"), file(png(), "photo")),
        422,
        "the form has seed, photo, but needs a file field named image",
    ),
    "no @": (parts(option("image", "photo.jpg")), 422, "put @ before the file name: -F image=@"),
    "two photos": (parts(file(png()), file(png())), 422, "several photos to POST /v1/batch"),
    "unknown option": (parts(option("beam", "3"), file(png())), 422, "beam is not an option of"),
    "option twice": (parts(*[option("beam_size", "2")] * 2, file(png())), 422, "is ['2', '2']; i"),
    "long option": (parts(option("words", "x" * 5000), file(png())), 422, "more than 4,000 bytes"),
    "many options": (parts(*[option("words", "a")] * 101), 422, "more than 100 options"),
    "no boundary": ((b"", {"content-type": "multipart/form-data"}), 400, "has no boundary; leave"),
    "cut off": ((parts(file(png()))[0][:-40], parts()[1]), 400, "ends before its last boundary"),
    "deep JSON": ((b"[" * 9_000, JSON), 400, "not valid JSON ("),
    "many values": ((b"[" * 11_000, JSON), 413, "the JSON has more than 10,000 values; send fewer"),
    "long text": (as_json({"image": "", "words": "x" * 5000}), 422, "words has more than 4,000 by"),
    "no object": (as_json(["abc"]), 422, "the JSON is not an object; send "),
    "null": (as_json({"image": None}), 422, "image is null; send a photo in base64"),
    "list": (as_json({"image": [text(png())]}), 422, "send several photos to POST /v1/batch"),
    "both": (
        as_json({"image": "", "images": []}),
        422,
        "the JSON has image, images, but needs one",
    ),
    "URL": (as_json({"image": "https://example.org/"}), 422, "the URL or path https://example.o"),
    "path": (as_json({"image": "/etc/passwd"}), 422, "the server does not fetch or open files; se"),
    "file name": (as_json({"image": "photo.jpg"}), 422, "the URL or path photo.jpg, but"),
    "object": (as_json({"image": {"name": "x"}}), 422, "a photo in the JSON is not a string; send"),
    "data URL without base64": (as_json({"image": "data:image/svg+xml,<svg/>"}), 422, "base64"),
    "curl -d image=@photo.jpg": ((b"image=@photo.jpg", {}), 415, "use -F image=@photo.jpg"),
    "nothing": ((b"", {}), 415, "the body is empty"),
    "large form": (parts(file(b"x" * 9001)), 413, "the photo has more than 9,000 bytes; send a"),
    "large base64": (as_json({"image": text(b"x" * 9001)}), 413, "the photo has more than 9,000 b"),
    "large JSON": (as_json({"words": "x" * 80_000}), 413, "the JSON has more than 77,536 bytes"),
    "large body": ((b"x" * 9001, {}), 413, "the body has more than 9,000 bytes"),
    "declared": ((b"", {"content-length": "200000"}), 413, "the body has more than 9,000 bytes"),
}


async def test_refused_bodies(serve, model):
    """Each error is one line of JSON. The model does not run, and the queue slot is free again."""
    server = await serve(max_bytes=9000)
    for name, ((body, headers), status, message) in REFUSED.items():
        response = await server.post(body, headers=headers).response()
        assert response.status == status, name
        assert message in response.error, name
        assert server.service.in_flight == 0, name
    assert model.batches == []
