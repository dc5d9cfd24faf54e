"""Which requests share a batch, whose turn it is, and which response each gets."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
from colour_server import BAD, OWN, ColourModel

from captioner.caption import CropBox
from captioner.errors import ConfigError
from captioner.inference.engine import Prepared
from captioner.options import SearchOptions
from captioner.serving import lanes
from captioner.serving.lanes import Lane
from captioner.serving.options import ServeOptions
from captioner.serving.schema import CaptionRequest, RequestError
from captioner.serving.service import Decoded, Service


def photo(*colour: int) -> Decoded:
    return Decoded((1, 1), Prepared((np.array([[colour]], dtype=np.uint8),), CropBox()))


async def batches_of(requests: list[CaptionRequest], batch_size: int = 6) -> list[list[int]]:
    """The batches in which waiting requests are captioned, as their positions from 1."""
    model = ColourModel()
    service = Service(model, ServeOptions(batch_size=batch_size))  # type: ignore[arg-type]
    model.gate.clear()
    waiting = [
        service.caption_photo("", photo(n, 0, 0), request)
        for n, request in enumerate([CaptionRequest(OWN), *requests])
    ]
    await asyncio.sleep(0)
    model.gate.set()
    for number, captions in enumerate(await asyncio.gather(*waiting)):
        assert captions[0].words[0] == f"{number}-0-0"
    service.close()
    return [[int(colour.partition("-")[0]) for colour in batch] for batch in model.batches[1:]]


async def test_waiting_requests_share_batches():
    """The oldest request determines the options of the next batch; the others keep their place."""
    other = CaptionRequest(SearchOptions(beam_size=1, max_length=6))
    own, more = CaptionRequest(OWN), CaptionRequest(OWN, alternatives=2)
    assert await batches_of([own] * 5, 3) == [[1, 2, 3], [4, 5]]
    requests = [other, own, other, more, own, other, other]
    assert await batches_of(requests, 3) == [[1, 3, 6], [2, 5], [4], [7]]


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
async def test_wider_search_gets_smaller_batches(options, together):
    request = CaptionRequest(replace(OWN, **options))
    batches = await batches_of([request] * 6)
    assert [len(batch) for batch in batches] == [together] * (6 // together)


@pytest.mark.parametrize("words", [(), ("a", "dog")], ids=["searched", "given"])
async def test_methods_share_no_batch_and_costly_ones_get_smaller_batches(words):
    requests = [
        CaptionRequest(None if words else OWN, words, method=method)
        for method in ("attention", "attention_gate", "occlusion")
        for _ in range(2)
    ]
    assert sorted(await batches_of(requests)) == [[1, 2], [3, 4], [5], [6]]


async def test_clients_take_turns():
    """Whoever has used or sent much waits."""
    gate, done = threading.Event(), []
    lane = Lane("test")
    jobs = [lane.submit("many", gate.wait)]
    for client in (*["many"] * 5, "b", "b", "c"):
        number = len(jobs)
        jobs.append(lane.submit(client, lambda n=number, client=client: done.append((client, n))))
    dropped = lane.submit("c", lambda: done.append(("dropped", 0)))
    assert lane.waiting == 9
    dropped.cancel()
    await asyncio.sleep(0.1)
    gate.set()
    await asyncio.gather(*jobs)
    order = [client for client, _ in done]
    assert order == ["b", "c", "b", *["many"] * 5]
    assert [n for client, n in done if client == "many"] == [1, 2, 3, 4, 5]


async def test_each_client_has_a_place_in_a_batch_before_anyone_has_two():
    gate, batches = threading.Event(), []

    def work(jobs):
        assert gate.wait(30)
        batches.append([job.item for job in jobs])
        return batches[-1]

    lane = Lane("test", work, together=lambda _, waiting: list(waiting)[:3])
    sent = ["held", "a1", "a2", "a3", "b1", "c1", "b2"]
    jobs = [lane.submit(one[0], one) for one in sent]
    gate.set()
    await asyncio.gather(*jobs)
    assert batches == [["held"], ["a1", "b1", "c1"], ["a2", "b2", "a3"]]


async def test_jobs_of_a_batch_count_by_their_number_also_after_a_small_one(monkeypatch):
    """Two thirds of a batch are not forgotten for a job that took no time."""
    clock = 0.0
    monkeypatch.setattr(lanes, "time", SimpleNamespace(monotonic=lambda: clock))
    gate, order = threading.Event(), []

    def work(jobs):
        assert gate.wait(30)
        order.extend(job.item for job in jobs)
        return order[-len(jobs) :]

    lane = Lane("test", work, together=lambda _, waiting: list(waiting)[:3])
    first = lane.submit("x", "held")
    batch = [lane.submit(one[0], one) for one in ("a1", "a2", "b1")]
    gate.set()
    await first
    clock = 3.0  # the batch took three seconds
    await asyncio.gather(*batch)
    await lane.submit("a", "a3")
    gate.clear()
    lane._together = lambda first, _: [first]
    rest = [lane.submit(one[0], one) for one in ("x2", "a4", "b2")]
    gate.set()
    await asyncio.gather(*rest)
    assert order[-2:] == ["b2", "a4"]


async def test_error_reaches_only_its_request(model):
    model.broken = ConfigError("no sentence is left to say")
    lane = Lane(
        "test",
        lambda jobs: model.caption_batch([job.item for job in jobs], OWN),
        together=lambda _, waiting: list(waiting),
    )
    model.gate.clear()
    photos = [photo(*colour).prepared for colour in ((0, 0, 0), (1, 0, 0), BAD, (2, 0, 0))]
    _, good, bad, also_good = [lane.submit("", one) for one in photos]

    model.gate.set()

    assert (await good)[0].words[0] == "1-0-0"
    assert (await also_good)[0].words[0] == "2-0-0"
    with pytest.raises(ConfigError, match="no sentence"):
        await bad
    assert len(model.batches[1]) == 3  # tried together first


async def test_close_finishes_running_and_fails_waiting():
    lane, gate = Lane("test"), threading.Event()
    running, waiting = lane.submit("", gate.wait), lane.submit("", gate.wait)

    lane.close()

    with pytest.raises(RequestError, match="shutting down"):
        await waiting
    with pytest.raises(RequestError, match="shutting down"):
        lane.submit("", gate.wait)
    assert not running.done()
    gate.set()
    assert await running


async def test_a_lane_works_where_priorities_are_refused(monkeypatch):
    monkeypatch.setattr("os.setpriority", Mock(side_effect=PermissionError))
    assert await Lane("test", yielding=True).submit("", lambda: 1) == 1
