"""Kills workers and drivers of a job on Ray at random moments, until it is done."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

Driver = subprocess.Popen[str]


class Job:
    """A command that is given again whenever its driver was killed."""

    def __init__(self, arguments: Sequence[object], actor: str, progress: Callable[[], int]):
        """Take the command's arguments, its actors' class, and what counts finished parts."""
        self.arguments, self.actor, self.progress = [*map(str, arguments)], actor, progress
        self.started: list[int] = []
        """Processes that Ray has to end itself."""

    def run(self, victims: Sequence[str], seed: int) -> tuple[int, str]:
        """Kill a ``worker`` or the ``driver``, one after the other; then let the job finish.

        Every other kill comes some parts after the one before, and the others after a random time,
        whatever the job is doing then: starting Ray, loading the model, or restarting a worker.

        Returns:
            Exit code and standard error of the last driver.
        """
        rng = random.Random(seed)
        driver = self._start()
        try:
            for number, victim in enumerate(victims):
                if number % 2:
                    time.sleep(rng.uniform(0, 12))
                else:
                    goal = self.progress() + rng.randint(1, 9)
                    wait_until(lambda goal=goal: self.progress() >= goal, driver)  # type: ignore[misc]
                    time.sleep(rng.uniform(0, 0.3))
                driver = self._kill(driver, victim, rng)
            self.started += descendants(driver.pid)
            err = driver.communicate(timeout=400)[1]
            return driver.returncode, err
        finally:
            if driver.poll() is None:
                driver.send_signal(signal.SIGINT)
                driver.communicate(timeout=60)
            until = time.monotonic() + 180  # Ray's agents notice the driver's end after a minute
            while remaining := [pid for pid in self.started if alive(pid)]:
                assert time.monotonic() < until, remaining
                time.sleep(0.2)

    def _start(self) -> Driver:
        return subprocess.Popen(
            [sys.executable, "-m", "captioner", *self.arguments], stderr=subprocess.PIPE, text=True
        )

    def _kill(self, driver: Driver, victim: str, rng: random.Random) -> Driver:
        """Kill, and restart a driver at once, while its workers may still run."""
        assert driver.poll() is None, "the job was done before the kill"
        if victim == "worker":
            found = wait_until(lambda: self._workers(driver.pid), driver)
            assert found, "the job was done before the kill"
            os.kill(rng.choice(found), signal.SIGKILL)
            return driver
        self.started += descendants(driver.pid)
        driver.kill()
        driver.communicate()
        return self._start()

    def _workers(self, driver: int) -> list[int]:
        """The actors that work, or load what they need."""
        found = []
        for pid in descendants(driver):
            try:
                name = Path(f"/proc/{pid}/cmdline").read_bytes()
            except OSError:
                continue
            if name.startswith(b"ray::") and self.actor.encode() in name:
                found.append(pid)
        return found


def descendants(pid: int) -> list[int]:
    """Processes that a process has started, and theirs."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, IndexError, ValueError):
            continue
        children.setdefault(parent, []).append(int(folder.name))
    found, waiting = [], [pid]
    while waiting:
        new = children.get(waiting.pop(), [])
        found += new
        waiting += new
    return found


def wait_until(condition: Callable[[], Any], driver: Driver) -> Any:
    """Wait for a condition; None if the driver ended before."""
    until = time.monotonic() + 240
    while time.monotonic() < until:
        if found := condition():
            return found
        if driver.poll() is not None:
            return None
        time.sleep(0.02)
    raise AssertionError("timeout")


def alive(pid: int) -> bool:
    """Whether a process runs."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def ten_victims(seed: int) -> list[str]:
    """Five workers and five drivers in random order."""
    victims = ["worker", "driver"] * 5
    random.Random(seed).shuffle(victims)
    return victims
