"""Which requests share a batch, which client has its turn, and which response a request gets."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
from colour_server import BAD, OWN, ColourModel

from captioner.caption_types import CropBox
from captioner.errors import ConfigError
from captioner.inference.engine import Prepared
from captioner.options import SearchOptions
from captioner.serving import lanes
from captioner.serving.lanes import Job, Lane
from captioner.serving.options import ServeOptions
from captioner.serving.request_errors import RequestError
from captioner.serving.requests import CaptionRequest
from captioner.serving.service import Decoded, Service


def photo(*colour: int) -> Decoded:
    return Decoded((1, 1), Prepared((np.array([[colour]], dtype=np.uint8),), CropBox()))


async def batches_of(requests: list[CaptionRequest], batch_size: int = 6) -> list[list[int]]:
    """Return the batches of waiting requests, as positions counted from 1."""
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
    """The oldest request determines the options of the next batch. All others keep their place."""
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


class Gated:
    """A lane that waits for a gate. The first letter of an item is its client."""

    def __init__(self, most: int) -> None:
        self.most, self.gate, self.batches = most, threading.Event(), []
        self.lane = Lane("test", self._work, together=lambda _, jobs: list(jobs)[: self.most])

    def _work(self, jobs: Sequence[Job]) -> list[str]:
        assert self.gate.wait(30)
        self.batches.append([job.item for job in jobs])
        return self.batches[-1]

    def submit(self, *items: str) -> list[asyncio.Future[str]]:
        return [self.lane.submit(item[0], item) for item in items]


async def test_clients_take_turns():
    """A client that has used or sent much waits longer."""
    gated = Gated(1)
    jobs = gated.submit("m0", "m1", "m2", "m3", "m4", "m5", "b1", "b2", "c1")
    [dropped] = gated.submit("c2")
    assert gated.lane.waiting == 9
    dropped.cancel()
    await asyncio.sleep(0.1)
    gated.gate.set()
    await asyncio.gather(*jobs)
    order = ["m0", "b1", "c1", "b2", "m1", "m2", "m3", "m4", "m5"]
    assert gated.batches == [[item] for item in order]


async def test_each_client_has_a_place_in_a_batch_before_anyone_has_two():
    gated = Gated(3)
    jobs = gated.submit("held", "a1", "a2", "a3", "b1", "c1", "b2")
    gated.gate.set()
    await asyncio.gather(*jobs)
    assert gated.batches == [["held"], ["a1", "b1", "c1"], ["a2", "b2", "a3"]]


async def test_jobs_of_a_batch_count_by_their_number_also_after_a_small_one(monkeypatch):
    """A job that took no time does not make the lane forget two thirds of a batch."""
    clock = 0.0
    monkeypatch.setattr(lanes, "time", SimpleNamespace(monotonic=lambda: clock))
    gated = Gated(3)
    [first] = gated.submit("x1")
    batch = gated.submit("a1", "a2", "b1")
    gated.gate.set()
    await first
    clock = 3.0  # the batch took three seconds
    await asyncio.gather(*batch)
    await asyncio.gather(*gated.submit("a3"))
    gated.gate.clear()
    gated.most = 1
    rest = gated.submit("x2", "a4", "b2")
    gated.gate.set()
    await asyncio.gather(*rest)
    assert gated.batches[-2:] == [["b2"], ["a4"]]


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
