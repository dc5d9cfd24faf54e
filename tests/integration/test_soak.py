"""The soak script, for a short time; and 100 clients that wait as they are asked to."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from test_serve import GOOD, serve  # noqa: F401  (a fixture)

from captioner.serving.client import Client


@pytest.mark.stress
def test_soak(tiny):
    script = Path(__file__).parents[2] / "scripts" / "benchmarks" / "soak_serving.py"
    command = [sys.executable, str(script), "--seconds", "60", "--model", str(tiny.model)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.stress
def test_hundred_clients_that_honour_retry_after_lose_no_photo(serve):  # noqa: F811
    server = serve("--max-queue", "8", "--batch-size", "4")
    photos = [GOOD[number % len(GOOD)] for number in range(100)]

    with Client(server.url, retry_for=600, trust_env=False) as client:
        alone = [client.caption(photo).text for photo in GOOD]
        results = list(client.stream(photos, parallel=100))

    assert [result.error for result in results] == [None] * 100
    texts = [result.captions.text for result in results]
    assert texts == [alone[number % len(GOOD)] for number in range(100)]
    _, err = server.stop(15)
    assert " 429 " in err  # the queue was full
