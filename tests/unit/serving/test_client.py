"""The client against scripted responses, and against an application in the same process."""

from __future__ import annotations

import asyncio
import io
import itertools
import math
import threading

import httpx
import numpy as np
import pytest
from cutting import cut
from PIL import Image

import captioner
from captioner.caption import Alternative, Caption, CropBox, Keyword
from captioner.errors import ConfigError, ImageError, ServerError
from captioner.geometry import Geometry
from captioner.serving import client as client_module
from captioner.serving.client import AsyncClient, Client
from captioner.serving.schema import CaptionResult

URL = "http://captioner:8000"
BODY = {
    "width": 6,
    "height": 4,
    "captions": [
        {"text": "a dog", "words": ["a", "dog"], "log_prob": -1, "log_probs": [-0.5, -0.5]}
    ],
}


class Server:
    """Returns scripted responses or raises scripted errors, then 200; records its requests."""

    def __init__(self, *script) -> None:
        self.script = list(script)
        self.requests: list[httpx.Request] = []
        self.lock = threading.Lock()

    def __call__(self, request: httpx.Request) -> httpx.Response:
        with self.lock:
            self.requests.append(request)
            next_one = self.script.pop(0) if self.script else httpx.Response(200, json=BODY)
        if isinstance(next_one, Exception):
            raise next_one
        return next_one


def busy(seconds: object = 7, status: int = 429) -> httpx.Response:
    headers = {} if seconds is None else {"Retry-After": str(seconds)}
    return httpx.Response(status, json={"error": "64 requests are in flight"}, headers=headers)


@pytest.fixture
def slept(monkeypatch) -> list[float]:
    """Seconds that clients wait, which they do in no time."""
    seconds: list[float] = []
    clock = itertools.count(0, 1e-9)
    monkeypatch.setattr(client_module.time, "sleep", seconds.append)
    monkeypatch.setattr(client_module.time, "monotonic", lambda: next(clock) + sum(seconds))

    async def sleep(wait: float) -> None:
        seconds.append(wait)

    monkeypatch.setattr(client_module.asyncio, "sleep", sleep)
    return seconds


@pytest.fixture(params=["sync", "async"])
def run(request):
    """``run(server, lambda client: client.caption(...), **options)`` with either client."""

    def call(server, use, **options):
        transport = httpx.MockTransport(server)
        if request.param == "sync":
            with Client(URL, transport=transport, **options) as client:
                result = use(client)
                return list(result) if hasattr(result, "__next__") else result

        async def main():
            async with AsyncClient(URL, transport=transport, **options) as client:
                result = use(client)
                if hasattr(result, "__anext__"):
                    return [one async for one in result]
                return await result

        return asyncio.run(main())

    return call


def test_caption_is_typed_and_the_request_is_raw_bytes(run, tmp_path):
    headers = {"X-Captioner-Model": "best@0", "X-Request-Id": "id-1"}
    (tmp_path / "photo.jpg").write_bytes(b"jpeg")
    query = {"num_captions": 3, "attention": True, "banned_words": ["man", "woman"], "seed": None}

    path = tmp_path / "photo.jpg"
    for photo in (b"jpeg", path, str(path), io.BytesIO(b"jpeg")):
        server = Server(httpx.Response(200, json=BODY, headers=headers))
        result = run(server, lambda client, p=photo: client.caption(p, **query), api_key="secret")

        [request] = server.requests
        assert request.content == b"jpeg"
        assert str(request.url) == (
            f"{URL}/v1/captions?num_captions=3&attention=true&banned_words=man%2Cwoman"
        )
        assert request.headers["authorization"] == "Bearer secret"
        assert (result.text, result.width, result.height) == ("a dog", 6, 4)
        assert (result.model, result.request_id) == ("best@0", "id-1")
        assert result.captions[0].words == ("a", "dog")


def test_retry_after_is_honoured(run, slept):
    server = Server(busy(7), busy(3, 503))
    assert run(server, lambda client: client.caption(b"x")).text == "a dog"
    assert slept == [7, 3]
    assert len(server.requests) == 3


def test_retries_end(run, slept):
    for script, message, status in (
        ([busy(50) for _ in range(9)], "64 requests are in flight", 429),
        ([httpx.ConnectError("refused")] * 99, "cannot reach the server", None),
    ):
        with pytest.raises(ServerError, match=message) as caught:
            run(Server(*script), lambda client: client.caption(b"x"), retry_for=120)
        assert caught.value.status == status
        assert 60 < sum(slept) <= 120
        slept.clear()


def test_other_errors_are_not_retried(run, slept):
    for status in (400, 401, 413, 422, 500):
        server = Server(httpx.Response(status, json={"error": "the reason; what to do"}))
        with pytest.raises(ServerError, match=r"^the reason; what to do$") as caught:
            run(server, lambda client: client.caption(b"x"))
        assert caught.value.status == status
    assert slept == []


def test_stream_keeps_the_order_and_returns_errors(run, tmp_path, slept):
    """A refused photo, a missing file, and photos that come while the server is busy."""

    class ByContent(Server):
        def __call__(self, request):
            content = request.content
            if content == b"bad":
                return httpx.Response(415, json={"error": "not a photo"})
            super().__call__(request)
            text = content.decode()
            caption = BODY["captions"][0] | {"text": text}
            return httpx.Response(200, json=BODY | {"captions": [caption]})

    photos = [b"0", b"bad", tmp_path / "missing.jpg", *(str(n).encode() for n in range(3, 40))]
    results = run(ByContent(), lambda client: client.stream(photos, parallel=3))

    assert [result.photo for result in results] == photos
    assert results[1].error.status == 415
    assert isinstance(results[2].error, ImageError)
    assert "missing.jpg: cannot be read" in str(results[2].error)
    for number in (0, *range(3, 40)):
        assert results[number].captions.text == str(number)
        assert results[number].error is None


def test_served_attention_can_be_drawn():
    """All that a response has of a caption, as `captioner.overlay` takes it."""
    maps = np.random.default_rng(0).random((2, 3, 4), dtype=np.float32)
    caption = Caption(
        ("a", "dog"), np.float32([-0.5, -1]), maps, np.float32([0.5, 1]), -2.0,
        CropBox(0.1, 0, 0.9, 1), ((Alternative("the", -1.0),), (Alternative("cat", -2.0),)),
        geometry=Geometry.even((3, 4), 0.1, 0, 0.9, 1), method="occlusion", confidence=0.25,
        keywords=(Keyword("dog", 0.75, maps[0]),),
    )  # fmt: skip
    caption = cut(caption, 1, [math.nan, 0.25])
    data = caption.as_dict(attention=True)
    assert CaptionResult(**data).model_dump(exclude_unset=True).keys() == data.keys()
    served = {**BODY, "captions": [data, caption.as_dict()]}

    client = Client(URL, transport=httpx.MockTransport(Server(httpx.Response(200, json=served))))
    first, plain = client.caption(b"x").captions

    assert first.to_caption().as_dict(attention=True) == data
    captioner.overlay(Image.new("RGB", (64, 48)), first.to_caption()).image()
    with pytest.raises(ConfigError, match="attention=True"):
        plain.to_caption()
