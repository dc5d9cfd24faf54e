"""Who may ask, headers on every answer, and nothing kept of what was sent."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from colour_server import Server, png

from captioner.errors import ConfigError
from captioner.serving.app import create_app
from captioner.serving.security import HEADERS, Hosts, answered_hosts, is_loopback


@pytest.mark.parametrize(
    "host", ["localhost", "localhost:8000", "LOCALHOST:1", "127.0.0.1:8000", "[::1]:80", "[::1]"]
)
def test_loopbacks_names_are_answered(serve, host):
    async def test(server):
        assert (await server.get("/healthz", host=host)).status == 200

    serve(test)


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:8000",
        "localhost.evil.example",
        "127.0.0.1.evil.example",
        "evil.example#localhost",
        "evil@localhost",
        "localhost@evil.example",
        "192.168.1.2",
        "::1",
        "localhost:80:80",
        "localhost:http",
        "[::1",
        "",
    ],
)
def test_other_names_are_not(serve, model, host):
    """A name that a stranger's DNS points here does not get through, whatever it asks."""

    async def test(server):
        for exchange in (
            server.open("/", method="GET", headers={"host": host}),
            server.open(headers={"host": host}),
        ):
            answer = await exchange.answer()
            assert answer.status == 421
            assert "--allow-host" in answer.error
            assert exchange.read == 0

    serve(test)


def test_a_server_on_the_network_answers_to_addresses_and_its_names():
    hosts = answered_hosts("0.0.0.0", ["Captions.Example.org"])

    for host in ("192.168.1.2:8000", "10.0.0.1", "[fe80::1]:80", "captions.example.org:443"):
        assert hosts.answers_to(host)
    assert hosts.answers_to(f"{socket.gethostname()}:8000")
    assert hosts.answers_to("captions.example.org.")
    assert not hosts.answers_to("evil.example")


def test_a_proxys_name_may_be_allowed_on_loopback():
    hosts = answered_hosts("127.0.0.1", ["captions.example.org"])

    assert hosts.answers_to("captions.example.org")
    assert not hosts.answers_to("192.168.1.2")


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        ("127.0.0.1", True),
        ("127.8.8.8", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("192.168.1.2", False),
        ("example.org", False),
    ],
)
def test_what_is_loopback(host, loopback):
    assert is_loopback(host) is loopback
    assert answered_hosts(host).addresses is not loopback
    assert answered_hosts(host).answers_to(f"[{host}]:1" if ":" in host else f"{host}:1")


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "http://evil.example"},
        {"origin": "http://localhost:3000"},  # another program's page on this machine
        {"origin": "http://localhost.evil.example:8000"},
        {"origin": "null"},
        {"origin": ""},
        {"origin": "http://["},  # no address at all
        {"origin": "http://a]b"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
        {"origin": "http://localhost:8000", "sec-fetch-site": "cross-site"},
    ],
)
def test_another_sites_page_may_not_send(serve, model, headers):
    async def test(server):
        exchange = server.open(headers={"host": "localhost:8000"} | headers)
        answer = await exchange.answer()
        assert (answer.status, exchange.read) == (403, 0)
        assert "another site" in answer.error
        assert await server.metric('captioner_refused_total{reason="origin"}') == 1

    serve(test)
    assert model.batches == []


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"origin": "http://localhost:8000", "sec-fetch-site": "same-origin"},
        {"origin": "https://LOCALHOST:8000"},  # behind a proxy that speaks TLS
        {"sec-fetch-site": "none"},
    ],
)
def test_our_own_page_and_programs_may(serve, headers):
    async def test(server):
        answer = await server.post(png(), headers={"host": "localhost:8000"} | headers).answer()
        assert answer.status == 200

    serve(test)


def test_every_answer_has_the_headers(serve, model):
    model.broken = RuntimeError()

    async def test(server):
        answers = [
            await server.get(path)
            for path in ("/", "/healthz", "/metrics", "/openapi.json", "/favicon.ico", "/nothing")
        ]
        answers += [
            await server.post(png()).answer(),
            await server.post(png((255, 0, 0))).answer(),  # 500
            await server.post(b"").answer(),
            await server.open(beam_size=0).answer(),
            await server.open(headers={"host": "evil.example"}).answer(),
            await server.open(headers={"origin": "null"}).answer(),
        ]
        assert [a.status for a in answers[-6:]] == [200, 500, 415, 422, 421, 403]
        for answer in answers:
            for name, value in HEADERS.items():
                told = answer.headers[name.lower()]
                assert told == value or name == "Content-Security-Policy"
            assert "default-src 'none'" in answer.headers["content-security-policy"]
            assert "access-control-allow-origin" not in answer.headers

    serve(test)


def test_by_default_loopback_alone_is_answered(model):
    async def test():
        server = Server(create_app(model, hosts=Hosts(frozenset({"here"}))), model)
        assert (await server.get("/favicon.ico", host="here")).status == 204
        assert (await server.get("/favicon.ico", host="localhost")).status == 421
        server = Server(create_app(model), model)
        assert (await server.get("/favicon.ico", host="localhost")).status == 204

    asyncio.run(test())


# --- nothing is kept -----------------------------------------------------------------------------

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
        assert [(await one.answer()).status for one in exchanges] == [200] * 7
        form = {"content-type": "multipart/form-data; boundary=SECRET"}
        for exchange, status in (
            (server.post(files[0], words="SECRET words"), 200),
            (server.post(b"SECRET" * 400000), 415),
            (server.post(files[0][:-999]), 422),
            (server.post(b"SECRET" * 9999999), 413),
            (server.post(b"--SECRET" + files[0], headers=form), 415),
            (server.post(files[0], words="zebra SECRET"), 422),
            (server.post(files[0], SECRET=1), 422),
            (server.post(files[0], headers={"host": "SECRET"}), 421),
            (server.open("/SECRET.jpg", method="PUT", headers={"SECRET": "SECRET"}), 404),
        ):
            answer = await exchange.answer()
            assert answer.status == status, (status, answer.body)
        spying = "done"
        open(os.devnull, "w").close()  # the spy sees
asyncio.run(main())
"""


@pytest.mark.slow
def test_nothing_is_written_to_disk_or_logged(tmp_path):
    """Of every kind of request; asked of Python itself, which tells every file that is opened."""
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
    told = [line for line in done.stdout.splitlines() if line.startswith(("WROTE", "DID"))]
    assert told == [f"WROTE {os.devnull} w {told[0].rsplit(' ', 1)[1]}"]
    assert "captioner.serving:POST /v1/captions 413 " in done.stdout  # it does log
    assert "SECRET" not in done.stdout + done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["x.org:8443", "https://x.org", "", "a b", "x.org/", "me@x.org"])
def test_a_name_that_can_never_match_is_refused(name):
    with pytest.raises(ConfigError, match="give a name alone"):
        answered_hosts("127.0.0.1", [name])
