"""Host and Origin checks, response headers, and that nothing from a request is stored."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from colour_server import png

from captioner.errors import ConfigError
from captioner.serving.security import HEADERS, allowed_hosts


def test_loopback_names_are_accepted(serve):
    async def test(server):
        for host in ("localhost", "LOCALHOST:1", "127.0.0.1:8000", "[::1]:80", "[::1]"):
            assert (await server.get("/", host=host)).status == 200, host

    serve(test)


@pytest.mark.parametrize("path", ["/healthz", "/readyz", "/metrics"])
def test_probes_answer_any_host(serve, path):
    """Orchestrators and Prometheus use a service name or an address."""

    async def test(server):
        for host in ("captioner:8000", "10.1.2.3:8000", "", "anything at all"):
            assert (await server.get(path, host=host)).status == 200
        assert (await server.get(path, "POST", host="captioner:8000")).status == 421

    serve(test)


UNKNOWN = [
    "evil.example",
    "localhost.evil.example",
    "evil.example#localhost",
    "localhost@evil.example",
    "192.168.1.2",
    "::1",
    "localhost:80:80",
    "[::1",
    "",
]


def test_unknown_hosts_are_refused(serve):
    """Otherwise a DNS rebinding attack could use the server."""

    async def test(server):
        for host in UNKNOWN:
            for exchange in (
                server.open("/", verb="GET", headers={"host": host}),
                server.open(headers={"host": host}),
            ):
                response = await exchange.response()
                assert response.status == 421, host
                assert "--allow-host" in response.error
                assert exchange.read == 0

    serve(test)


def test_network_server_accepts_addresses_and_its_names():
    hosts = allowed_hosts("0.0.0.0", ["Captions.Example.org"])

    for host in ("192.168.1.2:8000", "10.0.0.1", "[fe80::1]:80", "captions.example.org:443"):
        assert hosts.allows(host)
    assert hosts.allows(f"{socket.gethostname()}:8000")
    assert hosts.allows("captions.example.org.")
    assert not hosts.allows("evil.example")


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "http://evil.example"},
        {"origin": "http://localhost:3000"},  # another local server's page
        {"origin": "http://localhost.evil.example:8000"},
        {"origin": "null"},
        {"origin": ""},
        {"origin": "http://["},  # invalid
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
        {"origin": "http://localhost:8000", "sec-fetch-site": "cross-site"},
    ],
)
def test_cross_origin_requests_are_refused(serve, model, headers):
    async def test(server):
        exchange = server.open(headers={"host": "localhost:8000"} | headers)
        response = await exchange.response()
        assert (response.status, exchange.read) == (403, 0)
        assert "cross-origin request refused" in response.error
        assert "use this server's own page" in response.error
        assert await server.metric('captioner_refused_total{reason="origin"}') == 1

    serve(test)
    assert model.batches == []


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"origin": "http://localhost:8000", "sec-fetch-site": "same-origin"},
        {"origin": "https://LOCALHOST:8000"},  # behind a TLS proxy
        {"sec-fetch-site": "none"},
    ],
)
def test_own_page_and_programs_are_accepted(serve, headers):
    async def test(server):
        response = await server.post(png(), headers={"host": "localhost:8000"} | headers).response()
        assert response.status == 200

    serve(test)


def test_every_response_has_the_security_headers(serve, model):
    model.broken = RuntimeError()

    async def test(server):
        responses = [
            await server.get(path)
            for path in ("/", "/healthz", "/metrics", "/openapi.json", "/favicon.ico", "/nothing")
        ]
        responses += [
            await server.post(png()).response(),
            await server.post(png((255, 0, 0))).response(),  # 500
            await server.post(b"").response(),
            await server.open(beam_size=0).response(),
            await server.open(headers={"host": "evil.example"}).response(),
            await server.open(headers={"origin": "null"}).response(),
        ]
        assert [a.status for a in responses[-6:]] == [200, 500, 415, 422, 421, 403]
        for response in responses:
            for name, value in HEADERS.items():
                header = response.headers[name.lower()]
                assert header == value or name == "Content-Security-Policy"
            assert "default-src 'none'" in response.headers["content-security-policy"]
            assert "access-control-allow-origin" not in response.headers

    serve(test)


# --- nothing is stored ----------------------------------------------------------------------------

_SPY = """
import asyncio, io, logging, os, sys
logging.basicConfig(level=logging.DEBUG, stream=sys.stdout)
from PIL import Image
from colour_server import ColourModel, Server
from captioner.serving.app import create_app

spying = False
def spy(event, details):
    if not spying:
        return
    if event == "open":
        path, mode, flags = details
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT) or set(str(mode)) & set("wax+"):
            print("WROTE", path, mode, flags)
    elif event.startswith(("os.mkdir", "os.rename", "os.link", "os.symlink", "os.truncate",
                           "tempfile.", "shutil.", "subprocess.", "os.exec", "os.posix_spawn")):
        print("DID", event, details)
sys.addaudithook(spy)

def noise(kind):
    file = io.BytesIO()
    Image.effect_noise((900, 700), 99).convert("RGB").save(file, kind)
    return file.getvalue()

async def main():
    global spying
    model = ColourModel()
    app = create_app(model)
    async with app.router.lifespan_context(app):
        server = Server(app, model)
        files = [noise(kind) for kind in ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")]
        tiff = io.BytesIO()
        Image.effect_noise((900, 700), 99).save(tiff, "TIFF", compression="tiff_lzw")
        spying = True
        exchanges = [server.post(file) for file in [*files, tiff.getvalue()]]
        assert [(await one.response()).status for one in exchanges] == [200] * 7
        form = {"content-type": "multipart/form-data; boundary=SECRET"}
        for exchange, status in (
            (server.post(files[0], words="SECRET words"), 200),
            (server.post(b"SECRET" * 400000), 415),
            (server.post(files[0][:-999]), 422),
            (server.post(b"SECRET" * 9999999), 413),
            (server.post(b"--SECRET" + files[0], headers=form), 400),
            (server.post(files[0], words="zebra SECRET"), 422),
            (server.post(files[0], SECRET=1), 422),
            (server.post(files[0], headers={"host": "SECRET"}), 421),
            (server.open("/SECRET.jpg", verb="PUT", headers={"SECRET": "SECRET"}), 404),
        ):
            response = await exchange.response()
            assert response.status == status, (status, response.body)
        spying = "done"
        open(os.devnull, "w").close()  # check that the hook works
asyncio.run(main())
"""


@pytest.mark.slow
def test_nothing_is_written_to_disk_or_logged(tmp_path):
    """A Python audit hook reports every file opened during all kinds of requests."""
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-X", "dev", "-c", _SPY],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        cwd=tmp_path,
        env=os.environ | {"TMPDIR": str(tmp_path), "PYTHONPATH": path},
    )

    assert done.returncode == 0, done.stderr
    events = [line for line in done.stdout.splitlines() if line.startswith(("WROTE", "DID"))]
    assert events == [f"WROTE {os.devnull} w {events[0].rsplit(' ', 1)[1]}"]
    assert "captioner.serving:POST /v1/captions 413 " in done.stdout  # requests are logged
    assert "SECRET" not in done.stdout + done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["x.org:8443", "https://x.org", "", "a b", "x.org/", "me@x.org"])
def test_invalid_allowed_host(name):
    with pytest.raises(ConfigError, match="give a host name without port"):
        allowed_hosts("127.0.0.1", [name])
