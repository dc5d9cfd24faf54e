"""``read_ahead`` and ``read_batches``: order, laziness, errors and threads."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator

import pytest
from tqdm import tqdm

from captioner.data.reading import photo_bar, read_ahead, read_batches
from captioner.errors import ImageError


@pytest.mark.parametrize("threads", [1, 3])
def test_results_keep_their_order_and_items_are_consumed_lazily(threads: int) -> None:
    taken: list[int] = []

    def items() -> Iterator[int]:
        for number in range(9):
            taken.append(number)
            yield number

    results = read_ahead(lambda number: number * number, items(), ahead=2, threads=threads)

    assert taken == []
    for number in range(9):
        assert next(results) == number * number
        assert len(taken) <= number + 2
    with pytest.raises(StopIteration):
        next(results)
    assert list(read_ahead(str, [], ahead=2)) == []


def test_the_next_item_is_read_while_one_is_out() -> None:
    done = [threading.Event() for _ in range(3)]
    results = read_ahead(lambda number: done[number].set() or number, range(3), ahead=2)

    assert next(results) == 0
    assert done[1].wait(5)


def test_an_error_is_raised_in_place_of_its_result() -> None:
    results = read_ahead(lambda number: 6 // number, [3, 2, 0, 1], ahead=4)

    assert [next(results), next(results)] == [2, 3]
    with pytest.raises(ZeroDivisionError):
        next(results)


def test_closing_cancels_calls_and_ends_the_threads() -> None:
    before, calls, go = set(threading.enumerate()), [], threading.Event()

    def wait(number: int) -> int:
        calls.append(number)
        if number:
            go.wait(5)
        return number

    results = read_ahead(wait, range(9), ahead=5)
    next(results)
    go.set()
    results.close()

    assert len(calls) < 9
    assert not set(threading.enumerate()) - before


def test_batches_hold_items_with_their_results_or_image_errors() -> None:
    damaged = ImageError("2.jpg: damaged")

    def read(number: int) -> str:
        if number == 2:
            raise damaged
        return str(number)

    first, second, third = read_batches(read, range(5), 2)
    assert first == [(0, "0"), (1, "1")]
    assert second == [(2, damaged), (3, "3")]
    assert third == [(4, "4")]
    with pytest.raises(ZeroDivisionError):
        next(read_batches(lambda number: 1 // number, [0], 2))


def test_progress_is_a_line_per_minute_if_there_is_no_terminal(monkeypatch, capsys) -> None:
    now = [0.0]
    monkeypatch.setattr("tqdm.std.time", lambda: now[0])
    for _ in photo_bar(range(5), total=5):
        now[0] += 40  # after 80 and 160 seconds, a minute has passed since the last line
        tqdm.write("a warning", file=sys.stderr)
    printed = capsys.readouterr().err.split("a warning\n")
    lines = "".join(printed).splitlines()
    assert [line.split(",")[0] for line in lines] == ["2 of 5 photos", "4 of 5 photos"]
    assert lines[0].endswith("02:00 left")
