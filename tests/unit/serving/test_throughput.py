"""Retry-After: simulated servers with a clock of their own."""

from __future__ import annotations

import heapq
import itertools

import pytest

from captioner.serving.throughput import MAX_WAIT, Throughput


class Simulation:
    """A server with ``slots`` that completes a full ``batch`` in ``seconds``.

    A small batch takes a little longer per request than a full one.
    """

    def __init__(self, slots: int, batch: int, seconds: float) -> None:
        self.now = 0.0
        self.throughput = Throughput(clock=lambda: self.now)
        self.slots, self.batch, self.seconds = slots, batch, seconds

    def run(self, clients: int) -> tuple[list[int], list[float]]:
        """Attempts and end of each client; all start at once and wait as asked."""
        order = itertools.count()
        events = [(self.now, next(order), "arrive", client) for client in range(clients)]
        attempts, ends = [0] * clients, [0.0] * clients
        waiting: list[int] = []
        busy, in_flight = False, 0
        while events:
            self.now, _, kind, what = heapq.heappop(events)
            if kind == "arrive":
                attempts[what] += 1
                if in_flight >= self.slots:
                    wait = self.throughput.retry_after()
                    heapq.heappush(events, (self.now + wait, next(order), "arrive", what))
                    continue
                in_flight += 1
                self.throughput.start()
                waiting.append(what)
            else:
                for client in what:
                    ends[client] = self.now
                    self.throughput.end()
                in_flight -= len(what)
                busy = False
            if waiting and not busy:
                batch, waiting = waiting[: self.batch], waiting[self.batch :]
                busy = True
                seconds = self.seconds * (0.3 + 0.7 * len(batch) / self.batch)
                heapq.heappush(events, (self.now + seconds, next(order), "done", batch))
        return attempts, ends


@pytest.mark.parametrize("batch", [1, 4, 16])
@pytest.mark.parametrize("rate", [0.5, 3.0, 40.0])  # requests per second
def test_clients_that_wait_as_asked_are_accepted_soon(batch, rate):
    """Nearly all on their first return, and the server is not left idle."""
    server = Simulation(slots=32, batch=batch, seconds=batch / rate)
    server.run(64)  # measures
    start = server.now

    attempts, ends = server.run(132)

    assert sum(attempts) / len(attempts) < 2.2
    assert max(attempts) <= 6
    ideal = 132 / rate
    assert max(ends) - start < 2 * ideal + batch / rate + 3  # Retry-After has whole seconds


def test_first_guess_is_a_second():
    assert Throughput(clock=lambda: 0.0).retry_after() == 1


def test_idle_time_does_not_count():
    now = 0.0
    throughput = Throughput(clock=lambda: now)
    for _ in range(10):
        throughput.start()
        now += 2
        throughput.end()
        now += 1000
    assert throughput.next_slot() == 4  # 2 per request and a gap of 2


def test_clients_that_do_not_wait_do_not_raise_it_forever():
    throughput = Throughput(clock=lambda: 0.0)
    waits = [throughput.retry_after() for _ in range(5 * MAX_WAIT)]
    assert max(waits) <= MAX_WAIT
    assert min(waits[MAX_WAIT:]) < 5
