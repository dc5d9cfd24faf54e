"""Many photos in one request."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any
from unittest.mock import Mock

import pytest
from colour_server import Exchange, png, until
from PIL import Image
from test_photos import as_json, file, option, parts, text

from captioner.serving import batch_endpoint
from captioner.serving.openapi import BatchResponse

PATH = "/v1/batch"
LINES = {"accept": "application/x-ndjson"}


def photos(count: int, first: int = 0) -> list[bytes]:
    return [png((n, n, n)) for n in range(first, first + count)]


def images(*given: bytes) -> tuple[bytes, dict[str, str]]:
    return parts(*[file(one, "images") for one in given])


def open_batch(server, given, **headers: str) -> Exchange:
    body, kind = given
    return server.post(body, path=PATH, headers=kind | headers)


def lines(body: bytes) -> list[Any]:
    assert body.endswith(b"\n")
    return [json.loads(line) for line in body.splitlines()]


@pytest.mark.parametrize(("name", "accept"), [("image", {}), ("images", LINES)])
async def test_results_are_in_order_each_with_its_status(serve, accept, name):
    given = [png((1, 1, 1)), b"no photo", png(size=(50, 50)), png((2, 2, 2)), b"", b"x" * 3000]

    server = await serve(max_bytes=2000, max_pixels=1000)
    alone = await server.post(png((2, 2, 2))).response()
    form = parts(*[file(one, name) for one in given])
    response = await open_batch(server, form, **accept).response()
    assert response.status == 200
    if accept:
        assert response.headers["content-type"] == "application/x-ndjson"
        results = lines(response.body)
    else:
        results = response.json["results"]
        BatchResponse.model_validate(response.json)
    assert [one["index"] for one in results] == list(range(6))
    assert [one["status"] for one in results] == [200, 415, 413, 200, 415, 413]
    assert all(one["name"] == "a.png" for one in results)
    assert results[0]["captions"][0]["text"] == "1-1-1 2 0"
    assert {k: results[3][k] for k in ("width", "height", "captions")} == alone.json
    assert "not a supported image" in results[1]["error"]
    assert "1,000 pixels" in results[2]["error"]
    assert "0 bytes" in results[4]["error"]
    assert "more than 2,000 bytes" in results[5]["error"]
    assert server.service.in_flight == 0


async def test_limit_of_json_responses(serve, model, monkeypatch):
    server = await serve(max_batch=3)
    given = images(*photos(4))
    response = await open_batch(server, given).response()
    assert response.status == 413
    assert "at most 3 photos" in response.error
    assert "Accept: application/x-ndjson" in response.error
    assert len(lines((await open_batch(server, given, **LINES).response()).body)) == 4
    captioned = len(model.batches)
    in_json = as_json({"images": [text(photo) for photo in photos(4)]})
    response = await open_batch(server, in_json).response()
    assert (response.status, len(model.batches)) == (413, captioned)
    monkeypatch.setattr(batch_endpoint, "MAX_RESULTS", 200)
    response = await open_batch(server, images(*photos(3))).response()
    assert response.status == 413
    assert "at most 200 bytes" in response.error
    assert server.service.in_flight == 0


async def test_reading_waits_for_decoding_and_the_client(serve, model, monkeypatch):
    """Memory is limited: if a client does not read its results, its photos are not read either."""
    decode, prepare = threading.Event(), model.prepare
    monkeypatch.setattr(model, "prepare", lambda photo: decode.wait(30) and prepare(photo))
    server = await serve(batch_size=8)
    open_gate, real = asyncio.Event(), Exchange._send

    async def slow(self, message):
        if message["type"] == "http.response.body":
            await open_gate.wait()
        await real(self, message)

    monkeypatch.setattr(Exchange, "_send", slow)
    exchange = server.open(PATH, headers={**images()[1], **LINES})
    for photo in photos(50):
        exchange.send(images(photo)[0].removesuffix(b"--x--\r\n"), more=True)
    exchange.send(b"--x--\r\n")
    await until(lambda: exchange.read > 0)
    await asyncio.sleep(0.1)
    assert exchange.read <= 2  # a photo, and the head of the next one
    decode.set()
    await until(lambda: exchange.read >= 10)
    for _ in range(200):
        await asyncio.sleep(0.001)
    assert exchange.read < 20  # a batch of results, and a batch of photos
    assert server.service.captions.waiting == 0
    open_gate.set()
    results = lines((await exchange.response()).body)
    assert [one["index"] for one in results] == list(range(50))


async def test_batches_leave_room_for_single_photos(serve, model):
    """All bulk requests together wait for one batch of the model, so others wait no longer."""
    server = await serve(batch_size=4)
    blocked = await server.hold()
    batches = [open_batch(server, images(*photos(20, 1))) for _ in range(3)]
    await until(lambda: server.service.captions.waiting == 4)
    single = server.post(png((99, 99, 99)))
    await until(lambda: server.service.captions.waiting == 5)
    for _ in range(50):
        await asyncio.sleep(0.001)
    assert server.service.captions.waiting == 5
    model.gate.set()
    await blocked.response()
    assert (await single.response()).status == 200
    for exchange in batches:
        results = (await exchange.response()).json["results"]
        assert [one["status"] for one in results] == [200] * 20
    position = next(n for n, batch in enumerate(model.batches) if "99-99-99" in batch)
    assert position <= 2


async def test_results_are_held_back_for_a_proxy_that_asks_for_it(serve):
    server = await serve()
    body, kind = images(*photos(3))
    headers = {**kind, **LINES, "x-hold-results": "1"}
    exchange = server.open(PATH, headers=headers).send(body[:-60], more=True)
    await until(lambda: len(server.model.batches) > 1)
    await asyncio.sleep(0.05)
    assert not exchange._sent
    exchange.send(body[-60:])
    assert len(lines((await exchange.response()).body)) == 3


async def test_costly_batches_leave_room_for_others(serve, model):
    server = await serve(batch_size=4)
    model.held = 10
    model.gate.clear()
    body, kind = images(*photos(9))
    query = {"beam_size": 10, "max_length": 50}
    costly = server.open(PATH, headers=kind, **query).send(body)
    assert await asyncio.to_thread(model.entered.acquire, timeout=30)
    response = await open_batch(server, images(*photos(9))).response()
    assert [one["status"] for one in response.json["results"]] == [200] * 9
    model.gate.set()
    assert (await costly.response()).status == 200


@pytest.mark.parametrize(("kind", "accept"), [("form", {}), ("json", LINES)])
async def test_disconnect_cancels_the_rest(serve, model, accept, kind):
    server = await serve(batch_size=4)
    blocked = await server.hold()
    given = photos(30, 1)
    form = as_json({"images": [text(one) for one in given]})
    if kind == "form":
        form = images(*given)
    exchange = open_batch(server, form, **accept)
    await until(lambda: server.service.captions.waiting == 4)
    exchange.disconnect()
    await asyncio.wait_for(exchange.task, 30)
    assert server.service.captions.waiting == 0
    assert server.service.in_flight == 1
    assert [slots._value for slots in server.service.bulk_slots.values()] == [4, 2]
    model.gate.set()
    await blocked.response()
    assert (await open_batch(server, images(*photos(9))).response()).status == 200
    assert sum(map(len, model.batches)) == 1 + 9  # none of the cancelled photos


async def test_shutdown_gives_each_photo_its_status(serve, model):
    """Finished results are sent, even at the end of the grace period."""
    server = await serve()
    body, kind = images(*photos(3))
    second = body.index(b"--x", 1)
    third = body.index(b"--x", second + 1)
    exchange = server.open(PATH, headers=kind | LINES).send(body[: second + 9], more=True)
    slots = server.service.bulk_slots[server.service.captions]
    await until(lambda: len(model.batches) == 1 and slots._value == 8)
    model.gate.clear()
    exchange.send(body[second + 9 : third + 9], more=True)
    await until(lambda: len(model.batches) == 2)
    server.service.close()
    results = lines((await exchange.response()).body)
    found = [(one.get("index"), one["status"]) for one in results]
    assert found == [(0, 200), (1, 503), (None, 503)]
    assert all("shutting down" in one["error"] for one in results[1:])


async def test_unexpected_error_while_decoding_fails_one_photo(serve, model, monkeypatch):
    prepare = Mock(side_effect=[RuntimeError("secret"), model.prepare(Image.new("RGB", (1, 1)))])
    monkeypatch.setattr(model, "prepare", prepare)
    server = await serve()
    results = (await open_batch(server, images(*photos(2))).response()).json["results"]
    assert [one["status"] for one in results] == [500, 200]


async def test_errors_of_the_whole_request(serve):
    """Before the first result, an error has its own status. After it, it is the last line."""
    server = await serve()
    for form, message in {
        parts(file(png(), "photos"))[0]: "has photos, but needs a file field named images",
        parts(option("num_captions", "9"), file(png()))[0]: "beam_size is 2; set beam_size to",
    }.items():
        response = await open_batch(server, (form, parts()[1]), **LINES).response()
        assert response.status == 422
        assert message in response.error
    form = parts(file(png()), option("beam_size", "3"))
    first, last = lines((await open_batch(server, form, **LINES).response()).body)
    assert (first["index"], first["status"], last["status"]) == (0, 200, 422)
    assert "index" not in last
    assert "beam_size comes after a photo; put the options before the photos" in last["error"]
    assert server.service.in_flight == 0
