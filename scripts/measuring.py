"""Shared by the benchmarks: paired rounds, medians, peak memory, tables and stored runs.

    times = measure({"ours": step, "textbook": other}, rounds=5)
    report = Report("training", "step")
    report.add("ours", {"captions/s": 160 / median(times["ours"])}, seconds=times["ours"])
    report.finish(options)           # prints the table; --json and --compare

The jobs of a round run one after another in one process, in rotating order, so that other load on
the machine affects all of them. Ratios are taken within a round; medians are over the rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

Times = dict[str, list[float]]
"""Seconds of each job in each round."""


def measure(
    jobs: Mapping[str, Callable[[], object]],
    rounds: int,
    *,
    warm_up: bool = True,
    clock: Callable[[], float] = time.perf_counter,
    wait: Callable[[], object] = lambda: None,
) -> Times:
    """Run the jobs in rounds.

    Args:
        jobs: Jobs by name.
        rounds: Number of rounds, excluding the warm-up.
        warm_up: Run every job once first.
        clock: ``time.process_time`` counts the processor time of all threads, which other programs
            change less.
        wait: Called after each job; waits for a device.
    """
    times: Times = {name: [] for name in jobs}
    names = list(jobs)
    for number in range(-1 if warm_up else 0, rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            started = clock()
            jobs[name]()
            wait()
            if number >= 0:
                times[name].append(clock() - started)
    return times


def median(values: Sequence[float]) -> float:
    """The median over rounds."""
    return statistics.median(values)


def ratio(times: Times, name: str, base: str, counts: Mapping[str, int] | None = None) -> float:
    """Speed of a job relative to ``base``: the median over rounds of the ratio within a round.

    Args:
        times: From `measure`.
        name: The job.
        base: The job to compare with.
        counts: Number of items that each job processes; None: equal for all.
    """
    share = 1.0 if counts is None else counts[name] / counts[base]
    return share * median([b / a for a, b in zip(times[name], times[base], strict=True)])


def in_child(script: str, *arguments: object) -> Any:
    """Run a script in a separate process; return the JSON in its last line."""
    command = [sys.executable, script, *map(str, arguments)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def peak_memory() -> float:
    """Peak memory of this process in MB; does not import torch."""
    status = Path("/proc/self/status")
    if status.exists():  # the maximum of getrusage is inherited from the parent process
        line = next(x for x in status.read_text().splitlines() if x.startswith("VmHWM"))
        return int(line.split()[1]) * 1024 / 1e6
    import resource  # unavailable on Windows

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6


def machine(device: str = "cpu") -> dict[str, Any]:
    """Properties of the machine that must match for two runs to be comparable."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        lines = cpuinfo.read_text().splitlines()
        model = next((x.split(": ", 1)[1] for x in lines if x.startswith("model name")), model)
    import torch

    return {
        "processor": model,
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
        "device": torch.cuda.get_device_name() if device == "cuda" else device,
        "torch": torch.__version__,
    }


def clock(options: argparse.Namespace) -> Callable[[], float]:
    """What `measure` reads, by ``--processor-time``."""
    return time.process_time if options.processor_time else time.perf_counter


def add_arguments(parser: argparse.ArgumentParser, *, rounds: int | None = None) -> None:
    """The options that all benchmarks have; see `Report.finish`."""
    if rounds is not None:
        parser.add_argument("--rounds", type=int, default=rounds)
        parser.add_argument(
            "--processor-time", action="store_true", help="for a busy machine; with one thread"
        )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures")
    parser.add_argument(
        "--compare", type=Path, metavar="FILE", help="compare with figures of this machine"
    )


class Report:
    """Figures of a benchmark by row and column."""

    def __init__(self, benchmark: str, first: str, device: str = "cpu") -> None:
        """Start a report.

        Args:
            benchmark: Name of the benchmark.
            first: Heading of the names of the rows.
            device: What it runs on, for comparisons.
        """
        self.benchmark, self.first, self.device = benchmark, first, device
        self.rows: dict[str, dict[str, float]] = {}
        self.seconds: dict[str, list[float]] = {}

    def add(
        self, name: str, figures: Mapping[str, float | None], seconds: Sequence[float] = ()
    ) -> None:
        """Add a row; figures that are None are omitted."""
        self.rows[name] = {key: value for key, value in figures.items() if value is not None}
        if seconds:
            self.seconds[name] = list(seconds)

    def table(self, rows: Mapping[str, Mapping[str, float]] | None = None) -> str:
        """A Markdown table."""
        rows = self.rows if rows is None else rows
        columns = list(dict.fromkeys(column for row in rows.values() for column in row))
        lines = [f"| {' | '.join([self.first, *columns])} |", "|---" * (len(columns) + 1) + "|"]
        for name, row in rows.items():
            cells = [_shown(row[column]) if column in row else "" for column in columns]
            lines.append(f"| {' | '.join([name, *cells])} |")
        return "\n".join(lines)

    def finish(self, options: argparse.Namespace) -> None:
        """Print the table, write ``--json`` and compare with ``--compare``."""
        print(f"\n{self.table()}", flush=True)
        content = {
            "benchmark": self.benchmark,
            "machine": machine(self.device),
            "rows": self.rows,
            "seconds": self.seconds,
        }
        if options.compare:
            print(f"\ntimes the figures of {options.compare}:\n")
            print(self._compared(options.compare, content))
        if options.json:
            options.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")

    def _compared(self, path: Path, content: dict[str, Any]) -> str:
        stored = json.loads(path.read_text(encoding="utf-8"))
        for key in ("benchmark", "machine"):
            if stored.get(key) != content[key]:
                raise SystemExit(
                    f"{path} has {key} {stored.get(key)}, this run {content[key]}; "
                    "compare runs of one benchmark on one machine"
                )
        return self.table(
            {
                name: {
                    column: value / stored["rows"][name][column]
                    for column, value in row.items()
                    if stored["rows"].get(name, {}).get(column)
                }
                for name, row in self.rows.items()
            }
        )


def _shown(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
