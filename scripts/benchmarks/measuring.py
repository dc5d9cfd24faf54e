"""Functions that the benchmarks share: paired rounds, ratios, peak memory and tables.

A job is a function to measure. In each round, all jobs run one after another in one process. The
order rotates from round to round, so other programs on the machine affect all jobs equally. Ratios
compare jobs in the same round, and medians are taken over the rounds.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

Times = dict[str, list[float]]
"""Seconds that each job took in each round, by the name of the job."""
Rows = dict[str, dict[str, float | str | None]]
"""A table: values by the name of their row, then by the name of their column."""


def parser(description: str) -> argparse.ArgumentParser:
    """Return a parser with the options that benchmarks share.

    ``description`` is the benchmark's docstring. The help shows its first line.
    """
    made = argparse.ArgumentParser(description=description.splitlines()[0])
    made.add_argument("--rounds", type=int, default=5, help="number of measured rounds")
    made.add_argument(
        "--processor-time",
        action="store_true",
        help="measure processor time, for use on a busy machine (needs OMP_NUM_THREADS=1)",
    )
    return made


def clock(options: argparse.Namespace) -> Callable[[], float]:
    """Return the clock for `measure`, a function that returns the time in seconds.

    With ``--processor-time``, the clock counts the processor time of this process. Other programs
    affect processor time less than real time.
    """
    return time.process_time if options.processor_time else time.perf_counter


def measure(
    jobs: Mapping[str, Callable[[], object]],
    rounds: int,
    *,
    clock: Callable[[], float] = time.perf_counter,
    wait: Callable[[], object] = lambda: None,
) -> Times:
    """Run the jobs in rounds, and return their times.

    Args:
        jobs: The functions to measure, by name.
        rounds: Number of measured rounds. One warm-up round comes before them.
        clock: Function that returns the time in seconds.
        wait: Function to call after each job, which waits for the results of a device.
    """
    times: Times = {name: [] for name in jobs}
    names = list(jobs)
    for number in range(-1, rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            started = clock()
            jobs[name]()
            wait()
            if number >= 0:
                times[name].append(clock() - started)
    return times


def ratios(times: Times, name: str, base: str) -> list[float]:
    """Return the speed of the job ``name`` relative to the job ``base``, for each round.

    2 means that the job is twice as fast as ``base``.
    """
    return [b / a for a, b in zip(times[name], times[base], strict=True)]


def in_child(script: str, *arguments: object) -> Any:
    """Run a script in a separate process, and return the JSON value in its last line of output."""
    command = [sys.executable, script, *map(str, arguments)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def peak() -> float:
    """Return the peak memory of this process in MB.

    The value comes from /proc, because getrusage also counts the memory of the parent process.
    """
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(x.split()[1]) for x in lines if x.startswith("VmHWM")) * 1024 / 1e6


def print_table(first: str, rows: Rows) -> None:
    """Print rows of figures as a Markdown table. ``first`` is the heading of the first column."""
    columns = list(dict.fromkeys(column for row in rows.values() for column in row))
    print(f"| {' | '.join([first, *columns])} |\n{'|---' * (len(columns) + 1)}|")
    for name, row in rows.items():
        print(f"| {' | '.join([name, *(_shown(row.get(column)) for column in columns)])} |")


def _shown(value: float | str | None) -> str:
    """Format a cell. Numbers have three significant digits or more. None becomes an empty cell."""
    if value is None or isinstance(value, str):
        return value or ""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
