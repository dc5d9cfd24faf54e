"""Queue slots, uploads, timeouts, disconnects and shutdown."""

from __future__ import annotations

import asyncio
import io
import threading
from types import SimpleNamespace

from colour_server import BAD, name, png, until
from PIL import Image

from captioner.serving import requests as requests_module
from captioner.serving import service as service_module


async def test_full_queue_returns_429(serve, model):
    server = await serve(max_queue=2)
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


async def test_slot_is_taken_before_the_body_is_read(serve):
    """Memory is limited by slots times bytes, because no body is read without a slot."""
    server = await serve(max_queue=1)
    slow = server.open().send(b"part", more=True)
    await until(lambda: slow.read == 1)

    refused = server.post(png())

    assert (await refused.response()).status == 429
    assert refused.read == 0
    slow.disconnect()
    await slow.task
    assert server.service.in_flight == 0


async def test_slow_captioning_returns_503(serve, model):
    server = await serve(timeout=0.5)
    running = await server.hold()
    waiting = server.post(png((1, 1, 1)))

    for exchange in (waiting, running):
        response = await exchange.response()
        assert response.status == 503
        assert int(response.headers["retry-after"]) > 0
        assert "0.5 s" in response.error
    assert server.service.in_flight == server.service.captions.waiting == 0
    model.gate.set()
    while (await server.post(png((2, 2, 2))).response()).status != 200:
        pass  # on a slow machine
    assert "1-1-1" not in [colour for batch in model.batches for colour in batch]


async def test_abandoned_decodings_count_towards_the_limit(serve, model, monkeypatch):
    """Clients that disconnect cause no more parallel decodings, and leave no photos queued."""
    bodies = []

    def body() -> io.BytesIO:
        bodies.append(io.BytesIO())
        return bodies[-1]

    monkeypatch.setattr(requests_module, "io", SimpleNamespace(BytesIO=body))
    started, gate = threading.Semaphore(0), threading.Event()
    active: set[int] = set()
    parallel: list[int] = []
    real = service_module.open_image

    def slow(*given, **named):
        active.add(threading.get_ident())
        parallel.append(len(active))
        started.release()
        assert gate.wait(30)
        active.remove(threading.get_ident())
        return real(*given, **named)

    monkeypatch.setattr(service_module, "open_image", slow)

    server = await serve()
    exchanges = [server.post(png((n, n, n))) for n in range(1, 7)]
    for _ in range(service_module.DECODERS):
        assert await asyncio.to_thread(started.acquire, timeout=30)
    for exchange in exchanges[:4]:  # two being decoded and two waiting
        exchange.disconnect()
        await exchange.task
    assert server.service.in_flight == 2
    assert await server.metric('captioner_refused_total{reason="left"}') == 4
    assert sum(not body.closed for body in bodies) == 2
    gate.set()
    for n, exchange in enumerate(exchanges[4:], 5):
        assert (await exchange.response()).texts == [f"{n}-{n}-{n} 2 0"]
    assert max(parallel) == service_module.DECODERS
    assert sorted(colour for batch in model.batches for colour in batch) == ["5-5-5", "6-6-6"]


async def test_the_end_of_the_grace_period_fails_all_requests(serve, model):
    server = await serve()
    running = await server.hold()
    waiting, sending = server.post(png()), server.open().send(b"part", more=True)
    await until(lambda: server.service.captions.waiting == 1 and server.service.in_flight == 3)

    server.service.close()

    for exchange in (running, waiting, sending, server.post(png())):
        response = await exchange.response()  # although the model still works
        assert response.status == 503
        assert "shutting down" in response.error
        assert int(response.headers["retry-after"]) > 0
    assert (await server.get("/healthz")).status == 503


async def test_costly_requests_are_refused_or_worked_on_beside_others(serve, model):
    server = await serve(max_cost=500)
    response = await server.post(png(), beam_size=11, max_length=50).response()
    assert (response.status, server.model.batches) == (422, [])
    assert (
        "would cost 550 steps of the decoder, but the limit is 500; use a smaller" in response.error
    )
    model.held = 10  # a search of this width waits for the gate
    model.gate.clear()
    costly = server.post(png((9, 9, 9)), beam_size=10, max_length=50)
    assert await asyncio.to_thread(model.entered.acquire, timeout=30)
    assert (await server.post(png((2, 2, 2))).response()).texts == ["2-2-2 2 0"]
    model.gate.set()
    assert (await costly.response()).status == 200


async def test_work_on_a_costly_request_ends_with_its_request(serve, model):
    """An abandoned job must not delay the next jobs."""
    server = await serve()
    stopped = threading.Event()

    def maps(photos, options, check=None, **_):
        model.entered.release()
        try:
            while not stopped.wait(0.001):
                check()
        finally:
            stopped.set()

    model.caption_batch = maps
    exchange = server.post(png(), beam_size=20, max_length=50)
    assert await asyncio.to_thread(model.entered.acquire, timeout=30)
    exchange.disconnect()
    await exchange.task
    assert await asyncio.to_thread(stopped.wait, 30)


async def test_one_client_cannot_hold_all_slots(serve, model):
    """A client is known by its key, or otherwise by its address (for IPv6, by its network)."""
    server = await serve(max_queue=3, max_per_client=2)
    first = await server.hold()
    second = server.post(png())
    await until(lambda: server.service.in_flight == 2)
    third = await server.post(png()).response()
    assert third.status == 429
    assert "2 requests of yours are in progress (the limit is 2)" in third.error
    other = server.post(png((3, 3, 3)), client="2001:db8::1")
    await until(lambda: server.service.in_flight == 3)
    model.gate.set()
    assert [(await one.response()).status for one in (first, second, other)] == [200] * 3


async def test_internal_error_does_not_leak_its_message(serve, model, caplog):
    """An error message may quote the request, so it is neither returned nor logged."""
    model.broken = RuntimeError(f"secret {name(BAD)}")
    caplog.set_level("DEBUG")

    server = await serve()
    response = await server.post(png(BAD)).response()
    assert response.status == 500
    assert (
        response.error
        == "the server failed unexpectedly; look in its log for the X-Request-Id of this response"
    )
    assert response.headers["x-content-type-options"] == "nosniff"
    assert server.service.in_flight == 0
    assert (await server.post(png()).response()).status == 200  # the server still works
    line = 'captioner_requests_total{route="/v1/captions",status="500"}'
    assert await server.metric(line) == 1
    assert "RuntimeError at " in caplog.text
    assert "colour_server.py:" in caplog.text
    assert "secret" not in caplog.text


async def test_the_process_ends_when_memory_runs_out(serve, model, monkeypatch):
    """The supervisor starts a new process.

    A thread without memory could block the old process for ever.
    """
    codes = []
    monkeypatch.setattr("os._exit", codes.append)
    server = await serve()
    for error in (MemoryError(), RuntimeError("Failed to allocate memory for requested buffer")):
        model.broken = error
        await server.post(png(BAD)).response()
    assert codes == [1, 1]
    model.broken = RuntimeError("something else")
    assert (await server.post(png(BAD)).response()).status == 500
    assert codes == [1, 1]


async def test_memory_is_returned_after_work_that_needs_much(serve, monkeypatch):
    returned = threading.Event()
    monkeypatch.setattr(service_module, "release_freed_memory", returned.set)
    monkeypatch.setattr(service_module, "RELEASE_SECONDS", 0)
    server = await serve()
    await server.post(png()).response()
    await asyncio.sleep(0.01)
    assert not returned.is_set()
    for request in ({"beam_size": 20, "max_length": 50}, {"path": "/v1/overlay.svg"}):
        await server.post(png(), **request).response()
        assert await asyncio.to_thread(returned.wait, 30)
        returned.clear()


async def test_large_jpeg_is_decoded_at_a_reduced_size(serve, model, monkeypatch):
    """The model gets a smaller image, but the response has the size of the original."""
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

    server = await serve()
    for (_, rotated), file in files.items():
        body = (await server.post(file).response()).json
        size = (3000, 4000) if rotated else (4000, 3000)
        assert (body["width"], body["height"]) == size
    assert prepared == [(1000, 750), (750, 1000), (4000, 3000)]
