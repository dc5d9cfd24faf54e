"""Kills workers and drivers of a job on Ray at random moments, until it is done."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

Driver = subprocess.Popen[str]
Process = tuple[int, int]
"""Process id and start time, since ids are reused."""

# The command, with workers that take at least PART_SECONDS per part until the last kill, and that
# have a file in the folder `busy` during a part.
COMMAND = """
import os, random, sys, time
from importlib import import_module
from pathlib import Path
from captioner.cli.main import main

busy, seconds, name, task = Path(sys.argv[1]), float(sys.argv[2]), *sys.argv[3].split(":")
module = import_module(name)

class Slow(getattr(module, task)):
    def __call__(self, item):
        mark = busy / str(os.getpid())
        mark.touch()
        pause = seconds if busy.with_name("slow").exists() else 0
        before = random.uniform(0, pause)
        time.sleep(before)
        found = super().__call__(item)
        time.sleep(pause - before)
        mark.unlink()
        return found

run = module.run_on_cluster
module.run_on_cluster = lambda task, *a, **k: run(Slow(**vars(task)), *a, **k)
sys.exit(main(sys.argv[4:]))
"""
PART_SECONDS = 0.2
LONGEST_PAUSE = 8.0
"""Longest random time before a kill (seconds)."""


class Job:
    """A command that is given again whenever its driver was killed.

    Args:
        arguments: The command's.
        task: Class of what its workers do, as ``module:name``.
        progress: Counts finished parts.
        folder: An empty folder for this class.
    """

    def __init__(
        self,
        arguments: Sequence[object],
        task: str,
        progress: Callable[[], int],
        folder: Path,
    ) -> None:
        self.progress = progress
        self.busy, self.slow = folder / "busy", folder / "slow"
        self.busy.mkdir(parents=True)
        self.command = [sys.executable, "-c", COMMAND, self.busy, PART_SECONDS, task, *arguments]
        self.started: set[Process] = set()
        """Processes of Ray that were started by drivers that were killed."""

    def run(self, victims: Sequence[str], seed: int) -> tuple[int, str]:
        """Kill a ``worker`` or the ``driver``, one after the other; then let the job finish.

        Every other kill comes some parts after the one before, while a worker is at a part. The
        others come after a random time, whatever the job is doing then: starting Ray, loading the
        model, restarting a worker, or a part.

        Returns:
            Exit code and standard error of the last driver.
        """
        rng = random.Random(seed)
        self.slow.touch()
        driver = self._start()
        try:
            for number, victim in enumerate(victims):
                if number % 2:
                    time.sleep(rng.uniform(0, LONGEST_PAUSE))
                else:
                    goal = self.progress() + rng.randint(1, 9)
                    wait_until(lambda goal=goal: self.progress() >= goal, driver)  # type: ignore[misc]
                    time.sleep(rng.uniform(0, PART_SECONDS))
                driver = self._kill(driver, victim, rng, during_a_part=number % 2 == 0)
            self.slow.unlink()
            err = driver.communicate(timeout=200)[1]
            return driver.returncode, err
        finally:
            self.started |= descendants(driver.pid)
            driver.kill()
            driver.communicate()
            # Without a driver Ray's processes end by themselves, some of them only after a minute.
            for process in self.started:
                send(process, signal.SIGKILL)

    def _start(self) -> Driver:
        return subprocess.Popen([*map(str, self.command)], stderr=subprocess.PIPE, text=True)

    def _kill(
        self, driver: Driver, victim: str, rng: random.Random, *, during_a_part: bool
    ) -> Driver:
        """Kill, and restart a driver at once, while its workers may still run."""
        frozen = self._freeze(driver) if during_a_part else []
        if victim == "worker":
            found = frozen or wait_until(lambda: self._workers(driver), driver)
            send(rng.choice(found), signal.SIGKILL)
        else:
            self.started |= descendants(driver.pid)
            driver.kill()
            driver.communicate()
            assert driver.returncode == -signal.SIGKILL, "the job was done before the kill"
        for process in frozen:
            send(process, signal.SIGCONT)
        assert driver.poll() in (None, -signal.SIGKILL), "the job was done before the kill"
        return driver if victim == "worker" else self._start()

    def _freeze(self, driver: Driver) -> list[Process]:
        """Stop the workers at a moment when one is at a part; return those that are."""
        return wait_until(lambda: self._stopped(driver), driver)  # type: ignore[no-any-return]

    def _stopped(self, driver: Driver) -> list[Process]:
        for process in self._workers(driver):
            send(process, signal.SIGSTOP)
            if (self.busy / str(process[0])).exists():
                return [process]
            send(process, signal.SIGCONT)
        return []

    def _workers(self, driver: Driver) -> list[Process]:
        """The processes that work, or load what they need."""
        found = []
        for process in descendants(driver.pid):
            try:
                name = Path(f"/proc/{process[0]}/cmdline").read_bytes()
            except OSError:
                continue
            if name.startswith(b"ray::") and b"Slow" in name and alive(process):
                found.append(process)
        return found


def descendants(pid: int) -> set[Process]:
    """Processes that a process has started, and theirs."""
    children: dict[int, list[Process]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        if fields := stat(int(folder.name)):
            children.setdefault(int(fields[1]), []).append((int(folder.name), int(fields[19])))
    found, waiting = set(), [pid]
    while waiting:
        new = children.get(waiting.pop(), [])
        found.update(new)
        waiting += [child for child, _ in new]
    return found


def stat(pid: int) -> list[str]:
    """Fields of ``/proc/PID/stat`` after the name; empty if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def wait_until(condition: Callable[[], Any], driver: Driver) -> Any:
    """Wait for a condition while the driver runs."""
    until = time.monotonic() + 200
    while not (found := condition()):
        assert driver.poll() is None, "the job was done before the kill"
        assert time.monotonic() < until, "timeout"
        time.sleep(0.02)
    return found


def send(process: Process, number: signal.Signals) -> None:
    """Send a signal to a process, if it still runs."""
    if alive(process):
        with suppress(ProcessLookupError):
            os.kill(process[0], number)


def alive(process: Process) -> bool:
    """Whether a process runs."""
    fields = stat(process[0])
    return bool(fields) and int(fields[19]) == process[1] and fields[0] != "Z"
