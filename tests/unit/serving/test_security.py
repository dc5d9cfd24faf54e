"""Hosts, origins, API keys, response headers, and that nothing from a request is stored."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import openapi_spec_validator
import pytest
from colour_server import png
from test_photos import file, parts

from captioner.errors import ConfigError
from captioner.serving.security import HEADERS, ApiKeys, RateLimit, allowed_hosts, allowed_origins

UNKNOWN = ["evil.example", "localhost.evil.example", "evil.example#localhost", "192.168.1.2", "::1"]


def test_unknown_hosts_are_refused(serve):
    """Otherwise a DNS rebinding attack could use the server; probes answer any host."""

    async def test(server):
        for host in ("localhost", "LOCALHOST:1", "127.0.0.1:8000", "[::1]:80", "[::1]"):
            assert (await server.get("/", host=host)).status == 200, host
        for host in (*UNKNOWN, "localhost@evil.example", "localhost:80:80", "[::1", ""):
            for verb in ("GET", "POST"):
                exchange = server.open("/", verb=verb, headers={"host": host})
                response = await exchange.response()
                assert (response.status, exchange.read) == (421, 0), host
                assert "--allow-host" in response.error
            for path in ("/healthz", "/readyz", "/metrics"):
                assert (await server.get(path, host=host)).status == 200

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
        {"origin": "null"},
        {"origin": ""},
        {"sec-fetch-site": "cross-site"},
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
        for own in ("http://localhost:8000", "https://LOCALHOST:8000"):  # behind a TLS proxy
            own_page = {"host": "localhost:8000", "origin": own, "sec-fetch-site": "same-origin"}
            assert (await server.post(png(), headers=own_page).response()).status == 200

    serve(test)
    assert len(model.batches) == 2


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


# --- other origins, proxies


def allowed_hosts_of(names):
    return allowed_hosts("127.0.0.1", names)


APP = "https://app.example.org"
PREFLIGHT = {
    "origin": APP,
    "sec-fetch-site": "cross-site",
    "access-control-request-method": "POST",
    "access-control-request-headers": "content-type,authorization,x-api-key",
}


@pytest.mark.parametrize("allowed", [APP, "*"])
def test_page_of_an_allowed_origin_can_use_the_server(serve, allowed):
    """As ``fetch`` does it: preflight, then the request."""

    async def test(server):
        preflight = await server.get("/v1/captions", "OPTIONS", **PREFLIGHT)
        assert preflight.status == 200
        assert preflight.headers["access-control-allow-origin"] == allowed
        assert "POST" in preflight.headers["access-control-allow-methods"]
        names = preflight.headers["access-control-allow-headers"].lower()
        assert "x-api-key" in names
        assert "authorization" in names
        from_page = {"origin": APP, "sec-fetch-site": "cross-site"}
        response = await server.post(png(), headers=from_page).response()
        assert response.texts == ["1-2-3 2 0"]
        assert response.headers["access-control-allow-origin"] == allowed
        assert "Retry-After" in response.headers["access-control-expose-headers"]
        error = await server.post(b"", headers=from_page).response()  # the page can read it
        assert error.status == 415
        assert error.headers["access-control-allow-origin"] == allowed

    serve(test, app={"origins": allowed_origins([allowed])})


def test_other_origins_are_refused_with_the_fix(serve, model):
    async def test(server):
        for method in ("OPTIONS", "POST"):
            headers = PREFLIGHT | {"origin": "https://other.example"}
            response = await server.get("/v1/captions", method, **headers)
            assert response.status == 403
            assert "--allow-origin" in response.error
            assert "access-control-allow-origin" not in response.headers

    serve(test, app={"origins": allowed_origins([APP])})
    assert model.batches == []


@pytest.mark.parametrize(
    ("check", "value"),
    [
        *[
            (allowed_origins, one)
            for one in ("app.example.org", "https://x.org/page", "", "ftp://x")
        ],
        *[
            (allowed_hosts_of, one)
            for one in ("x.org:8443", "https://x.org", "", "a b", "me@x.org")
        ],
    ],
)
def test_invalid_hosts_and_origins(check, value):
    with pytest.raises(ConfigError, match=r"allow-(host|origin) is .*; give "):
        check([value])


@pytest.mark.parametrize("prefix", ["", "/captioner"], ids=["removed by the proxy", "kept"])
def test_root_path(serve, prefix):
    async def test(server):
        response = await server.open(f"{prefix}/v1/captions").send(png()).response()
        assert response.texts == ["1-2-3 2 0"]
        assert (await server.get(f"{prefix}/")).status == 200
        assert (await server.get(f"{prefix}/healthz", host="any")).status == 200
        schema = await server.get(f"{prefix}/openapi.json")
        assert schema.json["servers"] == [{"url": "/captioner"}]
        for page in ("docs", "redoc"):
            html = await server.get(f"{prefix}/{page}")
            assert html.status == 200
            addresses = re.findall(r'(?:src|href)="(docs/[^"]+)"', html.body.decode())
            assert addresses
            for address in addresses:  # relative to the page
                assert (await server.get(f"{prefix}/{address}")).status == 200
        overlay = await server.open(f"{prefix}/v1/overlay.svg").send(png()).response()
        assert overlay.status == 200
        unknown = await server.open(f"{prefix}/v1/batch", unknown=1).send(png()).response()
        assert (unknown.status, "unknown parameter" in unknown.error) == (422, True)
        line = 'captioner_requests_total{route="/v1/captions",status="200"}'
        assert await server.metric(line) == 1
        response = await server.get("/captioner")
        assert (response.status, response.headers["location"]) == (308, "/captioner/")

    serve(test, app={"root_path": "/captioner"})


# --- API keys

ALICE, BOB = "alice-0123456789abcdef", "bob-0123456789abcdef"
FILE = f"# name  key\n\nalice {ALICE}  # until May\nbob\t{BOB}\n"


@pytest.fixture
def keys(tmp_path) -> ApiKeys:
    (tmp_path / "keys.txt").write_text(FILE)
    return ApiKeys(tmp_path / "keys.txt")


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def test_captions_need_a_key(serve, model, keys, caplog):
    caplog.set_level("DEBUG")

    async def test(server):
        for headers in ({}, {"authorization": "Basic eDp5"}, {"authorization": "Bearer "}):
            exchange = server.open(headers=headers)
            response = await exchange.response()
            assert (response.status, exchange.read) == (401, 0)
            assert response.headers["www-authenticate"] == 'Bearer realm="captioner"'
            assert "Authorization: Bearer KEY" in response.error
        for key in (ALICE[:-1], ALICE + "x", "alice", "ä" * 20):
            response = await server.open(headers=bearer(key)).response()
            assert response.status == 401
            assert "unknown API key" in response.error
        for headers in (bearer(ALICE), {"authorization": f"bearer {BOB}"}, {"x-api-key": BOB}):
            assert (await server.post(png(), headers=headers).response()).status == 200
        assert await server.metric('captioner_refused_total{reason="key"}') == 4

    serve(test, app={"keys": keys})
    assert "key=alice" in caplog.text
    assert "key=bob" in caplog.text
    assert "0123456789abcdef" not in caplog.text
    assert len(model.batches) == 3


def test_every_endpoint_for_photos_needs_a_key_and_the_schema_says_so(serve, keys):
    """``/docs`` then has a button for the key."""

    async def test(server):
        schema = (await server.get("/openapi.json")).json
        openapi_spec_validator.validate(schema)
        kinds = schema["components"]["securitySchemes"]
        assert kinds["HTTPBearer"] == {"type": "http", "scheme": "bearer"}
        assert kinds["APIKeyHeader"]["name"] == "X-Api-Key"
        for path, item in schema["paths"].items():
            photos = path.startswith("/v1/")
            for operation in item.values():
                assert operation.get("security", []) == [
                    {name: []} for name in (kinds if photos else ())
                ]
            if photos:
                assert (await server.open(path).response()).status == 401

    serve(test, app={"keys": keys})


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "has no keys; give lines of: NAME KEY"),
        (
            f"alice {ALICE}\nSECRET-0123456789abcdef",
            "line 2 is invalid; give a name",
        ),
        ("alice SECRET", "line 1 is invalid"),
    ],
)
def test_invalid_key_files(tmp_path, text, problem):
    (tmp_path / "keys.txt").write_text(text)
    with pytest.raises(ConfigError, match=problem) as caught:
        ApiKeys(tmp_path / "keys.txt")
    assert "SECRET" not in str(caught.value)


# --- the rate limit ------------------------------------------------------------------------------


def test_rate_limit_is_per_key(serve, keys):
    async def test(server):
        for _ in range(3):
            assert (await server.post(png(), headers=bearer(ALICE)).response()).status == 200
        exchange = server.open(headers=bearer(ALICE))
        response = await exchange.response()
        assert (response.status, exchange.read) == (429, 0)
        assert 19 <= int(response.headers["retry-after"]) <= 20
        assert "too many requests with this API key" in response.error
        assert (await server.post(png(), headers=bearer(BOB)).response()).status == 200

    serve(test, app={"keys": keys}, rate_limit=3)


def test_each_photo_of_a_batch_counts(serve, model, keys):
    """Further photos get the status that they would have got alone."""
    given = parts(*[file(png((n, n, n)), "images") for n in range(5)])

    async def test(server):
        body, kind = given
        headers = kind | bearer(ALICE)
        response = await server.open("/v1/batch", headers=headers).send(body).response()
        results = response.json["results"]
        assert [one["status"] for one in results] == [200, 200, 200, 429, 429]
        assert results[2]["captions"][0]["text"] == "2-2-2 2 0"
        assert "too many requests with this API key; try again in " in results[3]["error"]
        response = await server.open("/v1/batch", headers=headers).response()
        assert response.status == 429
        assert (await server.post(png(), headers=bearer(BOB)).response()).status == 200

    serve(test, app={"keys": keys}, rate_limit=3)
    assert sum(map(len, model.batches)) == 4


def test_client_that_waits_as_asked_is_accepted():
    now = 0.0
    limit = RateLimit(30, clock=lambda: now)
    assert [limit.take("a") for _ in range(30)] == [0] * 30
    accepted = 0
    while now < 600:
        wait = limit.take("a")
        accepted += wait == 0
        now += wait
    assert 295 <= accepted <= 301


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
