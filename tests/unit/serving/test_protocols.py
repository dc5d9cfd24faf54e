"""Endpoints with the protocols of other programs, tested with their Python clients and requests."""

from __future__ import annotations

import dataclasses
import json
from types import SimpleNamespace

import httpx
import pytest
from colour_server import OWN, ColourModel, ColourVocabulary, png
from test_photos import text

from captioner.caption_types import Keyword
from captioner.serving.protocols import IGNORED

KEY = "alice-0123456789abcdef"
RED, BLUE = png((250, 0, 0)), png((0, 0, 250))


KEYWORDS = (Keyword("dog", 0.97), Keyword("grass", 0.4))


class StyledModel(ColourModel):
    """A model with captions that begin with their style, and with a confidence and keywords."""

    reading = SimpleNamespace(keywords=KEYWORDS)
    stored = SimpleNamespace(vocabulary=ColourVocabulary(), reading=reading, search=OWN)
    stored.vocabulary.styles = ("coco", "flickr8k")

    def caption_batch(self, photos, options, **how):
        return [
            [
                dataclasses.replace(
                    one,
                    words=(options.style or "plain", *one.words),
                    confidence=0.8,
                    keywords=KEYWORDS[: options.keywords],
                )
                for one in captions
            ]
            for captions in super().caption_batch(photos, options, **how)
        ]


def url(data: bytes) -> str:
    return f"data:image/png;base64,{text(data)}"


@pytest.fixture
def server(listening, tmp_path):
    """A server with keys. Its model is a folder named dogs."""
    (tmp_path / "keys").write_text(f"alice {KEY}\n")
    keys, name = str(tmp_path / "keys"), "dogs@0123456789ab"
    return listening(of=StyledModel(), model_name=name, api_key_file=keys)


@pytest.fixture
def ollama(server):
    package = pytest.importorskip("ollama")
    headers = {"Authorization": f"Bearer {KEY}"}
    with package.Client(host=server.url, headers=headers, trust_env=False) as client:
        client.ResponseError = package.ResponseError
        yield client


def test_ollama_describes_the_model(ollama):
    names = [one.model for one in ollama.list().models]
    assert names == ["captioner:latest", "captioner:flickr8k", "dogs:latest"]
    assert [one.model for one in ollama.ps().models] == names
    for name in names:
        assert "vision" in ollama.show(name).capabilities
    with pytest.raises(
        ollama.ResponseError, match="model 'llava' was not found; use captioner"
    ) as no:
        ollama.show("llava")
    assert no.value.status_code == 404
    for loaded in (ollama.generate("captioner", keep_alive="5m"), ollama.chat("captioner")):
        assert loaded.done_reason == "load"


def test_ollama_generates(ollama):
    reply = ollama.generate("captioner", "Describe the image.", images=[RED])
    assert reply.response == "plain 250-0-0 2 0"
    assert (reply.done, reply.done_reason, reply.eval_count) == (True, "stop", 4)
    assert reply.model == "captioner"
    assert ollama.generate("dogs", images=[RED, BLUE]).response.splitlines() == [
        "plain 250-0-0 2 0",
        "plain 0-0-250 2 0",
    ]
    parts = list(ollama.generate("captioner:flickr8k", images=[text(BLUE)], stream=True))
    assert "".join(part.response for part in parts) == "flickr8k 0-0-250 2 0"
    assert [part.done for part in parts] == [False, True]


def test_ollama_chats_about_the_last_photos(ollama):
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is it?", "images": [RED]},
        {"role": "assistant", "content": "plain 250-0-0"},
        {"role": "user", "content": "And this?", "images": [BLUE]},
        {"role": "user", "content": "Shorter!"},
    ]
    assert ollama.chat("captioner", messages).message.content == "plain 0-0-250 2 0"
    parts = list(ollama.chat("captioner:latest", messages, stream=True))
    assert "".join(part.message.content for part in parts) == "plain 0-0-250 2 0"
    assert parts[-1].done


@pytest.fixture
def openai(server):
    package = pytest.importorskip("openai")
    http = httpx.Client(trust_env=False)
    with package.OpenAI(
        base_url=f"{server.url}/v1", api_key=KEY, http_client=http, max_retries=0
    ) as client:
        yield client


def content(*urls: str, prompt: str = "What is it?") -> list[dict[str, object]]:
    images = [{"type": "image_url", "image_url": {"url": one, "detail": "low"}} for one in urls]
    return [{"role": "user", "content": [{"type": "text", "text": prompt}, *images]}]


def test_openai_completes_chats(openai):
    names = [one.id for one in openai.models.list()]
    assert names == ["captioner", "captioner:flickr8k", "dogs"]
    assert [openai.models.retrieve(name).id for name in names] == names
    create = openai.chat.completions.with_raw_response.create
    raw = create(model="dogs", messages=content(url(RED)), temperature=0.7, max_tokens=300)
    reply = raw.parse()
    assert reply.choices[0].message.content == "plain 250-0-0 2 0"
    assert (reply.choices[0].finish_reason, reply.usage.completion_tokens) == ("stop", 4)
    assert sorted(raw.headers[IGNORED].split(", ")) == ["max_tokens", "prompt", "temperature"]

    found = openai.chat.completions.create(
        model="captioner:flickr8k", messages=content(url(RED), url(BLUE)), stream=True
    )
    parts = [chunk.choices[0] for chunk in found]
    assert "".join(one.delta.content or "" for one in parts).splitlines() == [
        "flickr8k 250-0-0 2 0",
        "flickr8k 0-0-250 2 0",
    ]
    assert [one.finish_reason for one in parts] == [None, "stop"]


def test_openai_gets_its_errors(openai):
    import openai as package

    for ask in (
        lambda: openai.models.retrieve("gpt-4o"),
        lambda: openai.chat.completions.create(model="gpt-4o", messages=content(url(RED))),
    ):
        with pytest.raises(
            package.NotFoundError, match="'gpt-4o' was not found; use capt"
        ) as refused:
            ask()
        assert refused.value.code == "model_not_found"
        assert refused.value.type == "invalid_request_error"
    with pytest.raises(package.AuthenticationError, match="the API key is unknown") as refused:
        openai.with_options(api_key="wrong-0123456789abc").models.list()
    assert refused.value.code == "invalid_api_key"


# As internal/ai/vision marshals its requests (api_request.go).
VISION = {
    "id": "b0db2187-7a09-438c-8649-a9c6c0f7b8a1",
    "model": "captioner",
    "version": "latest",
    "prompt": "Write a caption.",
    "suffix": "",
    "options": {"temperature": 0.1},
    "stream": False,
    "images": [url(RED)],
}


def post(server, path: str, body: object, **headers: str) -> httpx.Response:
    given = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"} | headers
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return httpx.post(f"{server.url}{path}", content=data, headers=given, trust_env=False)


def test_photoprism(server):
    path = "/api/v1/vision/caption"
    reply = post(server, path, VISION)
    assert reply.json() == {
        "id": VISION["id"],
        "code": 200,
        "model": {"type": "caption", "name": "captioner", "version": "latest"},
        "result": {"caption": {"text": "plain 250-0-0 2 0", "confidence": 0.8}},
    }
    assert reply.headers[IGNORED] == "prompt, options"
    styled = post(server, path, VISION | {"version": "flickr8k"}).json()
    assert styled["result"]["caption"]["text"].startswith("flickr8k")
    given = {name: VISION[name] for name in ("id", "images", "stream")}  # without Name
    assert post(server, path, given).json()["code"] == 200

    error = post(server, path, VISION | {"model": "kosmos-2"})
    assert (error.status_code, error.json()["code"]) == (404, 404)
    assert error.json()["error"].startswith("the model 'kosmos-2' was not found; use captioner, ")
    denied = post(server, path, VISION, Authorization="Bearer x").json()
    assert denied["code"] == 401

    labels = post(server, "/api/v1/vision/labels", VISION).json()
    assert labels["model"]["type"] == "labels"
    assert labels["result"]["labels"] == [
        {"name": "dog", "source": "image", "confidence": 0.97, "topicality": 0.97},
        {"name": "grass", "source": "image", "confidence": 0.4, "topicality": 0.4},
    ]


PATHS = {
    "/api/generate": {"images": [text(RED)], "stream": False},
    "/api/chat": {"messages": [{"content": "", "images": [text(RED)]}], "stream": False},
    "/v1/chat/completions": {"messages": content(url(RED))},
    "/api/v1/vision/caption": {"images": [url(RED)]},
}


async def ask(server, path, body=None, **headers):
    """Return the response to a body, by default the body in `PATHS`."""
    data = json.dumps(PATHS[path] if body is None else body).encode()
    return await server.post(data, path=path, headers=headers).response()


async def test_limits_are_those_of_the_service(serve, model):
    server = await serve(max_batch=2, rate_limit=3, max_bytes=100_000)
    two = {"images": [text(RED), text(BLUE)], "stream": False}
    three = {"images": [text(RED)] * 3}
    found = await ask(server, "/api/generate", two)
    assert found.json["response"] == "250-0-0 2 0\n0-0-250 2 0"
    assert (await ask(server, "/api/generate", three)).status == 413
    refused = await ask(server, "/v1/chat/completions")
    assert refused.status == 429
    assert refused.json["error"]["code"] == "rate_limit_exceeded"
    assert int(refused.headers["retry-after"]) > 0
    assert server.service.in_flight == 0
    long = server.open("/api/chat", headers={"content-length": "2000000"}, client="127.0.0.2")
    assert (await long.send(b"").response()).status == 413
    server = await serve(rate_limit=2)
    refused = await ask(server, "/api/generate", three)
    assert (refused.status, "send 1 to 2" in refused.error) == (413, True)  # never within a minute


async def test_a_photo_has_one_caption(serve, model, monkeypatch):
    """This also holds if the model's own setting is to return several."""
    monkeypatch.setattr(model, "options", lambda **changes: OWN.changed(num_captions=2))
    response = await ask(await serve(), "/api/chat")
    assert response.json["message"]["content"] == "250-0-0 2 0"


async def test_cost_and_deadline(serve, model):
    response = await ask(await serve(max_cost=5), "/api/generate")
    assert "the limit is 5" in response.error
    model.gate.clear()
    response = await ask(await serve(timeout=0.05), "/api/v1/vision/caption")
    assert response.json["code"] == 503
    assert "the request is costly (12 steps of the decoder)" in response.json["error"]


async def test_any_content_type_and_prefix(serve):
    """curl -d declares a form. A proxy's prefix may be part of the path, or removed."""
    server = await serve(root_path="/captioner")
    headers = {"content-type": "application/x-www-form-urlencoded"}
    for path, body in PATHS.items():
        for prefix in ("", "/captioner"):
            response = await ask(server, prefix + path, body, **headers)
            assert response.status == 200, path
            assert "250-0-0 2 0" in response.body.decode()
    assert (await ask(server, "/captioner/api/v1/vision/caption", [])).json["code"] == 422
    assert await server.metric('captioner_requests_total{route="/api/chat",status="200"}') == 2


async def test_what_is_refused(serve):
    """The error is one line, even if the request is long."""
    server, photo = await serve(), {"images": [text(RED)]}
    malformed = "images or messages are malformed; send them as in the examples at /docs"
    for body, status, problem in (
        (photo | {"tools": [{"type": "function"}]}, 400, "tools is not supported"),
        (photo | {"format": "json"}, 400, "format is not supported"),
        (
            photo | {"response_format": {"type": "json_schema"}},
            400,
            "response_format is not supported",
        ),
        (photo | {"n": 2}, 400, "n is not supported"),
        (photo | {"model": "captioner:coco2"}, 404, "'captioner:coco2' was not found"),
        ({"prompt": "Hello"}, 400, "the request has 0 photos; send 1 to"),
        ({"prompt": "x", "url": "https://example.org/1"}, 422, "the server does not fetch or open"),
        ({"messages": content("https://example.org/a.jpg")}, 422, "the server does not fetch or"),
        ({"images": [text(b"no photo")]}, 415, "the photo"),
        ({"images": [5]}, 422, "a photo in the JSON is not a string"),
        ({"messages": content("data:,x")}, 422, "base64"),
        ({"messages": [None]}, 400, malformed),
        ({"messages": {"content": ""}}, 400, malformed),
        ({"messages": [{"images": 5}]}, 400, malformed),
        ({"messages": [{"content": [5] * 9_000}]}, 400, malformed),
        ({"messages": [{"content": "x" * 5000, "images": "x" * 5000}]}, 400, malformed),
        ({"messages": ["x" * 5000]}, 400, malformed),
        ({"messages": "x" * 5000}, 400, malformed),
        ({"messages": [{"content": [{}] * 500}] * 9}, 400, "the request has 0 photos"),
        ({"messages": [{"content": [{}] * 10_000}]}, 413, "more than 10,000 values"),
        ({"messages": [{"images": [5] * 9_000}]}, 413, "the request has 9,000 photos"),
    ):
        response = await ask(server, "/api/chat", body)
        assert (response.status, problem in response.error) == (status, True), body


async def test_long_texts_beside_the_photos_are_ignored(serve):
    """The prompt and the identifier are as long as a photo."""
    long = {"prompt": "x y" * 5000, "messages": [{"content": "x" * 5000, "images": [text(RED)]}]}
    response = await ask(await serve(), "/api/chat", long | {"stream": False})
    assert response.json["message"]["content"] == "250-0-0 2 0"
    response = await ask(await serve(), "/api/v1/vision/caption", VISION | {"id": "x" * 5000})
    assert response.json["code"] == 200


async def test_parts_as_clients_dump_them(serve):
    """Clients send null for each field that a part lacks, or leave out the type."""
    parts = [
        {"type": "text", "text": "Look", "image_url": None},
        {"image_url": {"url": url(RED)}, "text": None},
    ]
    body = {"messages": [{"content": parts}], "response_format": {"type": "text"}, "n": 1}
    response = await ask(await serve(), "/v1/chat/completions", body)
    assert response.json["choices"][0]["message"]["content"] == "250-0-0 2 0"
    assert response.headers[IGNORED.lower()] == "prompt"


async def test_ignored_fields_are_named_safely(serve):
    ignored = {"a\r\nX-Evil: 1": 1, "keep_alive": "5m", "suffix": "", "raw": False}
    response = await ask(await serve(), "/api/generate", {"images": [text(RED)], **ignored})
    assert response.headers[IGNORED.lower()] == "keep_alive"
    assert response.headers["content-type"] == "application/x-ndjson"
