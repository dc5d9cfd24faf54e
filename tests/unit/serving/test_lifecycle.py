"""Draining: accepted requests are completed, new ones refused."""

from __future__ import annotations

import asyncio
import json

from colour_server import png, until
from test_uploads import file, parts


def test_accepted_requests_complete_and_new_ones_are_refused(serve, model):
    """The batch in progress, a waiting photo and an upload that is not complete."""

    async def test(server):
        lifecycle = server.app.state.lifecycle
        running = await server.hold()
        waiting, sending = server.post(png((1, 1, 1))), server.open().send(b"", more=True)
        await until(lambda: lifecycle.accepted == 3)
        assert (await server.get("/readyz")).status == 200

        lifecycle.drain()

        assert (await server.get("/readyz")).status == 503
        assert (await server.get("/healthz")).status == 200
        assert (await server.get("/metrics")).status == 200
        refused = await server.post(png()).response()
        assert refused.status == 503
        assert "shutting down" in refused.error
        assert int(refused.headers["retry-after"]) > 0
        assert refused.headers["connection"] == "close"
        sending.send(png((2, 2, 2)))
        waiter = asyncio.ensure_future(lifecycle.drained(30))
        await until(lambda: server.service.batcher.waiting == 2)
        assert not waiter.done()
        model.gate.set()
        assert (await running.response()).texts == ["0-0-0 2 0"]
        assert (await waiting.response()).texts == ["1-1-1 2 0"]
        assert (await sending.response()).texts == ["2-2-2 2 0"]
        await asyncio.wait_for(waiter, 30)

    serve(test)


def test_batch_in_progress_is_completed(serve, model):
    """Also its photos that arrive after the shutdown has begun."""

    async def test(server):
        lifecycle = server.app.state.lifecycle
        body, headers = parts(*[file(png((n, n, n)), "images") for n in range(4)])
        headers["accept"] = "application/x-ndjson"
        half = len(body) // 2
        batch = server.open("/v1/batch", headers=headers).send(body[:half], more=True)
        await until(lambda: batch.read == 1)
        lifecycle.drain()
        waiter = asyncio.ensure_future(lifecycle.drained(30))
        refused = await server.open("/v1/batch", headers=headers).send(body).response()
        assert (refused.status, "shutting down" in refused.error) == (503, True)
        batch.send(body[half:])
        results = [json.loads(line) for line in (await batch.response()).body.splitlines()]
        assert [one["status"] for one in results] == [200] * 4
        await asyncio.wait_for(waiter, 30)

    serve(test)


def test_wait_ends_after_the_grace_period_or_when_stopped(serve, model):
    async def test(server):
        await server.hold()
        lifecycle = server.app.state.lifecycle
        lifecycle.drain()
        await asyncio.wait_for(lifecycle.drained(0.01), 30)
        await asyncio.wait_for(lifecycle.drained(1e6, stop=lambda: True), 30)
        assert lifecycle.accepted == 1
        model.gate.set()

    serve(test)


def test_idle_server_drains_at_once(serve):
    async def test(server):
        server.app.state.lifecycle.drain()
        await asyncio.wait_for(server.app.state.lifecycle.drained(1e6), 30)

    serve(test)


def test_disconnected_client_does_not_delay_the_shutdown(serve, model):
    async def test(server):
        lifecycle = server.app.state.lifecycle
        await server.hold()
        gone = server.post(png())
        await until(lambda: lifecycle.accepted == 2)
        gone.disconnect()
        await gone.task
        assert lifecycle.accepted == 1
        model.gate.set()

    serve(test)


def test_refused_upload_is_read_before_the_response(serve):
    """Otherwise closing the connection would discard the response before the client sees it."""

    async def test(server):
        server.app.state.lifecycle.drain()
        exchange = server.open(headers={"content-length": "6"}).send(b"abc", more=True)
        response = await exchange.send(b"def").response()
        assert (response.status, exchange.read) == (503, 2)

    serve(test)
