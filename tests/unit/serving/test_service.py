"""Queue slots, uploads, timeouts, disconnects and shutdown."""

from __future__ import annotations

import asyncio
import base64
import gc
import io
import re
import threading
import time
import weakref
from types import SimpleNamespace
from typing import ClassVar

import pytest
from colour_server import BAD, name, png, until
from PIL import Image

from captioner.serving import bodies as bodies_module
from captioner.serving import service as service_module
from captioner.serving.limits import Limits


def test_full_queue_returns_429(serve, model):
    async def test(server):
        first = await server.hold()
        second = server.post(png())
        await until(lambda: server.service.in_flight == 2)

        third = await server.post(png()).response()

        assert third.status == 429
        assert int(third.headers["retry-after"]) > 0
        assert "2 requests" in third.error
        assert await server.metric("captioner_held_requests") == 2
        model.gate.set()
        assert [(await one.response()).status for one in (first, second)] == [200, 200]
        assert (await server.post(png()).response()).status == 200  # there are free slots again
        assert await server.metric('captioner_refused_total{reason="queue"}') == 1
        assert await server.metric("captioner_held_requests") == 0

    serve(test, max_queue=2)


def test_slot_is_taken_before_the_body_is_read(serve):
    """Memory is bounded by slots times bytes, since no body is read without a slot."""

    async def test(server):
        slow = server.open().send(b"part", more=True)
        await until(lambda: slow.read == 1)

        refused = server.post(png())

        assert (await refused.response()).status == 429
        assert refused.read == 0
        slow.disconnect()
        await slow.task
        assert server.service.in_flight == 0

    serve(test, max_queue=1)


def test_content_length_over_the_limit(serve):
    async def test(server):
        exchange = server.open(headers={"content-length": "1001"})
        response = await exchange.response()
        assert (response.status, exchange.read) == (413, 0)
        assert "1,001 bytes" in response.error
        assert "the limit is 1,000" in response.error

    serve(test, max_bytes=1000)


def test_chunked_body_over_the_limit(serve):
    """The rest of a body without Content-Length is discarded."""

    async def test(server):
        exchange = server.open(headers={"transfer-encoding": "chunked"})
        for _ in range(10):
            exchange.send(b"x" * 400, more=True)
        response = await exchange.response()
        assert (response.status, exchange.read) == (413, 10)
        assert "1,000" in response.error

    serve(test, max_bytes=1000)


def test_endless_body(serve, monkeypatch):
    monkeypatch.setattr("captioner.serving.connections.DRAIN_BYTES", 2000)

    async def test(server):
        exchange = server.open(headers={"transfer-encoding": "chunked"})
        for _ in range(20):
            exchange.send(b"x" * 400, more=True)
        response = await exchange.response()
        assert (response.status, exchange.read) == (413, 3 + 5)
        assert response.headers["connection"] == "close"

    serve(test, max_bytes=1000)


def test_wrong_content_length(serve):
    async def test(server):
        exchange = server.open(headers={"content-length": "10"}).send(b"x" * 1001)
        assert (await exchange.response()).status == 413

    serve(test, max_bytes=1000)


def test_body_at_the_limit(serve):
    async def test(server):
        assert (await server.post(png()).response()).status == 200

    serve(test, max_bytes=len(png()))


def test_body_in_parts(serve):
    async def test(server):
        whole, exchange = png((9, 8, 7)), server.open()
        for start in range(0, len(whole), 10):
            exchange.send(whole[start : start + 10], more=True)
        response = await exchange.send(b"").response()
        assert response.texts == ["9-8-7 2 0"]

    serve(test)


@pytest.mark.parametrize("size", [(30, 41), (41, 30), (1000, 2)])
def test_too_many_pixels(serve, model, size):
    async def test(server):
        response = await server.post(png(size=size)).response()
        assert response.status == 413
        assert "1,200 pixels" in response.error
        assert await server.metric('captioner_refused_total{reason="pixels"}') == 1

    serve(test, max_pixels=1200)
    assert model.batches == []


def test_slow_upload_returns_408(serve):
    async def test(server):
        exchange = server.open().send(b"part", more=True)
        response = await exchange.response()
        assert response.status == 408
        assert response.headers["connection"] == "close"
        assert "0.05 s" in response.error
        assert server.service.in_flight == 0

    serve(test, timeout=0.05)


def test_slow_captioning_returns_503(serve, model, monkeypatch):
    """An event replaces the clock, so that a slow machine does not time out the last photo."""
    real, limits = service_module.within, []

    async def test(server):
        too_late = asyncio.Event()

        async def within(seconds, work, late, stops):
            limits.append(seconds)
            return await real(None, work, late, [*stops, (too_late.wait(), late)])

        monkeypatch.setattr(service_module, "within", within)
        running = await server.hold()
        waiting = server.post(png((1, 1, 1)))
        await until(lambda: server.service.batcher.waiting == 1)

        too_late.set()

        for exchange in (waiting, running):
            response = await exchange.response()
            assert response.status == 503
            assert int(response.headers["retry-after"]) > 0
            assert "25 s" in response.error
        assert server.service.in_flight == 0
        assert server.service.batcher.waiting == 0
        too_late.clear()
        model.gate.set()
        assert (await server.post(png((2, 2, 2))).response()).texts == ["2-2-2 2 0"]

    serve(test, timeout=25)
    assert set(limits) == {25}
    assert "1-1-1" not in [colour for batch in model.batches for colour in batch]


def test_disconnect_while_waiting_frees_the_slot(serve, model):
    async def test(server):
        running = await server.hold()
        disconnected, other = server.post(png((1, 1, 1))), server.post(png((2, 2, 2)))
        await until(lambda: server.service.batcher.waiting == 2)

        disconnected.disconnect()
        await disconnected.task

        assert (server.service.batcher.waiting, server.service.in_flight) == (1, 2)
        model.gate.set()
        await running.response()
        assert (await other.response()).texts == ["2-2-2 2 0"]
        line = 'captioner_requests_total{route="/v1/captions",status="499"}'
        assert await server.metric(line) == 1

    serve(test)
    assert model.batches == [["0-0-0"], ["2-2-2"]]


def test_disconnect_while_sending_frees_the_slot(serve):
    async def test(server):
        exchange = server.open().send(b"part", more=True)
        await until(lambda: server.service.in_flight == 1)
        exchange.disconnect()
        await exchange.task
        assert server.service.in_flight == 0

    serve(test)


class Body(io.BytesIO):
    """A body whose instances are counted."""

    alive: ClassVar[weakref.WeakSet[Body]] = weakref.WeakSet()

    def __init__(self) -> None:
        super().__init__()
        self.alive.add(self)


def test_abandoned_decodings_count_towards_the_limit(serve, model, monkeypatch, concurrency):
    """Clients that disconnect do not cause more parallel decodings, nor leave photos queued."""
    monkeypatch.setattr(bodies_module, "io", SimpleNamespace(BytesIO=Body))
    started, gate = threading.Semaphore(0), threading.Event()
    real = service_module.open_reduced

    def slow(*given, **named):
        with concurrency:
            started.release()
            assert gate.wait(30)
        return real(*given, **named)

    monkeypatch.setattr(service_module, "open_reduced", slow)

    async def test(server):
        exchanges = [server.post(png((n, n, n))) for n in range(1, 7)]
        for _ in range(service_module.DECODERS):
            assert await asyncio.to_thread(started.acquire, timeout=30)
        for exchange in exchanges[:4]:  # two being decoded and two waiting
            exchange.disconnect()
            await exchange.task
        assert server.service.in_flight == 2
        gc.collect()
        assert len(Body.alive) == service_module.DECODERS + 2
        gate.set()
        for n, exchange in enumerate(exchanges[4:], 5):
            assert (await exchange.response()).texts == [f"{n}-{n}-{n} 2 0"]

    serve(test)
    assert concurrency.most == service_module.DECODERS
    assert sorted(colour for batch in model.batches for colour in batch) == ["5-5-5", "6-6-6"]


def test_shutdown_finishes_running_and_refuses_the_rest(serve, model):
    async def test(server):
        running = await server.hold()
        waiting, sending = server.post(png()), server.open().send(b"part", more=True)
        await until(lambda: server.service.batcher.waiting == 1 and server.service.in_flight == 3)

        server.service.close()

        for exchange in (waiting, sending, server.post(png())):
            response = await exchange.response()
            assert response.status == 503
            assert "shutting down" in response.error
            assert int(response.headers["retry-after"]) > 0
        assert (await server.get("/healthz")).status == 503
        model.gate.set()
        assert (await running.response()).texts == ["0-0-0 2 0"]

    serve(test)


def test_option_error_of_one_photo(serve, model):
    from captioner.errors import OptionError

    model.broken = OptionError("no caption is left; lower {min_length}")

    async def test(server):
        running = await server.hold()
        good, bad = server.post(png((1, 1, 1))), server.post(png(BAD))
        await until(lambda: server.service.batcher.waiting == 2)
        model.gate.set()
        await running.response()
        assert (await good.response()).texts == ["1-1-1 2 0"]
        response = await bad.response()
        assert response.status == 422
        assert response.error == "no caption is left; lower min_length"  # as the query spells it

    serve(test)


def test_internal_error_does_not_leak_its_message(serve, model, caplog):
    """An error message may quote the request, so it is neither returned nor logged."""
    model.broken = RuntimeError(f"secret {name(BAD)}")
    caplog.set_level("DEBUG")

    async def test(server):
        response = await server.post(png(BAD)).response()
        assert response.status == 500
        assert response.error == "internal error; see the server log"
        assert response.headers["x-content-type-options"] == "nosniff"
        assert server.service.in_flight == 0
        assert (await server.post(png()).response()).status == 200  # the server still works
        line = 'captioner_requests_total{route="/v1/captions",status="500"}'
        assert await server.metric(line) == 1

    serve(test)
    assert "RuntimeError at " in caplog.text
    assert "colour_server.py:" in caplog.text
    assert "secret" not in caplog.text


def test_large_jpeg_is_decoded_at_a_reduced_size(serve, model, monkeypatch):
    """The model gets a smaller image, the response has the whole one's size."""
    prepared = []
    real = model.prepare
    monkeypatch.setattr(model, "prepare", lambda image: prepared.append(image.size) or real(image))
    turned = Image.Exif()
    turned[0x0112] = 6  # a quarter turn
    files = {}
    for kind, exif in (("JPEG", Image.Exif()), ("JPEG", turned), ("PNG", Image.Exif())):
        file = io.BytesIO()
        Image.new("RGB", (4000, 3000), (10, 200, 30)).save(file, kind, exif=exif)
        files[kind, len(exif)] = file.getvalue()

    async def test(server):
        for (_, rotated), file in files.items():
            body = (await server.post(file).response()).json
            size = (3000, 4000) if rotated else (4000, 3000)
            assert (body["width"], body["height"]) == size

    serve(test)
    assert prepared == [(1000, 750), (750, 1000), (4000, 3000)]


def test_large_jpeg_is_drawn_with_as_many_pixels_as_asked_for(serve):
    """It is decoded at a reduced size, but at no smaller one than its picture."""
    file = io.BytesIO()
    Image.new("RGB", (4000, 3000), (10, 200, 30)).save(file, "JPEG")

    async def test(server):
        for side in (64, 1280):
            exchange = server.open("/v1/overlay.html", panel_size=side).send(file.getvalue())
            html = (await exchange.response()).body.decode()
            photo = re.search(r"data:image/\w+;base64,([\w+/=]+)", html)[1]
            assert max(Image.open(io.BytesIO(base64.b64decode(photo))).size) == side

    serve(test)


def test_batches_do_not_lengthen_retry_after(serve, model):
    """How long one takes depends on its photos; it says nothing about the other slots."""

    async def test(server):
        throughput = server.service.throughput
        before = throughput.next_slot()
        now = time.monotonic()
        throughput._clock = lambda: now
        model.gate.clear()
        batch = server.open("/v1/batch").send(png())
        await until(lambda: server.service.in_flight == 1)
        now += 600
        model.gate.set()
        assert (await batch.response()).status == 200
        assert throughput.next_slot() == before

    serve(test)


def test_large_photos_are_decoded_one_at_a_time(serve, monkeypatch, concurrency):
    monkeypatch.setattr(service_module, "LARGE_PIXELS", 23)
    real = service_module.open_reduced

    def counted(*given, **named):
        with concurrency:
            time.sleep(0.02)
            return real(*given, **named)

    monkeypatch.setattr(service_module, "open_reduced", counted)

    async def test(server):
        exchanges = [server.post(png(size=(6, 4))) for _ in range(6)]
        assert [(await one.response()).status for one in exchanges] == [200] * 6

    serve(test)
    assert concurrency.most == 1


def test_default_limits_fit_cameras():
    limits = Limits()
    assert limits.max_bytes >= 30e6
    assert limits.max_pixels >= 120e6
