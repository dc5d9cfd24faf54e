"""Pages of other origins, and a prefix that a proxy adds."""

from __future__ import annotations

import re

import pytest
from colour_server import png

from captioner.errors import ConfigError
from captioner.serving.security import allowed_origins

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
    "origin", ["app.example.org", "https://app.example.org/page", "", "https://", "ftp://x", "null"]
)
def test_invalid_origin(origin):
    with pytest.raises(ConfigError, match="give scheme and host"):
        allowed_origins([origin])


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
