"""Routes, error responses and the OpenAPI schema."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import io
import itertools
import json
import re

import numpy as np
import pytest
import torch
from colour_server import png

from captioner.inference.captioner import Captioner
from captioner.options import SearchOptions
from captioner.serving.app import create_app


async def test_response_has_size_and_captions(serve):
    server = await serve()
    response = await server.post(png((1, 2, 3), size=(6, 4))).response()
    assert response.headers["content-type"] == "application/json"
    assert response.json == {
        "width": 6,
        "height": 4,
        "captions": [
            {
                "text": "1-2-3 2 0",
                "words": ["1-2-3", "2", "0"],
                "log_prob": -1.5,
                "log_probs": [-0.5, -0.5, -0.5],
                "confidence": None,
                "doubtful": [],
            }
        ],
    }


INVALID = [
    ({"beam_size": 21}, "beam_size is 21; give an integer from 1 to 20"),
    ({"temperature": "nan"}, "temperature is nan; give a number from 0 to 100"),
    ({"attention": "maybe"}, "attention is maybe; give true or false"),
    ({"forced_words": "a,b,c,d,e,f,g,h,i,j,k"}, "give at most 10 words"),
    ({"candidates": 128}, "give an integer from 0 to 20 (the server's --max-beam)"),
    ({"words": "zebra"}, "the model does not know zebra"),
    ({"words": "a", "beam_size": 2, "seed": 1}, "with search options (beam_size, seed)"),
    ({"num_captions": 3}, "num_captions is 3; give at most beam_size (2)"),
    ({"beam_size": [1, 2]}, "beam_size is given 2 times; give it once"),
    ({"beam_size\n": 2}, "unknown parameter 'beam_size\\n'"),
]


async def test_invalid_parameters(serve, model):
    server = await serve()
    for query, message in INVALID:
        response = await server.post(png(), **query).response()
        assert response.status == 422
        assert message in response.error
        assert len(response.error) < 600
    body = json.dumps({"image": base64.b64encode(png()).decode(), "beam_size": 2}).encode()
    headers = {"content-type": "application/json"}
    response = await server.post(body, headers=headers, beam_size=3).response()
    assert response.error == "beam_size is given in the query and in the body; give it once"
    assert await server.metric('captioner_refused_total{reason="options"}') == len(INVALID) + 1
    assert model.batches == []


async def test_responses_match_the_model(serve, stored_model):
    """The captions of a photo do not depend on the rest of its batch."""
    with torch.no_grad():  # so that captions differ between photos
        for parameter in stored_model.model.decoder.parameters():
            parameter.mul_(4)
    real = Captioner(stored_model, precision="fp32")
    files = [png(colour, (40, 30)) for colour in itertools.product((0, 255), repeat=3)]
    queries = [
        {"min_length": 2},
        {"num_captions": 2, "beam_size": 3, "length_penalty": 1.0, "min_length": 1},
        {"temperature": 1.5, "seed": 3, "num_captions": 2, "min_length": 1},
        {"words": "a dog runs"},
    ]

    server = await serve(of=Captioner(stored_model, precision="fp32"), batch_size=5)
    requests = [(file, query) for query in queries for file in files]
    exchanges = [
        server.post(file, attention="true", alternatives=3, **query) for file, query in requests
    ]
    responses = await asyncio.gather(*(one.response() for one in exchanges))
    assert len({response.texts[0] for response in responses[: len(files)]}) > 3
    for (file, query), response in zip(requests, responses, strict=True):
        if "words" in query:
            alone = [real.explain(io.BytesIO(file), query["words"], alternatives=3)]
        else:
            alone = real.captions(io.BytesIO(file), alternatives=3, **query)
        assert response.texts == [caption.text for caption in alone]
        for result, caption in zip(response.json["captions"], alone, strict=True):
            np.testing.assert_allclose(result["alphas"], caption.alphas, atol=1e-4)
            np.testing.assert_allclose(result["log_probs"], caption.log_probs, atol=1e-3)


async def test_metrics_count_by_route_and_status(serve):
    server = await serve()
    await server.post(png()).response()
    await server.post(b"no photo").response()
    await server.get("/nothing")
    await server.get("/nothing-else")
    for line, value in {
        'captioner_requests_total{route="/v1/captions",status="200"}': 1,
        'captioner_requests_total{route="/v1/captions",status="415"}': 1,
        'captioner_requests_total{route="other",status="404"}': 2,
        'captioner_request_seconds_count{route="/v1/captions"}': 2,
        'captioner_refused_total{reason="no_picture"}': 1,
        "captioner_photos_captioned_total": 1,
        "captioner_batch_photos_count": 1,
        "captioner_waiting_photos": 0,
        "captioner_held_requests": 0,
    }.items():
        assert await server.metric(line) == value, line
    response = await server.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=")
    assert "nothing" not in response.body.decode()


async def test_page_policy_allows_its_own_scripts_only(serve):
    """By their hashes, which the browser checks in its tests."""
    response = await (await serve()).get("/")
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    rules = response.headers["content-security-policy"].split("; ")
    for rule in ("default-src", "base-uri", "form-action", "frame-ancestors"):
        assert f"{rule} 'none'" in rules
    assert "connect-src 'self'" in rules
    assert not re.search(r"unsafe|http|\*", " ".join(rules))


@pytest.fixture
def schema(model):
    return create_app(model).openapi()


def test_schema_has_every_parameter(schema):
    post = schema["paths"]["/v1/captions"]["post"]
    parameters = {one["name"]: one for one in post["parameters"]}
    fields = [field.name for field in dataclasses.fields(SearchOptions)]
    extra = ["words", "attention", "alternatives", "method", "min_confidence"]
    assert sorted(parameters) == sorted([*fields, *extra])
    for name, one in parameters.items():
        assert one["in"] == "query"
        assert not one.get("required")
        assert len(one["description"]) > 20, name
    assert "Beam width; 1 is greedy search" in parameters["beam_size"]["description"]
    beam = next(s for s in parameters["beam_size"]["schema"]["anyOf"] if s["type"] == "integer")
    assert (beam["minimum"], beam["maximum"]) == (1, 20)


async def test_schema_describes_every_body_with_an_example(serve, schema):
    """The JSON examples are accepted as they are."""
    examples = {}
    for path, item in schema["paths"].items():
        if not path.startswith(("/v1/", "/api/")):
            continue
        if "post" not in item:
            continue
        body = item["post"]["requestBody"]
        if "multipart/form-data" not in body["content"]:  # the protocols of other programs
            examples[path] = body["content"]["application/json"]["example"]
            continue
        assert "curl -F image" in body["description"]
        name = "images" if path == "/v1/batch" else "image"
        form = body["content"]["multipart/form-data"]
        assert form["schema"]["required"] == list(form["schema"]["properties"]) == [name]
        assert list(form["example"]) == [name]
        declared = body["content"]["application/json"]
        properties = declared["schema"]["properties"]
        options = [one["name"] for one in item["post"]["parameters"]]
        assert list(properties) == [name, *options]
        examples[path] = declared["example"]

    server = await serve()
    for path, example in examples.items():
        headers = {"content-type": "application/json"}
        exchange = server.open(path, headers=headers).send(json.dumps(example).encode())
        assert (await exchange.response()).status == 200, path
