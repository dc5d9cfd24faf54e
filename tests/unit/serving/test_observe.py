"""Request ids, client addresses, JSON lines, and the model's name in responses."""

from __future__ import annotations

import json
import logging
import re

from colour_server import png
from granian.utils.proxies import wrap_asgi_with_proxy_headers

from captioner import __version__
from captioner.serving.observe import JsonFormatter


async def test_request_id_is_returned_and_logged(serve, caplog):
    caplog.set_level("INFO")

    server = await serve()
    response = await server.post(png(), headers={"x-request-id": "order-7.a_B"}).response()
    assert response.headers["x-request-id"] == "order-7.a_B"
    refused = await server.get("/", host="evil.example")
    assert re.fullmatch("[0-9a-f]{16}", refused.headers["x-request-id"])
    first, second = (record.getMessage() for record in caplog.records)
    assert re.fullmatch(
        r"POST /v1/captions 200 \d+ ms \d+ bytes client=127.0.0.1 id=order-7.a_B", first
    )
    assert re.fullmatch(r"GET / 421 \d+ ms 0 bytes client=127.0.0.1 id=[0-9a-f]{16}", second)


async def test_client_address_behind_a_proxy(serve, caplog):
    caplog.set_level("INFO")
    server = await serve()
    app = server.app
    for proxy, forwarded, logged in (
        ("127.0.0.1", "203.0.113.9", "203.0.113.9"),
        ("127.0.0.1", "10.0.0.1, 203.0.113.9", "203.0.113.9"),  # the first is the client's claim
        ("127.0.0.1", "made up", "-"),
        ("192.0.2.1", "203.0.113.9", "127.0.0.1"),  # not from the trusted proxy
    ):
        server.app = wrap_asgi_with_proxy_headers(app, [proxy])
        await server.get("/healthz", **{"x-forwarded-for": forwarded})
        assert f"client={logged} " in caplog.records[-1].getMessage()


async def test_json_lines(serve, caplog):
    caplog.set_level("INFO")

    server = await serve()
    await server.post(png(), headers={"x-request-id": "a"}).response()
    entry = json.loads(JsonFormatter().format(caplog.records[0]))
    assert {name: entry[name] for name in entry if name not in ("time", "ms")} == {
        "level": "info",
        "method": "POST",
        "route": "/v1/captions",
        "status": 200,
        "bytes": len(png()),
        "client": "127.0.0.1",
        "id": "a",
    }
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00", entry["time"])
    other = logging.makeLogRecord({"msg": "a\n%s", "args": ('"',), "levelname": "WARNING"})
    line = JsonFormatter().format(other)
    assert "\n" not in line
    assert json.loads(line)["message"] == 'a\n"'


async def test_responses_name_the_model_and_version(serve):
    server = await serve(model_name="best@0123456789ab")
    for response in (
        await server.post(png()).response(),
        await server.post(b"").response(),
        await server.get("/readyz"),
    ):
        assert response.headers["x-captioner-model"] == "best@0123456789ab"
        assert response.headers["x-captioner-version"] == __version__
    ready = await server.get("/readyz")
    assert ready.json == {"status": "ok", "model": "best@0123456789ab", "version": __version__}
