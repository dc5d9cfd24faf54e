"""API keys, their file and their rate limit."""

from __future__ import annotations

import openapi_spec_validator
import pytest
from colour_server import png
from test_photos import file, parts

from captioner.errors import ConfigError
from captioner.serving.keys import ApiKeys, RateLimit

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


def test_preflight_needs_no_key_and_pages_can_read_the_refusal(serve, keys):
    origin = "https://app.example.org"

    async def test(server):
        ask = {"origin": origin, "access-control-request-method": "POST"}
        assert (await server.get("/v1/captions", "OPTIONS", **ask)).status == 200
        response = await server.post(png(), headers={"origin": origin}).response()
        assert response.status == 401
        assert response.headers["access-control-allow-origin"] == origin

    serve(test, app={"keys": keys, "origins": {origin}})


def test_reload_replaces_the_keys(keys):
    new = "carol-0123456789abcdef"
    keys.path.write_text(f"carol {new}\n")

    keys.reload()

    assert keys.name(new) == "carol"
    assert keys.name(ALICE) is None
    assert len(keys) == 1


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "has no keys; give lines of: NAME KEY"),
        (f"alice {ALICE}\nSECRET-0123456789abcdef", "line 2: 1 words; give a name and a key"),
        ("alice SECRET", "line 1: the key has 6 characters; give 16 or more"),
        (f"alice {ALICE}\nalice {BOB}", "line 2: the name alice is used twice"),
        (f"alice {ALICE}\nbob {ALICE}", "line 2: the key is also that of alice"),
    ],
)
def test_invalid_key_files(tmp_path, text, problem):
    (tmp_path / "keys.txt").write_text(text)

    with pytest.raises(ConfigError) as caught:
        ApiKeys(tmp_path / "keys.txt")

    assert problem in str(caught.value)
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
