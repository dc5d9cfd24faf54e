"""Who is captioned with whom, in which order, and who gets which answer."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from colour_server import BAD, OWN, ColourModel, name, png, until

from captioner.caption import CropBox
from captioner.config import SearchOptions
from captioner.errors import ConfigError
from captioner.inference import Prepared
from captioner.serving.batching import Ask, Batcher, ClosedError


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


def held(model: ColourModel, batcher: Batcher):
    """The model is at work on a photo; what comes now waits."""
    model.gate.clear()
    future = batcher.submit(photo(0, 0, 0), Ask(OWN))
    assert model.entered.acquire(timeout=30)
    return future


def test_an_idle_model_begins_at_once(model, batcher):
    future = batcher.submit(photo(1, 2, 3), Ask(OWN))

    [caption] = future.result(timeout=30)

    assert caption.words[0] == "1-2-3"
    assert model.batches == [["1-2-3"]]


def test_those_who_wait_go_together_up_to_the_batch_size(model, batcher):
    first = held(model, batcher)
    futures = [batcher.submit(photo(n, 0, 0), Ask(OWN)) for n in range(1, 6)]
    assert batcher.waiting == 5

    model.gate.set()

    said = [future.result(timeout=30)[0].words[0] for future in (first, *futures)]
    assert said == ["0-0-0", "1-0-0", "2-0-0", "3-0-0", "4-0-0", "5-0-0"]
    assert model.batches == [["0-0-0"], ["1-0-0", "2-0-0", "3-0-0"], ["4-0-0", "5-0-0"]]
    assert batcher.waiting == 0


def test_who_asks_something_else_waits_where_it_stands(model, batcher):
    """First come, first served: the head of the queue decides what the next batch is."""
    held(model, batcher)
    other = Ask(SearchOptions(beam_size=1, max_length=6))
    asks = [other, Ask(OWN), other, Ask(OWN, alternatives=2), Ask(OWN), other, other]
    futures = [batcher.submit(photo(n, 0, 0), ask) for n, ask in enumerate(asks, 1)]

    model.gate.set()
    for number, future in enumerate(futures, 1):
        assert future.result(timeout=30)[0].words[0] == f"{number}-0-0"

    assert [[int(colour[0]) for colour in batch] for batch in model.batches[1:]] == [
        [1, 3, 6],
        [2, 5],
        [4],
        [7],
    ]


def test_own_words_go_together_and_each_gets_its_own(model, batcher):
    held(model, batcher)
    futures = [
        batcher.submit(photo(n, 0, 0), Ask(None, words=(f"word{n}",) * n)) for n in (1, 2, 3)
    ]

    model.gate.set()

    assert [future.result(timeout=30)[0].words for future in futures] == [
        ("1-0-0", "word1"),
        ("2-0-0", "word2", "word2"),
        ("3-0-0", "word3", "word3", "word3"),
    ]
    assert model.batches[1:] == [["1-0-0", "2-0-0", "3-0-0"]]


@pytest.mark.parametrize(
    ("options", "together"),
    [
        (SearchOptions(beam_size=1, max_length=6), 6),  # narrower: no more than the batch size
        (SearchOptions(beam_size=2, max_length=6), 6),
        (SearchOptions(beam_size=4, max_length=6), 3),
        (SearchOptions(beam_size=2, max_length=12), 3),
        (SearchOptions(beam_size=2, max_length=6, forced_words=("a", "b")), 2),
        (SearchOptions(beam_size=1, max_length=6, temperature=1, num_captions=4), 3),
        (SearchOptions(beam_size=20, max_length=50), 1),
    ],
)
def test_a_wider_search_shares_with_fewer(model, options, together):
    batcher = Batcher(model, batch_size=6)
    batcher.start()
    held(model, batcher)
    futures = [batcher.submit(photo(n, 0, 0), Ask(options)) for n in range(1, 7)]

    model.gate.set()
    for future in futures:
        future.result(timeout=30)

    assert [len(batch) for batch in model.batches[1:]] == [together] * (6 // together)
    batcher.close()
    batcher.join()


def test_a_cancelled_photo_is_never_run(model, batcher):
    held(model, batcher)
    kept, dropped = (batcher.submit(photo(n, 0, 0), Ask(OWN)) for n in (1, 2))

    assert dropped.cancel()
    assert batcher.waiting == 1

    model.gate.set()
    kept.result(timeout=30)
    assert model.batches == [["0-0-0"], ["1-0-0"]]


def test_an_error_reaches_the_one_who_causes_it(model, batcher):
    model.broken = ConfigError("no sentence is left to say")
    held(model, batcher)
    good, bad, also_good = (
        batcher.submit(photo(*colour), Ask(OWN)) for colour in ((1, 0, 0), BAD, (2, 0, 0))
    )

    model.gate.set()

    assert good.result(timeout=30)[0].words[0] == "1-0-0"
    assert also_good.result(timeout=30)[0].words[0] == "2-0-0"
    with pytest.raises(ConfigError, match="no sentence"):
        bad.result(timeout=30)
    assert len(model.batches[1]) == 3  # they were tried together first
    assert batcher.alive


def test_a_model_that_gives_too_few_answers_mixes_none(model, batcher, monkeypatch):
    monkeypatch.setattr(model, "caption_batch", lambda *_, **__: [])

    with pytest.raises(ValueError, match="shorter"):
        batcher.submit(photo(1, 0, 0), Ask(OWN)).result(timeout=30)


def test_closing_finishes_what_runs_and_fails_what_waits(model, batcher):
    running = held(model, batcher)
    waiting = batcher.submit(photo(1, 0, 0), Ask(OWN))

    batcher.close()

    with pytest.raises(ClosedError):
        waiting.result(timeout=30)
    with pytest.raises(ClosedError):
        batcher.submit(photo(2, 0, 0), Ask(OWN))
    assert not running.done()
    model.gate.set()
    assert running.result(timeout=30)[0].words[0] == "0-0-0"
    batcher.join()
    assert not batcher.alive
    assert model.batches == [["0-0-0"]]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_nobody_waits_for_a_thread_that_died(model, monkeypatch):
    batcher = Batcher(model, batch_size=1)

    def dies(*_, **__):
        raise SystemExit  # no Exception: the thread ends

    monkeypatch.setattr(model, "caption_batch", dies)
    running, waiting = (batcher.submit(photo(n, 0, 0), Ask(OWN)) for n in (1, 2))
    batcher.start()
    batcher.join()

    assert not batcher.alive
    for future in (running, waiting):
        with pytest.raises(ClosedError):
            future.result(timeout=30)
    with pytest.raises(ClosedError):
        batcher.submit(photo(2, 0, 0), Ask(OWN))


def test_no_answer_is_mixed_under_load(serve, model):
    """Eighty photos of their own colours at once, searched in three ways: each gets its own."""
    colours = [(n, 255 - n, n * 3 % 256) for n in range(1, 81)]

    async def test(server):
        first = await server.hold()
        ways = [{}, {"beam_size": 5}, {"words": "own words", "alternatives": 1}]
        exchanges = [server.post(png(colour), **ways[n % 3]) for n, colour in enumerate(colours)]
        await until(lambda: server.service.batcher.waiting >= 40)
        model.gate.set()
        answers = await asyncio.gather(*(one.answer() for one in exchanges))
        await first.answer()
        for n, (colour, answer) in enumerate(zip(colours, answers, strict=True)):
            told = ["2 0", "5 0", "own words"][n % 3]
            assert answer.texts == [f"{name(colour)} {told}"]
        assert await server.metric("captioner_photos_captioned_total") == 81
        assert await server.metric("captioner_batch_photos_count") == len(model.batches) < 81

    serve(test, max_queue=100)
    assert max(map(len, model.batches)) == 8
