"""Photos and options in forms, in JSON and as bytes."""

from __future__ import annotations

import base64
import io
import json
import sys
from typing import Any

import httpx
import pytest
from colour_server import png, until
from PIL import Image

from captioner.data.formats import register_heif

JSON = {"content-type": "application/json"}


def form(files: Any = (), **fields: Any) -> tuple[bytes, dict[str, str]]:
    """Body and headers of a form, options first."""
    request = httpx.Request("POST", "http://localhost", files=files, data=fields)
    return request.read(), {"content-type": request.headers["content-type"]}


def parts(*given: tuple[str, bytes]) -> tuple[bytes, dict[str, str]]:
    """Body and headers of a form whose parts have these headers and contents."""
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


# --- what is accepted ----------------------------------------------------------------------------

BODIES = {
    "httpx": form({"image": png()}),
    "file name of other letters": form({"image": ("Füße 'x'.png", png(), "image/png")}),
    "no file name": parts(
        ('Content-Disposition: form-data; name="image"\r\nContent-Type: image/png', png())
    ),
    "json": (json.dumps({"image": text(png())}).encode(), JSON),
    "json with charset": (
        json.dumps({"image": text(png())}).encode(),
        {"content-type": "Application/JSON; charset=utf-8"},
    ),
    "data URL": (json.dumps({"image": "data:image/png;base64," + text(png())}).encode(), JSON),
    "line breaks": (
        json.dumps({"image": base64.encodebytes(png()).decode()}).encode(),
        JSON,
    ),
    "URL-safe, no padding": (
        json.dumps({"image": base64.urlsafe_b64encode(png()).decode().rstrip("=")}).encode(),
        JSON,
    ),
    "bytes": (png(), {"content-type": "application/octet-stream"}),
    "curl --data-binary": (png(), {"content-type": "application/x-www-form-urlencoded"}),
}


@pytest.mark.parametrize("given", BODIES.values(), ids=BODIES)
def test_responses_do_not_depend_on_how_the_photo_is_sent(serve, given):
    async def test(server):
        plain = await server.post(png()).response()
        body, headers = given
        response = await server.post(body, headers=headers).response()
        assert response.status == 200, response.body
        assert response.body == plain.body  # byte for byte

    serve(test)


def test_heic(serve):
    pillow_heif = pytest.importorskip("pillow_heif")
    made = io.BytesIO()
    pillow_heif.from_pillow(Image.new("RGB", (64, 48), (9, 8, 7))).save(made, quality=100)
    heic = made.getvalue()

    async def test(server):
        body, headers = form({"image": heic})
        response = await server.post(body, headers=headers).response()
        assert response.status == 200
        assert [response.json["width"], response.json["height"]] == [64, 48]
        for end in (len(heic) // 2, 100):
            broken = await server.post(heic[:end]).response()
            assert broken.status == 422
            assert "copy or download the file again" in broken.error

    serve(test)

    async def refused(server):
        response = await server.post(heic).response()
        assert response.status == 413
        assert "64 x 48 pixels; the limit is 3,000" in response.error

    serve(refused, max_pixels=3000)


def test_heic_without_its_decoder(serve, monkeypatch):
    monkeypatch.setitem(sys.modules, "pillow_heif", None)
    register_heif.cache_clear()

    async def test(server):
        response = await server.post(b"\0\0\0\x18ftypheic\0\0\0\0mif1heic").response()
        assert response.status == 415
        assert "HEIC needs pillow-heif; run: pip install 'captioner[heif]'" in response.error

    serve(test)
    register_heif.cache_clear()


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_forms_arrive_in_parts(serve, size):
    body, headers = parts(option("beam_size", "3"), file(png((9, 8, 7))), option("words", "a dog"))
    body = body.replace(b"beam_size", b"alternatives")

    async def test(server):
        exchange = server.open(headers=headers)
        for start in range(0, len(body), size):
            exchange.send(body[start : start + size], more=True)
        response = await exchange.send(b"").response()
        assert response.texts == ["9-8-7 a dog"]
        assert len(response.json["captions"][0]["alternatives"][0]) == 3

    serve(test)


def test_options_in_the_body_are_those_of_the_query(serve, model, monkeypatch):
    seen = []
    real = model.caption_batch
    monkeypatch.setattr(
        model, "caption_batch", lambda p, o, **k: seen.append((o, k)) or real(p, o, **k)
    )
    query = {"beam_size": 3, "num_captions": 2, "banned_words": ["a", "b"], "alternatives": 1}

    in_form = {name: str(value) for name, value in query.items() if name != "banned_words"}
    several = [option(name, value) for name, value in in_form.items()]
    requests: list[tuple[Any, dict[str, Any]]] = [
        ((png(), {}), {"attention": "true", **query}),
        # the photo first, as people type it
        (
            parts(
                file(png()),
                *several,
                option("banned_words", "a"),
                option("banned_words", "b"),
                option("attention", "true"),
            ),
            {},
        ),
        (parts(*several, option("banned_words", "a,b"), file(png())), {"attention": "true"}),
        (as_json({"image": text(png()), "attention": True, "seed": None, **query}), {}),
    ]

    async def test(server):
        bodies = set()
        for (body, headers), parameters in requests:
            response = await server.post(body, headers=headers, **parameters).response()
            assert len(response.texts) == 2
            bodies.add(response.body)
        assert len(bodies) == 1
        assert "alphas" in response.json["captions"][0]

    serve(test)
    assert len({str(one) for one in seen}) == 1
    assert seen[0][0].banned_words == ("a", "b")


def test_defaults_in_the_query_give_way_to_the_body(serve):
    """Swagger UI puts attention=false and alternatives=0 into the query."""

    async def test(server):
        body, headers = form({"image": png()}, alternatives="2")
        response = await server.post(
            body, headers=headers, alternatives=0, attention="false"
        ).response()
        assert len(response.json["captions"][0]["alternatives"][0]) == 2

    serve(test)


# --- what is refused -----------------------------------------------------------------------------


def check_refused(serve, model, given, status, message, **limits):
    async def test(server):
        body, headers = given
        response = await server.post(body, headers=headers).response()
        assert response.status == status, response.body
        assert message in response.error
        assert len(response.error) < 600
        assert server.service.in_flight == 0

    serve(test, **limits)
    assert model.batches == []


FORMS = {
    "wrong name": (
        form({"file": png()}),
        422,
        "the form has no file field named image; found file",
    ),
    "wrong name after an option": (
        parts(option("beam_size", "3"), file(png(), "photo")),
        422,
        "the form has no file field named image; found beam_size, photo",
    ),
    "no photo": (
        parts(option("beam_size", "3")),
        422,
        "the form has no file field named image; found beam_size",
    ),
    "empty form": (parts(), 422, "the form has no file field named image; found no fields"),
    "no @": (
        parts(option("image", "photo.jpg")),
        422,
        "image is the text 'photo.jpg', not a file; with curl, put @ before the file's name: -F "
        "image=@photo.jpg",
    ),
    "two photos": (
        parts(file(png()), file(png())),
        422,
        "the form has several photos; send several photos to POST /v1/batch",
    ),
    "images": (
        parts(file(png(), "images")),
        422,
        "the file field is named images; send several photos to POST /v1/batch",
    ),
    "empty file": (parts(file(b"")), 415, "the file is empty (0 bytes)"),
    "not a photo": (parts(file(b"hello")), 415, "not a supported image"),
    "truncated photo": (parts(file(png()[:-30])), 422, "truncated"),
    "unknown option": (
        parts(option("beam", "3"), file(png())),
        422,
        "unknown parameter beam; give beam_size",
    ),
    "invalid option": (
        parts(option("beam_size", "x"), file(png())),
        422,
        "beam_size is x; give an integer from 1 to 20",
    ),
    "option twice": (
        parts(option("beam_size", "2"), option("beam_size", "3"), file(png())),
        422,
        "beam_size is ['2', '3']; give an integer from 1 to 20",
    ),
    "conflict": (
        parts(option("words", "a dog"), option("beam_size", "3"), file(png())),
        422,
        "words cannot be combined with search options (beam_size)",
    ),
    "long option": (
        parts(option("words", "x" * 5000), file(png())),
        422,
        "the field words has more than 4,000 bytes",
    ),
    "photo as a long field": (
        parts(('Content-Disposition: form-data; name="image"', b"x" * 5000)),
        422,
        "a photo needs a file name",
    ),
    "many options": (
        parts(*[option("words", "a")] * 101, file(png())),
        422,
        "the form has more than 100 options",
    ),
    "no boundary": (
        (b"", {"content-type": "multipart/form-data"}),
        400,
        "has no boundary; leave the header out",
    ),
    "other boundary": (
        (parts(file(png()))[0], {"content-type": "multipart/form-data; boundary=y"}),
        400,
        "not a valid form",
    ),
    "long boundary": (
        (b"", {"content-type": f"multipart/form-data; boundary={'y' * 300}"}),
        400,
        "not a valid form",
    ),
    "cut off": ((parts(file(png()))[0][:-40], parts()[1]), 400, "ends before its last boundary"),
    "many headers": (
        parts(("\r\n".join(f"X-{n}: y" for n in range(20)), png())),
        400,
        "not a valid form",
    ),
    "long header": (parts((f"X: {'y' * 9000}", png())), 400, "not a valid form"),
    "no name": (
        parts(("Content-Type: image/png", png())),
        422,
        "the form has no file field named image",
    ),
    "mixed": (
        (b"", {"content-type": "multipart/mixed; boundary=x"}),
        415,
        "multipart/mixed is not supported; send a form as multipart/form-data",
    ),
}


JSONS = {
    "not JSON": ((b"{image: 3}", JSON), 400, "not valid JSON: "),
    "a photo": ((png(), JSON), 400, "to send a photo's bytes, leave out Content-Type"),
    "empty": ((b"", JSON), 400, "not valid JSON: "),
    "deep": ((b"[" * 100_000, JSON), 400, "not valid JSON: "),
    "infinity": ((b'{"image": "", "temperature": Infinity}', JSON), 400, "not valid JSON: "),
    "a string": (as_json("abc"), 422, 'the JSON is a string; give an object: {"image": '),
    "a list": (as_json(["abc"]), 422, "the JSON is a list of 1; give an object"),
    "wrong name": (
        as_json({"photo": text(png()), "beam_size": 3}),
        422,
        "the JSON has no field named image; found photo, beam_size",
    ),
    "no fields": (as_json({}), 422, "the JSON has no field named image; found no fields"),
    "null": (as_json({"image": None}), 422, "the JSON has no field named image; found image"),
    "number": (as_json({"image": 3}), 422, "the photo is a number; give a base64 string"),
    "object": (as_json({"image": {}}), 422, "the photo is an object; give a base64 string"),
    "list": (
        as_json({"image": [text(png())]}),
        422,
        "image is a list of 1; send several photos to POST /v1/batch",
    ),
    "images": (as_json({"images": [text(png())] * 2}), 422, "images is a list of 2; send several"),
    "both": (
        as_json({"image": text(png()), "images": [text(png())]}),
        422,
        "the JSON has both image and images",
    ),
    "URL": (
        as_json({"image": "https://example.org/photo.jpg"}),
        422,
        "the photo is a URL, which the server does not download; send the file itself",
    ),
    "path": (
        as_json({"image": "photo.jpg"}),
        422,
        "the photo is not valid base64 (it begins with 'photo.jpg'); encode the bytes of the file",
    ),
    "not ASCII": (as_json({"image": "é" * 9}), 422, "not valid base64"),
    "lone surrogate": (as_json({"image": "\ud800"}), 400, "not valid JSON"),
    "data URL without base64": (
        as_json({"image": "data:image/svg+xml,<svg/>"}),
        422,
        "the data: URL begins 'data:image/svg+xml'; give data:image/jpeg;base64",
    ),
    "empty photo": (as_json({"image": ""}), 415, "the photo is empty (0 bytes)"),
    "not a photo": (as_json({"image": text(b"hello")}), 415, "not a supported image"),
    "unknown option": (as_json({"image": text(png()), "beam": 3}), 422, "unknown parameter beam"),
    "invalid option": (
        as_json({"image": text(png()), "beam_size": 99}),
        422,
        "beam_size is 99; give an integer from 1 to 20",
    ),
    "option of another type": (
        as_json({"image": text(png()), "words": 3}),
        422,
        "words is 3; give a text",
    ),
    "option of objects": (
        as_json({"image": text(png()), "banned_words": [{}]}),
        422,
        "banned_words is {}; give a text",
    ),
    "undeclared": (
        (as_json({"image": text(png())})[0], {"content-type": "text/plain"}),
        415,
        "looks like JSON, but its Content-Type is text/plain; send Content-Type: application/json",
    ),
    "curl -d image=@photo.jpg": (
        (b"image=@photo.jpg", {"content-type": "application/x-www-form-urlencoded"}),
        415,
        "with curl, send the file by -F image=@photo.jpg",
    ),
    "compressed": (
        (b"x", {"content-encoding": "gzip"}),
        415,
        "Content-Encoding gzip is not supported; send the body uncompressed",
    ),
}


@pytest.mark.parametrize(
    ("given", "status", "message"),
    [
        *[pytest.param(*case, id=f"form: {name}") for name, case in FORMS.items()],
        *[pytest.param(*case, id=f"JSON: {name}") for name, case in JSONS.items()],
    ],
)
def test_refused_bodies(serve, model, given, status, message):
    check_refused(serve, model, given, status, message)


def test_option_in_query_and_body(serve, model):
    async def test(server):
        body, headers = form({"image": png()}, beam_size="3")
        response = await server.post(body, headers=headers, beam_size=2).response()
        assert response.status == 422
        assert "beam_size is given in the query and in the body; give it once" in response.error

    serve(test)


# --- limits --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (parts(file(b"x" * 2001)), "the photo has more than 2,000 bytes; the limit is 2,000"),
        (as_json({"image": text(b"x" * 2001)}), "the photo has 2,001 bytes; the limit is 2,000"),
        (as_json({"image": text(b"x" * 3000)}), "the photo has about 3,000 bytes"),
        (as_json({"image": "", "words": "x" * 70_000}), "more than 68,202 bytes"),
    ],
)
def test_photos_over_the_limit(serve, model, given, message):
    check_refused(serve, model, given, 413, message, max_bytes=2000)


@pytest.mark.parametrize("kind", ["multipart/form-data; boundary=x", "application/json"])
def test_content_length_over_the_limit_is_refused_unread(serve, kind):
    async def test(server):
        exchange = server.open(headers={"content-length": "200000", "content-type": kind})
        response = await exchange.response()
        assert (response.status, exchange.read) == (413, 0)
        assert "200,000 bytes; the limit is 2,000 for a photo" in response.error

    serve(test, max_bytes=2000)


def test_reading_stops_at_the_limit(serve):
    """The rest of a photo that is too large is not kept."""

    async def test(server):
        body, headers = parts(file(b"x" * 100_000))
        exchange = server.open(headers=headers | {"content-length": str(60_000)})
        for start in range(0, 60_000, 1000):
            exchange.send(body[start : start + 1000], more=True)
        # read: what it takes to exceed the limit; afterwards the connection is drained
        assert (await exchange.response()).status == 413

    serve(test, max_bytes=2000)


def test_a_wrong_field_name_is_reported_before_the_photo_is_sent(serve):
    async def test(server):
        body, headers = parts(file(b"x" * 5000, "file"))
        response = await server.open(headers=headers).send(body[:200], more=True).response()
        assert "found file" in response.error

    serve(test)


def test_large_json_takes_more_slots(serve, model):
    """Its text is held twice while it is parsed; a slot stands for max_bytes of memory."""
    photo = text(png() + bytes(1500))
    body = json.dumps({"image": photo}).encode()

    async def test(server):
        exchange = server.open(headers=JSON)
        exchange.send(body[:-1], more=True)
        await until(lambda: exchange.read == 1)
        assert server.service.in_flight == 3
        small = server.post(png())
        assert (await small.response()).status == 200
        refused = await server.post(body, headers=JSON).response()
        assert refused.status == 429
        assert server.service.in_flight == 3
        assert (await exchange.send(body[-1:]).response()).status == 200
        assert server.service.in_flight == 0
        # alone, it may take all slots
        assert (await server.post(body, headers=JSON).response()).status == 200

    serve(test, max_bytes=1800, max_queue=4)


def test_slow_forms_time_out(serve):
    async def test(server):
        body, headers = parts(file(png()))
        response = await server.open(headers=headers).send(body[:99], more=True).response()
        assert response.status == 408
        assert server.service.in_flight == 0

    serve(test, timeout=0.05)


def test_a_client_that_leaves_frees_its_slot(serve):
    async def test(server):
        body, headers = parts(file(png()))
        exchange = server.open(headers=headers).send(body[:99], more=True)
        await until(lambda: server.service.in_flight == 1)
        exchange.disconnect()
        await exchange.task
        assert server.service.in_flight == 0

    serve(test)


# --- other sites ---------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/v1/captions", "/v1/batch", "/v1/overlay.png", "/v1/maps.npy"])
@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"origin": "http://evil.example"}, 403),
        ({"origin": "null"}, 403),  # a sandboxed frame
        ({"sec-fetch-site": "cross-site"}, 403),
        ({"sec-fetch-site": "same-site"}, 403),
        ({"host": "evil.example"}, 421),  # DNS rebinding
        ({"host": "evil.example", "origin": "http://evil.example"}, 421),
    ],
)
def test_forms_of_other_sites_are_refused_unread(serve, model, path, headers, status):
    """A browser sends forms to any site without asking it first."""

    async def test(server):
        _, kind = form({"image": png()})
        exchange = server.open(path, headers={**kind, **headers})
        response = await exchange.response()
        assert (response.status, exchange.read) == (status, 0)
        assert response.error

    serve(test)
    assert model.batches == []


def test_forms_of_the_own_page_are_accepted(serve):
    async def test(server):
        body, kind = form({"image": png()})
        own = {"host": "localhost:8000", "origin": "http://localhost:8000"}
        headers = {**kind, **own, "sec-fetch-site": "same-origin"}
        assert (await server.post(body, headers=headers).response()).status == 200

    serve(test)
