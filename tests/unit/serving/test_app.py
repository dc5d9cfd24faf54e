"""Routes, pictures, error responses and the OpenAPI schema."""

from __future__ import annotations

import asyncio
import dataclasses
import io
import itertools
import json
import math
import re
from unittest.mock import Mock
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from colour_server import png
from cutting import cut
from PIL import Image
from test_photos import as_json, file, option, parts, text

import captioner
from captioner.caption_types import Alternative, Caption, CropBox, Keyword
from captioner.geometry import Geometry
from captioner.inference.captioner import Captioner
from captioner.options import SearchOptions
from captioner.serving.app import create_app
from captioner.serving.openapi import CaptionResult


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
    ({"beam_size": 0}, "beam_size is 0; input should be greater than or equal to 1"),
    ({"temperature": "nan"}, "temperature is nan; input should be less than or equal to 100"),
    ({"attention": "maybe"}, "attention is maybe; input should be a valid boolean"),
    ({"forced_words": "a,b,c,d,e,f,g,h,i,j,k"}, "list should have at most 10 items"),
    ({"words": "x" * 1001}, "string should have at most 1000 characters"),
    ({"candidates": 128}, "should be less than or equal to 20 (the server's max_beam)"),
    ({"words": "zebra"}, "the model does not know zebra"),
    ({"words": "a", "beam_size": 2, "seed": 1}, "leave out beam_size, seed, or"),
    ({"num_captions": 3}, "num_captions is 3, but beam_size is 2; set beam_size to 3"),
    ({"beam_size": [1, 2]}, "beam_size is ['1', '2']; input should be a valid integer"),
    ({"beam_size\n": 2}, "'beam_size\\n' is not an option of this endpoint"),
]


async def test_invalid_parameters(serve, model):
    server = await serve()
    for query, message in INVALID:
        response = await server.post(png(), **query).response()
        assert response.status == 422
        assert message in response.error
        assert len(response.error) < 600
    for given, query, message in (
        (2, {"beam_size": 3}, "beam_size is set in the query and in the body; set it once"),
        ([2], {}, "beam_size is [2]; input should be a valid integer"),
        (True, {}, "beam_size is True; input should be a number, not true or false"),
    ):
        body, headers = as_json({"image": text(png()), "beam_size": given})
        response = await server.post(body, headers=headers, **query).response()
        assert response.error == message
    assert await server.metric('captioner_refused_total{reason="options"}') == len(INVALID) + 3
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
    requests = [(photo, query) for query in queries for photo in files]
    exchanges = [
        server.post(photo, attention="true", alternatives=3, **query) for photo, query in requests
    ]
    responses = await asyncio.gather(*(one.response() for one in exchanges))
    assert len({response.texts[0] for response in responses[: len(files)]}) > 3
    for (photo, query), response in zip(requests, responses, strict=True):
        if "words" in query:
            alone = [real.explain(io.BytesIO(photo), query["words"], alternatives=3)]
        else:
            alone = real.captions(io.BytesIO(photo), alternatives=3, **query)
        assert response.texts == [caption.text for caption in alone]
        for result, caption in zip(response.json["captions"], alone, strict=True):
            np.testing.assert_allclose(result["alphas"], caption.alphas, atol=1e-4)
            np.testing.assert_allclose(result["log_probs"], caption.log_probs, atol=1e-3)


PHOTO = png((1, 2, 3), (64, 48))  # its first word is 1-2-3
KINDS = {
    "/v1/overlay.png": "image/png",
    "/v1/overlay.svg": "image/svg+xml",
    "/v1/overlay.html": "text/html; charset=utf-8",
    "/v1/maps.npy": "application/octet-stream",
}


async def test_overlays_are_those_of_the_python_functions(serve, stored_model, tmp_path):
    own, real = (Captioner(stored_model, precision="fp32") for _ in range(2))
    caption = own.explain(PHOTO, "a dog runs")
    captioner.overlay(PHOTO, caption).save(tmp_path / "wanted.svg")

    server = await serve(of=real)
    found = {}
    for path, kind in KINDS.items():
        response = await server.post(PHOTO, path=path, words="a dog runs").response()
        assert response.status == 200, response.body
        assert response.headers["content-type"] == kind
        found[path] = response.body
    image = Image.open(io.BytesIO(found["/v1/overlay.png"]))
    wanted = captioner.overlay(PHOTO, caption).image()
    np.testing.assert_array_equal(np.asarray(image), np.asarray(wanted))
    assert found["/v1/overlay.svg"] == (tmp_path / "wanted.svg").read_bytes()
    assert found["/v1/overlay.html"].decode() == captioner.page(PHOTO, caption).html
    maps = np.load(io.BytesIO(found["/v1/maps.npy"]), allow_pickle=False)
    np.testing.assert_allclose(maps, caption.alphas, atol=1e-6)


async def test_figures_need_a_folder_for_matplotlib(serve, monkeypatch):
    """Matplotlib raises an OSError if it finds no writable folder. The error names the remedy."""
    error = OSError("a temporary directory could not be created; set MPLCONFIGDIR")
    monkeypatch.setattr("captioner.serving.app.overlay", Mock(side_effect=error))
    response = await (await serve()).post(PHOTO, path="/v1/overlay.png").response()
    assert (response.status, "MPLCONFIGDIR" in response.error) == (500, True)


async def test_options_of_the_picture_and_of_the_search(serve):
    """They work in the query, in a form and in JSON."""
    server = await serve()
    same = {"theme": "dark", "only": "1,2", "num_captions": "2"}
    dark = await server.post(PHOTO, path="/v1/overlay.png", **same).response()
    assert Image.open(io.BytesIO(dark.body)).getpixel((0, 0)) == (20, 20, 26)
    for body, headers in (
        parts(file(PHOTO), *[option(*one) for one in same.items()]),
        as_json({"image": text(PHOTO), **same}),
    ):
        response = await server.post(body, path="/v1/overlay.png", headers=headers).response()
        assert response.body == dark.body


async def test_opened_documents_are_sandboxed(serve):
    """A page or SVG opened from this server cannot send requests in its name."""
    server = await serve()
    words = {"words": "<script>alert(1)</script> </svg> dog"}
    page = await server.post(PHOTO, path="/v1/overlay.html", title="<b>", **words).response()
    policy = page.headers["content-security-policy"]
    assert policy == "frame-ancestors 'none'; sandbox allow-scripts"
    assert b"<script>alert" not in page.body
    assert b"<b>" not in page.body
    svg = await server.post(PHOTO, path="/v1/overlay.svg", **words).response()
    assert "sandbox" in svg.headers["content-security-policy"]
    assert "script-src" not in svg.headers["content-security-policy"]
    tree = ElementTree.fromstring(svg.body)
    assert not [one for one in tree.iter() if "script" in one.tag]
    for response in (page, svg):
        assert response.headers["x-content-type-options"] == "nosniff"


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
    """The policy lists their hashes. The browser tests check that it works."""
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
    assert "Keep this many candidate captions" in parameters["beam_size"]["description"]
    beam = next(s for s in parameters["beam_size"]["schema"]["anyOf"] if s["type"] == "integer")
    assert (beam["minimum"], beam["maximum"]) == (1, 20)


def test_schema_has_every_field_of_a_caption():
    maps = np.full((2, 3, 4), 1 / 12, dtype=np.float32)
    caption = Caption(
        ("a", "dog"), np.float32([-0.5, -1]), maps, np.float32([0.5, 1]), -2.0,
        CropBox(0.1, 0, 0.9, 1), ((Alternative("the", -1.0),), (Alternative("cat", -2.0),)),
        geometry=Geometry.even((3, 4), 0.1, 0, 0.9, 1), method="occlusion", confidence=0.25,
        keywords=(Keyword("dog", 0.75, maps[0]),),
    )  # fmt: skip
    data = cut(caption, 1, [math.nan, 0.25]).to_dict(attention=True, min_confidence=0.5)
    assert data.keys() == CaptionResult.model_fields.keys()
    assert CaptionResult(**data).model_dump(exclude_unset=True).keys() == data.keys()


async def test_schema_has_the_errors_of_every_endpoint(serve):
    """The errors have the format of the endpoint's protocol."""
    server = await serve(api_keys="alice alice-0123456789abcdef")
    schema = server.app.openapi()
    for path, item in schema["paths"].items():
        if not path.startswith(("/v1/", "/api/")):
            continue
        [(verb, operation)] = item.items()
        statuses = {"400", "401", "429"} | ({"413", "422", "503"} if verb == "post" else set())
        assert statuses <= operation["responses"].keys()
        response = await server.get(path, verb.upper())
        assert response.status == 401, path
        declared = operation["responses"]["401"]["content"]["application/json"]["schema"]["$ref"]
        kind = schema["components"]["schemas"][declared.rpartition("/")[2]]
        assert response.json.keys() == kind["properties"].keys(), path


async def test_schema_describes_every_body_with_an_example(serve, schema):
    """The server accepts the JSON examples unchanged."""
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
