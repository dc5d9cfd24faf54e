"""Which requests share a batch, in which order, and which response each gets."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest
from colour_server import BAD, OWN, ColourModel, name, png, until

from captioner.caption import CropBox
from captioner.errors import ConfigError
from captioner.inference.engine import Prepared
from captioner.options import SearchOptions
from captioner.serving.batching import Batcher, ClosedError
from captioner.serving.schema import CaptionRequest


def photo(*colour: int) -> Prepared:
    return Prepared((np.array([[colour]], dtype=np.uint8),), CropBox())


@pytest.fixture
def batcher(model):
    new = Batcher(model, batch_size=3)
    new.start()
    yield new
    model.gate.set()
    new.close()
    new.join()


def block(model: ColourModel, batcher: Batcher):
    """Block the model with a photo, so that later requests wait."""
    model.gate.clear()
    future = batcher.submit(photo(0, 0, 0), CaptionRequest(OWN))
    assert model.entered.acquire(timeout=30)
    return future


def batches_of(requests: list[CaptionRequest], batch_size: int = 6) -> list[list[int]]:
    """The batches in which waiting requests are captioned, as their positions from 1."""
    model = ColourModel()
    batcher = Batcher(model, batch_size)
    batcher.start()
    first = block(model, batcher)
    futures = [batcher.submit(photo(n, 0, 0), request) for n, request in enumerate(requests, 1)]
    assert batcher.waiting == len(requests)
    model.gate.set()
    for number, future in enumerate([first, *futures]):
        assert future.result(timeout=30)[0].words[0] == f"{number}-0-0"
    assert batcher.waiting == 0
    batcher.close()
    batcher.join()
    return [[int(colour.partition("-")[0]) for colour in batch] for batch in model.batches[1:]]


def test_waiting_requests_share_batches():
    """The oldest request determines the options of the next batch; the others keep their place."""
    other = CaptionRequest(SearchOptions(beam_size=1, max_length=6))
    own, more = CaptionRequest(OWN), CaptionRequest(OWN, alternatives=2)
    assert batches_of([own] * 5, 3) == [[1, 2, 3], [4, 5]]
    requests = [other, own, other, more, own, other, other]
    assert batches_of(requests, 3) == [[1, 3, 6], [2, 5], [4], [7]]


@pytest.mark.parametrize(
    ("options", "together"),
    [
        ({"beam_size": 1}, 6),  # narrower: limited by the batch size
        ({}, 6),
        ({"beam_size": 4}, 3),
        ({"max_length": 12}, 3),
        ({"forced_words": ("a", "b")}, 2),
        ({"beam_size": 1, "temperature": 1, "num_captions": 4}, 3),
        ({"beam_size": 20, "max_length": 50}, 1),
    ],
)
def test_wider_search_gets_smaller_batches(options, together):
    request = CaptionRequest(replace(OWN, **options))
    batches = batches_of([request] * 6)
    assert [len(batch) for batch in batches] == [together] * (6 // together)


@pytest.mark.parametrize("words", [(), ("a", "dog")], ids=["searched", "given"])
def test_methods_share_no_batch_and_costly_ones_get_smaller_batches(words):
    requests = [
        CaptionRequest(None if words else OWN, words, method=method)
        for method in ("attention", "attention_gate", "occlusion")
        for _ in range(2)
    ]
    assert batches_of(requests) == [[1, 2], [3, 4], [5], [6]]


def test_cancelled_photo_is_never_captioned(model, batcher):
    block(model, batcher)
    kept, dropped = (batcher.submit(photo(n, 0, 0), CaptionRequest(OWN)) for n in (1, 2))

    assert dropped.cancel()
    assert batcher.waiting == 1

    model.gate.set()
    kept.result(timeout=30)
    assert model.batches == [["0-0-0"], ["1-0-0"]]


def test_error_reaches_only_its_request(model, batcher):
    model.broken = ConfigError("no sentence is left to say")
    block(model, batcher)
    good, bad, also_good = (
        batcher.submit(photo(*colour), CaptionRequest(OWN))
        for colour in ((1, 0, 0), BAD, (2, 0, 0))
    )

    model.gate.set()

    assert good.result(timeout=30)[0].words[0] == "1-0-0"
    assert also_good.result(timeout=30)[0].words[0] == "2-0-0"
    with pytest.raises(ConfigError, match="no sentence"):
        bad.result(timeout=30)
    assert len(model.batches[1]) == 3  # tried together first
    assert batcher.alive


def test_close_finishes_running_and_fails_waiting(model, batcher):
    running = block(model, batcher)
    waiting = batcher.submit(photo(1, 0, 0), CaptionRequest(OWN))

    batcher.close()

    with pytest.raises(ClosedError):
        waiting.result(timeout=30)
    with pytest.raises(ClosedError):
        batcher.submit(photo(2, 0, 0), CaptionRequest(OWN))
    assert not running.done()
    model.gate.set()
    assert running.result(timeout=30)[0].words[0] == "0-0-0"
    batcher.join()
    assert not batcher.alive
    assert model.batches == [["0-0-0"]]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_dead_thread_fails_all_requests(model, monkeypatch):
    batcher = Batcher(model, batch_size=1)

    def dies(*_, **__):
        raise SystemExit  # not an Exception, so it ends the thread

    monkeypatch.setattr(model, "caption_batch", dies)
    running, waiting = (batcher.submit(photo(n, 0, 0), CaptionRequest(OWN)) for n in (1, 2))
    batcher.start()
    batcher.join()

    assert not batcher.alive
    for future in (running, waiting):
        with pytest.raises(ClosedError):
            future.result(timeout=30)
    with pytest.raises(ClosedError):
        batcher.submit(photo(2, 0, 0), CaptionRequest(OWN))


async def test_responses_are_not_mixed_up_under_load(serve, model):
    """Eighty photos of different colours with three kinds of options at once."""
    colours = [(n, 255 - n, n * 3 % 256) for n in range(1, 81)]

    server = await serve(max_queue=100)
    first = await server.hold()
    queries = [{}, {"beam_size": 5}, {"words": "own words", "alternatives": 1}]
    exchanges = [server.post(png(colour), **queries[n % 3]) for n, colour in enumerate(colours)]
    await until(lambda: server.service.batcher.waiting >= 40)
    model.gate.set()
    responses = await asyncio.gather(*(one.response() for one in exchanges))
    await first.response()
    for n, (colour, response) in enumerate(zip(colours, responses, strict=True)):
        rest = ["2 0", "5 0", "own words"][n % 3]
        assert response.texts == [f"{name(colour)} {rest}"]
    assert await server.metric("captioner_photos_captioned_total") == 81
    assert await server.metric("captioner_batch_photos_count") == len(model.batches) < 81
    assert max(map(len, model.batches)) == 8
