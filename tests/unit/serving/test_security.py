"""Hosts, origins, API keys and response headers."""

from __future__ import annotations

import re
import socket

import openapi_spec_validator
import pytest
from colour_server import Exchange, png
from fastapi import Request
from test_photos import file, parts

from captioner.errors import ConfigError
from captioner.serving import security
from captioner.serving.options import ServeOptions
from captioner.serving.security import HEADERS, AllowedHosts, ApiKeys, RateLimit, client_of

UNKNOWN = ["evil.example", "localhost.evil.example", "evil.example#localhost", "192.168.1.2", "::1"]


async def test_unknown_hosts_are_refused(serve):
    """Otherwise, a DNS rebinding attack could use the server. Probes work with any host."""
    server = await serve()
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


async def test_a_request_has_one_host(serve):
    """With two Host headers, a proxy may have checked the other one (RFC 9112, section 3.2)."""
    server = await serve()
    own = (b"host", b"localhost")
    for hosts, version, status in (
        ([], "1.1", 400),
        ([own, own], "1.1", 400),
        ([own, (b"host", b"evil.example")], "1.0", 400),
        ([own], "1.1", 200),
        ([], "1.0", 200),  # a health check of an old load balancer
    ):
        scope = {"type": "http", "method": "GET", "path": "/healthz", "http_version": version}
        scope |= {"query_string": b"", "headers": hosts, "client": ("127.0.0.1", 1)}
        response = await Exchange(server.app, scope).send(b"").response()
        assert response.status == status, (hosts, version)
        assert status == 200 or "Host headers; send exactly one" in response.error


FORWARDED = ({"x-forwarded-for": "192.0.2.1"}, {"forwarded": "for=192.0.2.1"}, {"via": "1.1 x"})


async def test_metrics_are_for_direct_requests(serve):
    """The proxy may pass any spelling of the path. It adds a header, and strips a prefix."""
    server = await serve(root_path="/captioner")
    assert (await server.get("/metrics")).status == 200
    for headers in FORWARDED:
        assert (await server.get("/metrics", **headers)).status == 404
    for path in ("/captioner/metrics", "/captioner/captioner/metrics", "//metrics", "/metrics/"):
        assert (await server.get(path)).status == 404, path
    server = await serve(metrics_port=1)
    assert (await server.get("/metrics")).status == 404


def test_network_server_accepts_addresses_and_its_names():
    hosts = AllowedHosts("0.0.0.0", ["Captions.Example.org"])

    for host in ("192.168.1.2:8000", "10.0.0.1", "[fe80::1]:80", "captions.example.org:443"):
        assert hosts.allows(host)
    assert hosts.allows(f"{socket.gethostname()}:8000")
    assert hosts.allows("captions.example.org.")
    assert not hosts.allows("evil.example")


@pytest.mark.parametrize("allowed", [[], ["https://app.example.org"]])
async def test_cross_origin_requests_are_refused(serve, model, allowed):
    server = await serve(allow_origin=allowed)
    foreign = [
        {"origin": "http://evil.example"},
        {"origin": "http://localhost:3000"},  # another local server's page
        {"origin": "null"},
        {"origin": ""},
        {"sec-fetch-site": "cross-site"},
        {"origin": "http://localhost:8000", "sec-fetch-site": "cross-site"},
    ]
    for headers in foreign:
        for verb in ("POST", "OPTIONS"):
            exchange = server.open(verb=verb, headers={"host": "localhost:8000"} | headers)
            response = await exchange.response()
            assert (response.status, exchange.read) == (403, 0), headers
            assert (
                "use the page of this server, or start the server with --allow-origin"
                in response.error
            )
            assert "access-control-allow-origin" not in response.headers
    assert await server.metric('captioner_refused_total{reason="origin"}') == 2 * len(foreign)
    for own in ("http://localhost:8000", "https://LOCALHOST:8000"):  # behind a TLS proxy
        own_page = {"host": "localhost:8000", "origin": own, "sec-fetch-site": "same-origin"}
        assert (await server.post(png(), headers=own_page).response()).status == 200
    assert len(model.batches) == 2


async def test_every_response_has_the_security_headers(serve, model):
    model.broken = RuntimeError()

    server = await serve()
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


async def test_page_of_an_allowed_origin_can_use_the_server(serve):
    """The requests are those of ``fetch``: a preflight, then the request."""
    app = "https://app.example.org"
    from_page = {"origin": app, "sec-fetch-site": "cross-site"}
    asked = {
        "access-control-request-method": "POST",
        "access-control-request-headers": "content-type,authorization,x-api-key",
    }
    for allowed in (app, "*"):
        server = await serve(allow_origin=[allowed])
        preflight = await server.get("/v1/captions", "OPTIONS", **from_page, **asked)
        assert preflight.status == 200
        assert "POST" in preflight.headers["access-control-allow-methods"]
        names = preflight.headers["access-control-allow-headers"].lower()
        assert {"x-api-key", "authorization"} <= set(names.split(", "))
        response = await server.post(png(), headers=from_page).response()
        assert response.texts == ["1-2-3 2 0"]
        assert "Retry-After" in response.headers["access-control-expose-headers"]
        error = await server.post(b"", headers=from_page).response()  # the page can read it
        assert error.status == 415
        for one in (preflight, response, error):
            assert one.headers["access-control-allow-origin"] == allowed


def test_invalid_hosts_and_origins():
    for origin in ("app.example.org", "https://x.org/page", "", "ftp://x", "https://*.x.org"):
        with pytest.raises(ConfigError, match=r"allow_origin is .*; use "):
            ServeOptions(allow_origin=[origin])
    for host in ("x.org:8443", "https://x.org", "", "a b", "me@x.org", "*", "*.x.org"):
        with pytest.raises(ConfigError, match=r"allow_host is .*; use "):
            ServeOptions(allow_host=[host])


@pytest.mark.parametrize("prefix", ["", "/captioner"], ids=["removed by the proxy", "kept"])
async def test_root_path(serve, prefix):
    server = await serve(root_path="/captioner")
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
    assert (unknown.status, "is not an option of this" in unknown.error) == (422, True)
    line = 'captioner_requests_total{route="/v1/captions",status="200"}'
    assert await server.metric(line) == 1
    response = await server.get("/captioner")
    assert (response.status, response.headers["location"]) == (308, "/captioner/")


@pytest.mark.parametrize(
    ("given", "client"),
    [
        ("10.0.0.1", "10.0.0.1"),
        ("10.0.0.1:5555", "10.0.0.1"),
        ("::ffff:10.0.0.1", "10.0.0.1"),
        ("[::ffff:10.0.0.1]:5555", "10.0.0.1"),
        ("2001:db8::1", "2001:db8::/64"),
        ("[2001:db8::2]", "2001:db8::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("unknown", "unknown"),
    ],
)
def test_clients_without_keys_are_known_by_address(given, client):
    assert client_of(Request({"type": "http", "client": (given, 1)})) == client


ALICE, BOB = "alice-0123456789abcdef", "bob-0123456789abcdef"
FILE = f"# name  key\n\nalice {ALICE}  # until May\nbob\t{BOB}\n"


@pytest.fixture
def keys(tmp_path, monkeypatch) -> str:
    monkeypatch.setattr(security, "WRONG_KEY_SECONDS", 0)
    (tmp_path / "keys.txt").write_text(FILE)
    return str(tmp_path / "keys.txt")


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def test_captions_need_a_key(serve, model, keys, caplog):
    caplog.set_level("DEBUG")

    server = await serve(api_key_file=keys)
    for headers in ({}, {"authorization": "Basic eDp5"}, {"authorization": "Bearer "}):
        exchange = server.open(headers=headers)
        response = await exchange.response()
        assert (response.status, exchange.read) == (401, 0)
        assert response.headers["www-authenticate"] == 'Bearer realm="captioner"'
        assert "Authorization: Bearer KEY" in response.error
    for key in (ALICE[:-1], ALICE + "x", "alice", "ä" * 20):
        response = await server.open(headers=bearer(key)).response()
        assert response.status == 401
        assert "the API key is unknown" in response.error
    for headers in (bearer(ALICE), {"authorization": f"bearer {BOB}"}, {"x-api-key": BOB}):
        assert (await server.post(png(), headers=headers).response()).status == 200
    assert await server.metric('captioner_refused_total{reason="key"}') == 4
    assert "key=alice" in caplog.text
    assert "key=bob" in caplog.text
    assert "0123456789abcdef" not in caplog.text
    assert len(model.batches) == 3


async def test_wrong_keys_are_slowed_down(serve, keys, monkeypatch):
    """A client with a valid key at the same address is not affected."""
    waits = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    monkeypatch.setattr(security.asyncio, "sleep", sleep)
    server = await serve(api_key_file=keys)
    found = [await server.open(headers=bearer(f"wrong-{n:020}")).response() for n in range(62)]
    assert [one.status for one in found] == [401] * 60 + [429] * 2
    assert len(waits) == 62
    assert "too many wrong API keys from this address" in found[-1].error
    assert int(found[-1].headers["retry-after"]) > 0
    assert (await server.post(png(), headers=bearer(ALICE)).response()).status == 200
    other = server.open(headers=bearer("wrong-0123456789"), client="192.0.2.1")
    assert (await other.response()).status == 401


async def test_keys_in_the_environment(serve):
    server = await serve(api_keys=f"alice {ALICE}\nbob {BOB}")
    assert (await server.post(png(), headers=bearer(BOB)).response()).status == 200
    assert (await server.open().response()).status == 401
    with pytest.raises(ConfigError, match="CAPTIONER_API_KEYS, line 1 is invalid"):
        ApiKeys(None, "SECRET")
    with pytest.raises(ConfigError, match="CAPTIONER_API_KEYS are both set; use only one"):
        ServeOptions(api_keys="x", api_key_file="y")


async def test_every_endpoint_for_photos_needs_a_key_and_the_schema_says_so(serve, keys):
    """``/docs`` then has a button for the key."""
    server = await serve(api_key_file=keys)
    schema = (await server.get("/openapi.json", host="localhost:1234")).json
    assert (
        "curl -H 'Authorization: Bearer KEY' -F image=@photo.jpg http://localhost:1234/v1/"
        in (schema["info"]["description"])
    )
    openapi_spec_validator.validate(schema)
    kinds = schema["components"]["securitySchemes"]
    assert kinds["HTTPBearer"] == {"type": "http", "scheme": "bearer"}
    assert kinds["APIKeyHeader"]["name"] == "X-Api-Key"
    for path, item in schema["paths"].items():
        photos = path.startswith(("/v1/", "/api/"))
        for verb, operation in item.items():
            assert operation.get("security", []) == [
                {name: []} for name in (kinds if photos else ())
            ]
            if photos:
                assert (await server.open(path, verb=verb.upper()).response()).status == 401


def test_invalid_key_files(tmp_path):
    for text, problem in {
        "": "has no keys; write one line NAME KEY per key",
        f"alice {ALICE}\nSECRET-0123456789abcdef": "line 2 is invalid; write a name",
        "alice SECRET": "line 1 is invalid",
    }.items():
        (tmp_path / "keys.txt").write_text(text)
        with pytest.raises(ConfigError, match=problem) as caught:
            ApiKeys(tmp_path / "keys.txt")
        assert "SECRET" not in str(caught.value)


async def test_rate_limit_is_per_key_and_photo(serve, model, keys):
    """Further photos of a batch get the same status as in a request of their own."""
    server = await serve(api_key_file=keys, rate_limit=3)
    body, kind = parts(*[file(png((n, n, n)), "images") for n in range(5)])
    headers = kind | bearer(ALICE)
    response = await server.open("/v1/batch", headers=headers).send(body).response()
    results = response.json["results"]
    assert [one["status"] for one in results] == [200, 200, 200, 429, 429]
    assert results[2]["captions"][0]["text"] == "2-2-2 2 0"
    assert "too many requests with this API key; try again in " in results[3]["error"]
    for path in ("/v1/batch", "/v1/captions"):
        exchange = server.open(path, headers=headers)
        response = await exchange.response()
        assert (response.status, exchange.read) == (429, 0)
        assert 19 <= int(response.headers["retry-after"]) <= 20
    assert (await server.post(png(), headers=bearer(BOB)).response()).status == 200
    assert sum(map(len, model.batches)) == 4


async def test_without_keys_the_rate_limit_is_per_address(serve):
    server = await serve(rate_limit=1)
    for client, status in {
        "192.0.2.1": 200,
        "192.0.2.2": 200,
        "2001:db8::1": 200,
        "2001:db8::2": 429,  # of the same network
    }.items():
        response = await server.open(client=client).send(png()).response()
        assert response.status == status
    assert "too many requests from this address; try again in " in response.error


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
