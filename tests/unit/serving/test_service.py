"""A request's way: a place, the body, the time it may take, and what becomes of it."""

from __future__ import annotations

import asyncio
import gc
import io
import threading
import weakref
from types import SimpleNamespace
from typing import ClassVar

import pytest
from colour_server import BAD, name, png, until

from captioner.serving import service as service_module


def test_more_than_the_queue_holds_are_told_to_come_back(serve, model):
    async def test(server):
        first = await server.hold()
        second = server.post(png())
        await until(lambda: server.service.held == 2)

        third = await server.post(png()).answer()

        assert third.status == 429
        assert int(third.headers["retry-after"]) > 0
        assert "2 requests" in third.error
        assert await server.metric("captioner_held_requests") == 2
        model.gate.set()
        assert [(await one.answer()).status for one in (first, second)] == [200, 200]
        assert (await server.post(png()).answer()).status == 200  # there are places again
        assert await server.metric('captioner_refused_total{reason="queue"}') == 1
        assert await server.metric("captioner_held_requests") == 0

    serve(test, max_queue=2)


def test_a_place_is_taken_before_the_body_is_read(serve):
    """Memory is bounded by places times bytes: who has no place has not sent a byte."""

    async def test(server):
        slow = server.open().send(b"part", more=True)
        await until(lambda: slow.read == 1)

        refused = server.post(png())

        assert (await refused.answer()).status == 429
        assert refused.read == 0
        slow.leave()
        await slow.task
        assert server.service.held == 0

    serve(test, max_queue=1)


def test_too_many_bytes_are_refused_from_the_header(serve):
    async def test(server):
        exchange = server.open(headers={"content-length": "1001"})
        answer = await exchange.answer()
        assert (answer.status, exchange.read) == (413, 0)
        assert "1,001 bytes" in answer.error
        assert "1,000 are allowed" in answer.error

    serve(test, max_bytes=1000)


def test_too_many_bytes_are_refused_while_they_come(serve):
    """A body without a length: what comes after the part that goes over is thrown away."""

    async def test(server):
        exchange = server.open(headers={"transfer-encoding": "chunked"})
        for _ in range(10):
            exchange.send(b"x" * 400, more=True)
        answer = await exchange.answer()
        assert (answer.status, exchange.read) == (413, 10)
        assert "1,000" in answer.error

    serve(test, max_bytes=1000)


def test_a_body_without_an_end_is_refused_all_the_same(serve, monkeypatch):
    monkeypatch.setattr("captioner.serving.connections.DRAIN_BYTES", 2000)

    async def test(server):
        exchange = server.open(headers={"transfer-encoding": "chunked"})
        for _ in range(20):
            exchange.send(b"x" * 400, more=True)
        answer = await exchange.answer()
        assert (answer.status, exchange.read) == (413, 3 + 5)
        assert answer.headers["connection"] == "close"

    serve(test, max_bytes=1000)


def test_a_length_that_lies_does_not_help(serve):
    async def test(server):
        exchange = server.open(headers={"content-length": "10"}).send(b"x" * 1001)
        assert (await exchange.answer()).status == 413

    serve(test, max_bytes=1000)


def test_as_many_bytes_as_are_allowed_are_taken(serve):
    async def test(server):
        assert (await server.post(png()).answer()).status == 200

    serve(test, max_bytes=len(png()))


def test_parts_are_put_together(serve):
    async def test(server):
        whole, exchange = png((9, 8, 7)), server.open()
        for start in range(0, len(whole), 10):
            exchange.send(whole[start : start + 10], more=True)
        answer = await exchange.send(b"").answer()
        assert answer.texts == ["9-8-7 2 0"]

    serve(test)


@pytest.mark.parametrize("size", [(30, 41), (41, 30), (1000, 2)])
def test_too_many_pixels_are_refused(serve, model, size):
    async def test(server):
        answer = await server.post(png(size=size)).answer()
        assert answer.status == 413
        assert "1,200 pixels" in answer.error
        assert await server.metric('captioner_refused_total{reason="pixels"}') == 1

    serve(test, max_pixels=1200)
    assert model.batches == []


def test_a_body_that_does_not_come_ends_with_408(serve):
    async def test(server):
        exchange = server.open().send(b"part", more=True)
        answer = await exchange.answer()
        assert answer.status == 408
        assert answer.headers["connection"] == "close"
        assert "0.05 s" in answer.error
        assert server.service.held == 0

    serve(test, timeout=0.05)


def test_captions_that_take_too_long_end_with_503(serve, model):
    async def test(server):
        running = await server.hold()
        waiting = server.post(png((1, 1, 1)))

        for exchange in (waiting, running):
            answer = await exchange.answer()
            assert answer.status == 503
            assert int(answer.headers["retry-after"]) > 0
            assert "0.2 s" in answer.error
        assert server.service.held == 0
        assert server.service.batcher.waiting == 0
        model.gate.set()
        assert (await server.post(png((2, 2, 2))).answer()).texts == ["2-2-2 2 0"]

    serve(test, timeout=0.2)
    assert "1-1-1" not in [colour for batch in model.batches for colour in batch]


def test_a_client_that_leaves_gives_up_its_place_in_the_queue(serve, model):
    async def test(server):
        running = await server.hold()
        leaving, staying = server.post(png((1, 1, 1))), server.post(png((2, 2, 2)))
        await until(lambda: server.service.batcher.waiting == 2)

        leaving.leave()
        await leaving.task

        assert (server.service.batcher.waiting, server.service.held) == (1, 2)
        model.gate.set()
        await running.answer()
        assert (await staying.answer()).texts == ["2-2-2 2 0"]
        line = 'captioner_requests_total{route="/v1/captions",status="499"}'
        assert await server.metric(line) == 1

    serve(test)
    assert model.batches == [["0-0-0"], ["2-2-2"]]


def test_a_client_that_leaves_while_sending_gives_up_its_place(serve):
    async def test(server):
        exchange = server.open().send(b"part", more=True)
        await until(lambda: server.service.held == 1)
        exchange.leave()
        await exchange.task
        assert server.service.held == 0

    serve(test)


class Body(io.BytesIO):
    """One that can be counted."""

    alive: ClassVar[weakref.WeakSet[Body]] = weakref.WeakSet()

    def __init__(self) -> None:
        super().__init__()
        self.alive.add(self)


def test_few_photos_are_decoded_at_once_and_abandoned_ones_count(serve, model, monkeypatch):
    """A client that leaves cannot make room for one decoding more than there are readers, nor
    leave a photo behind that waits to be decoded for nobody."""
    monkeypatch.setattr(service_module, "io", SimpleNamespace(BytesIO=Body))
    decoding, most, started = 0, 0, threading.Semaphore(0)
    gate, lock, real = threading.Event(), threading.Lock(), service_module.open_image

    def slow(*given, **named):
        nonlocal decoding, most
        with lock:
            decoding += 1
            most = max(most, decoding)
        started.release()
        assert gate.wait(30)
        with lock:
            decoding -= 1
        return real(*given, **named)

    monkeypatch.setattr(service_module, "open_image", slow)

    async def test(server):
        exchanges = [server.post(png((n, n, n))) for n in range(1, 7)]
        for _ in range(service_module.READERS):
            assert await asyncio.to_thread(started.acquire, timeout=30)
        for exchange in exchanges[:4]:  # two that are being decoded, two that wait for it
            exchange.leave()
            await exchange.task
        assert server.service.held == 2
        gc.collect()
        assert len(Body.alive) == service_module.READERS + 2
        gate.set()
        for n, exchange in enumerate(exchanges[4:], 5):
            assert (await exchange.answer()).texts == [f"{n}-{n}-{n} 2 0"]

    serve(test)
    assert most == service_module.READERS
    assert sorted(colour for batch in model.batches for colour in batch) == ["5-5-5", "6-6-6"]


def test_stopping_finishes_what_runs_and_refuses_the_rest(serve, model):
    async def test(server):
        running = await server.hold()
        waiting, sending = server.post(png()), server.open().send(b"part", more=True)
        await until(lambda: server.service.batcher.waiting == 1 and server.service.held == 3)

        server.service.close()

        for exchange in (waiting, sending, server.post(png())):
            answer = await exchange.answer()
            assert answer.status == 503
            assert "stopping" in answer.error
            assert int(answer.headers["retry-after"]) > 0
        assert (await server.get("/healthz")).status == 503
        model.gate.set()
        assert (await running.answer()).texts == ["0-0-0 2 0"]

    serve(test)


def test_an_option_that_one_photo_cannot_fulfil_reaches_that_one(serve, model):
    from captioner.errors import OptionError

    model.broken = OptionError("no caption is left; lower {min_length}")

    async def test(server):
        running = await server.hold()
        good, bad = server.post(png((1, 1, 1))), server.post(png(BAD))
        await until(lambda: server.service.batcher.waiting == 2)
        model.gate.set()
        await running.answer()
        assert (await good.answer()).texts == ["1-1-1 2 0"]
        answer = await bad.answer()
        assert answer.status == 422
        assert answer.error == "no caption is left; lower min_length"  # as the query spells it

    serve(test)


def test_a_mistake_inside_tells_nothing_of_the_inside(serve, model, caplog):
    """Neither the answer nor the log quotes an error: it may hold what was sent."""
    model.broken = RuntimeError(f"secret {name(BAD)}")
    caplog.set_level("DEBUG")

    async def test(server):
        answer = await server.post(png(BAD)).answer()
        assert answer.status == 500
        assert answer.error == "a mistake of the server's; it is in its log"
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert server.service.held == 0
        assert (await server.post(png()).answer()).status == 200  # it goes on
        line = 'captioner_requests_total{route="/v1/captions",status="500"}'
        assert await server.metric(line) == 1

    serve(test)
    assert "RuntimeError at " in caplog.text
    assert "colour_server.py:" in caplog.text
    assert "secret" not in caplog.text
