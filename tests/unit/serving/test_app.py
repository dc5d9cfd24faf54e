"""The routes: what each answers, and what the OpenAPI description says of it."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import hashlib
import io
import re

import numpy as np
import pytest
import torch
from colour_server import png
from PIL import Image

from captioner.api import Captioner
from captioner.config import SearchOptions
from captioner.errors import ConfigError
from captioner.serving.answers import Answer
from captioner.serving.app import create_app

JPEG, PNG = io.BytesIO(), io.BytesIO()
for file, kind in ((JPEG, "JPEG"), (PNG, "PNG")):
    Image.effect_noise((64, 48), 90).convert("RGB").save(file, kind)


# --- captions ------------------------------------------------------------------------------------


def test_an_answer_holds_the_size_and_the_captions(serve):
    async def test(server):
        answer = await server.post(png((1, 2, 3), size=(6, 4))).answer()
        assert answer.headers["content-type"] == "application/json"
        assert answer.json == {
            "width": 6,
            "height": 4,
            "captions": [
                {
                    "text": "1-2-3 2 0",
                    "words": ["1-2-3", "2", "0"],
                    "log_prob": -1.5,
                    "log_probs": [-0.5, -0.5, -0.5],
                }
            ],
        }

    serve(test)


def test_the_size_is_the_upright_photos(serve):
    turned = io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = 6  # a quarter turn
    Image.new("RGB", (6, 4)).save(turned, "JPEG", exif=exif)

    async def test(server):
        told = (await server.post(turned.getvalue()).answer()).json
        assert (told["width"], told["height"]) == (4, 6)

    serve(test)


def test_attention_and_alternatives_come_when_asked_for(serve):
    async def test(server):
        answer = await server.post(png(), attention="true", alternatives=2).answer()
        [caption] = answer.json["captions"]
        assert caption["gates"] == [1, 1, 1]
        assert np.shape(caption["alphas"]) == (3, 2, 2)
        assert caption["region"] == [0, 0, 1, 1]
        assert [one["word"] for one in caption["alternatives"][0]] == ["other0", "other1"]
        Answer.model_validate(answer.json, strict=False)

    serve(test)


def test_search_options_and_own_words_reach_the_model(serve):
    async def test(server):
        several = await server.post(png(), beam_size=7, num_captions=3).answer()
        assert several.texts == ["1-2-3 7 0", "1-2-3 7 1", "1-2-3 7 2"]
        own = await server.post(png(), words="a dog").answer()
        assert own.texts == ["1-2-3 a dog"]

    serve(test)


@pytest.mark.parametrize("declared", ["image/jpeg", "text/plain", "application/x-nonsense", ""])
def test_the_bytes_decide_what_a_photo_is(serve, declared):
    async def test(server):
        answer = await server.post(png(), headers={"content-type": declared}).answer()
        assert answer.status == 200
        answer = await server.post(b"<html>", headers={"content-type": "image/png"}).answer()
        assert answer.status == 415

    serve(test)


@pytest.mark.parametrize(
    ("body", "status", "told"),
    [
        (b"", 415, "the body is empty; send a photo's bytes"),
        (b"hello", 415, "not a picture"),
        (b"%PDF-1.7", 415, "a PDF, which cannot be read; give JPEG"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", 415, "a PostScript drawing"),
        (b"GIF89a\x01", 422, "header is broken"),
        (JPEG.getvalue()[:-300], 422, "breaks off before its end"),
        (PNG.getvalue()[:-300], 422, "breaks off before its end"),
    ],
)
def test_what_is_no_photo(serve, model, body, status, told):
    async def test(server):
        answer = await server.post(body).answer()
        assert answer.status == status
        assert told in answer.error

    serve(test)
    assert model.batches == []


def test_a_form_is_told_how_to_send_its_photo(serve):
    async def test(server):
        kind = "multipart/form-data; boundary=x"
        exchange = server.open(headers={"content-type": kind})
        answer = await exchange.answer()
        assert (answer.status, exchange.read) == (415, 0)  # not even read: nothing is spooled
        assert "curl --data-binary @photo.jpg" in answer.error

    serve(test)


@pytest.mark.parametrize(
    ("query", "told"),
    [
        ({"beam_size": 21}, "beam_size is 21; give an integer from 1 to 20"),
        ({"beam_size": 0}, "beam_size is 0; give an integer from 1 to 20"),
        ({"beam_size": "x"}, "beam_size is x; give an integer from 1 to 20"),
        ({"beam_size": "1.5"}, "beam_size is 1.5; give an integer from 1 to 20"),
        ({"num_captions": 21, "temperature": 1}, "num_captions is 21; give an integer"),
        ({"max_length": 51}, "max_length is 51; give an integer from 1 to 50"),
        ({"temperature": "nan"}, "temperature is nan; give a number from 0 to 100"),
        ({"length_penalty": "inf"}, "length_penalty is inf; give a number from 0 to 10"),
        ({"seed": 10**30}, "seed is 1000000"),
        ({"alternatives": 21}, "alternatives is 21; give an integer from 0 to 20"),
        ({"attention": "maybe"}, "attention is maybe; give true or false"),
        ({"guard_endings": 7}, "guard_endings is 7; give true or false"),
        ({"forced_words": "a,b,c,d,e,f,g,h,i,j,k"}, "forced_words holds 11 words; give 10 at most"),
        ({"banned_words": ["w"] * 11}, "banned_words holds 11 words; give 10 at most"),
        ({"forced_words": "x" * 1001}, "1000 characters at most"),
        ({"words": "x" * 1001}, "1000 characters at most"),
        ({"words": "word " * 50}, "words holds 50 words; give 49 at most"),
        ({"words": "zebra"}, "the model does not know zebra"),
        ({"words": ""}, "''"),
        ({"words": "a", "beam_size": 2, "seed": 1}, "beam_size, seed would search for one"),
        ({"num_captions": 3}, "num_captions is 3; give at most beam_size (2)"),
        ({"seed": 1}, "seed 1 is for sampling"),
        ({"min_length": 6}, "give a min_length below max_length"),
        ({"beam": 2, "size": 3}, "beam, size: no such parameter; give beam_size, num_captions"),
        ({"beam-size": 2}, "beam-size: no such parameter"),
        ({"beam_size\n": 2}, "'beam_size\\n': no such parameter"),
    ],
)
def test_a_parameter_that_cannot_be(serve, model, query, told):
    async def test(server):
        exchange = server.open(**query)  # sends no body: it is refused before
        answer = await exchange.answer()
        assert answer.status == 422
        assert told in answer.error
        assert len(answer.error) < 600
        assert await server.metric('captioner_refused_total{reason="options"}') == 1

    serve(test)
    assert model.batches == []


def test_words_may_come_with_commas_or_one_by_one(serve, model, monkeypatch):
    seen = []
    real = model.caption_batch
    monkeypatch.setattr(
        model, "caption_batch", lambda p, o, **k: seen.append(o.banned_words) or real(p, o, **k)
    )

    async def test(server):
        for given in ("a,b", ["a", "b"], "a b", ["a, b"]):
            assert (await server.post(png(), banned_words=given).answer()).status == 200

    serve(test)
    assert seen == [("a", "b")] * 4


def test_a_smaller_limit_of_the_beam_is_told(serve):
    async def test(server):
        assert "from 1 to 3" in (await server.open(beam_size=4).answer()).error

    serve(test, max_beam=3)


# --- the model itself ----------------------------------------------------------------------------


def test_answers_are_the_models_own(serve, stored_model):
    """Whatever shares its batch, a photo gets what ``Captioner`` says of it alone."""
    with torch.no_grad():  # so that it says something else of every photo
        for parameter in stored_model.model.decoder.parameters():
            parameter.mul_(4)
    real = Captioner(stored_model, precision="fp32")
    noise = np.random.default_rng(0).integers(256, size=(12, 30, 40, 3), dtype=np.uint8)
    files = []
    for number, pixels in enumerate(noise, 1):
        colour = np.array([number >> 2 & 1, number >> 1 & 1, number & 1], dtype=np.uint8)
        file = io.BytesIO()
        Image.fromarray(pixels * colour).save(file, "PNG")
        files.append(file.getvalue())
    ways = [
        {"min_length": 2},
        {"num_captions": 2, "beam_size": 3, "length_penalty": 1.0, "min_length": 1},
        {"temperature": 1.5, "seed": 3, "num_captions": 2, "min_length": 1},
        {"words": "a dog runs"},
    ]

    async def test(server):
        asked = [(file, way) for way in ways for file in files]
        exchanges = [
            server.post(file, attention="true", alternatives=3, **way) for file, way in asked
        ]
        answers = await asyncio.gather(*(one.answer() for one in exchanges))
        assert len({answer.texts[0] for answer in answers[: len(files)]}) > 3
        for (file, way), answer in zip(asked, answers, strict=True):
            if "words" in way:
                alone = [real.explain(io.BytesIO(file), way["words"], alternatives=3)]
            else:
                alone = real.captions(io.BytesIO(file), alternatives=3, **way)
            assert answer.texts == [caption.text for caption in alone]
            for told, caption in zip(answer.json["captions"], alone, strict=True):
                np.testing.assert_allclose(told["alphas"], caption.alphas, atol=1e-4)
                np.testing.assert_allclose(told["log_probs"], caption.log_probs, atol=1e-3)

    serve(test, of=Captioner(stored_model, precision="fp32"), batch_size=5)


@pytest.mark.parametrize(
    "query",
    [
        {"forced_words": "a,dog,runs,on,grass,the,man,hat", "beam_size": 20, "max_length": 50},
        {"forced_words": "zebra"},
        {"banned_words": ["a,dog,runs,on,grass", "the,man,hat"]},
        {"banned_words": "zebra", "guard_endings": "true"},
        {"temperature": 1e-30, "num_captions": 20, "seed": 2**32 - 1},
        {"temperature": 100, "top_k": 1_000_000, "top_p": 1e-9},
        {"beam_groups": 4, "beam_size": 20, "num_captions": 20, "diversity": 100},
        {"beam_size": 20, "num_captions": 20, "block_ngrams": 1, "max_length": 50},
        {"beam_size": 20, "length_penalty": 10, "min_length": 49, "max_length": 50},
        {"words": "a man's hat on the grass", "alternatives": 20},
        {"words": " ".join(["dog"] * 49), "attention": "true"},
        {"words": "\u0000 ' \" ` <dog>"},
    ],
)
def test_no_parameter_breaks_the_model(serve, stored_model, query):
    """The ends of every range: an answer or a line, never a mistake of ours."""

    async def test(server):
        answer = await server.post(png(size=(64, 64)), **query).answer()
        assert answer.status == 200 or (answer.status == 422 and answer.error)

    serve(test, of=Captioner(stored_model, precision="fp32"))


# --- the other routes ----------------------------------------------------------------------------


def test_health_tells_whether_photos_are_captioned(serve, model):
    async def test(server):
        answer = await server.get("/healthz")
        assert (answer.status, answer.json) == (200, {"status": "ok"})
        server.service.batcher.close()
        server.service.batcher.join()
        answer = await server.get("/healthz")
        assert answer.status == 503
        assert "retry-after" in answer.headers
        assert "no photos" in answer.error

    serve(test)


def test_before_the_start_it_is_not_healthy(model):
    from colour_server import Server

    async def test():
        assert (await Server(create_app(model), model).get("/healthz")).status == 503

    asyncio.run(test())


def test_metrics_count_by_route_and_status(serve):
    async def test(server):
        await server.post(png()).answer()
        await server.post(b"no photo").answer()
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
        answer = await server.get("/metrics")
        assert answer.headers["content-type"].startswith("text/plain; version=")
        assert "nothing" not in answer.body.decode()

    serve(test)


def test_every_application_counts_for_itself(model):
    create_app(model)
    create_app(model)  # in one registry for both, this would fail


def test_the_page_may_run_its_own_script_alone(serve):
    async def test(server):
        answer = await server.get("/")
        assert answer.status == 200
        assert answer.headers["content-type"] == "text/html; charset=utf-8"
        rules = dict(
            rule.strip().split(" ", 1)
            for rule in answer.headers["content-security-policy"].split(";")
            if " " in rule.strip()
        )
        assert rules["default-src"] == "'none'"
        for name in ("base-uri", "form-action", "frame-ancestors"):
            assert rules[name] == "'none'"
        assert rules["connect-src"] == "'self'"
        for tag in ("script", "style"):
            for text in re.findall(rf"<{tag}\b[^>]*>(.*?)</{tag}>", answer.body.decode(), re.S):
                digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
                if text.lstrip()[:1] not in "[{":  # data is not run
                    assert f"'sha256-{digest}'" in rules[f"{tag}-src"]
            assert "unsafe" not in rules.get(f"{tag}-src", "")
            assert "http" not in rules.get(f"{tag}-src", "")

    serve(test)


def test_browsers_find_an_icon_or_nothing_to_complain_of(serve):
    async def test(server):
        assert (await server.get("/favicon.ico")).status == 204

    serve(test)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nothing", 404),
        ("POST", "/v1/captions/", 404),
        ("GET", "/docs", 404),
        ("GET", "/redoc", 404),
        ("GET", "/v1/captions", 405),
        ("DELETE", "/v1/captions", 405),
        ("POST", "/", 405),
    ],
)
def test_what_is_not_there(serve, method, path, status):
    async def test(server):
        answer = await server.get(path, method)
        assert answer.status == status
        assert answer.error
        if status == 405:
            assert answer.headers["allow"]

    serve(test)


def test_an_impossible_batch_size_is_refused(model):
    with pytest.raises(ConfigError, match="batch-size is 0"):
        create_app(model, batch_size=0)


# --- the description -----------------------------------------------------------------------------


@pytest.fixture
def described(model):
    return create_app(model).openapi()


def test_the_description_tells_every_parameter(described):
    post = described["paths"]["/v1/captions"]["post"]
    told = {one["name"]: one for one in post["parameters"]}
    fields = [field.name for field in dataclasses.fields(SearchOptions)]
    assert list(told) == [*fields, "words", "attention", "alternatives"]
    for name, one in told.items():
        assert one["in"] == "query"
        assert not one.get("required")
        assert len(one["description"]) > 20, name
    assert "1 is greedy search" in told["beam_size"]["description"]
    beam = next(s for s in told["beam_size"]["schema"]["anyOf"] if s["type"] == "integer")
    assert (beam["minimum"], beam["maximum"]) == (1, 20)


def test_the_description_tells_the_body_and_the_answers(described):
    post = described["paths"]["/v1/captions"]["post"]
    body = post["requestBody"]
    assert body["required"]
    for content in body["content"].values():
        assert content["schema"] == {"type": "string", "format": "binary"}
    statuses = {"200", "400", "403", "408", "413", "415", "421", "422", "429", "500", "503"}
    assert set(post["responses"]) == statuses
    for status, one in post["responses"].items():
        schema = one["content"]["application/json"]["schema"]["$ref"].rsplit("/", 1)[1]
        assert schema == ("Answer" if status == "200" else "Problem")
    caption = described["components"]["schemas"]["CaptionAnswer"]
    assert set(caption["required"]) == {"text", "words", "log_prob", "log_probs"}
    assert "HTTPValidationError" not in described["components"]["schemas"]


def test_the_description_is_served_and_lists_the_routes(serve):
    async def test(server):
        answer = await server.get("/openapi.json")
        assert set(answer.json["paths"]) == {"/v1/captions", "/healthz", "/metrics"}

    serve(test)
