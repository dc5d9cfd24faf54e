"""Measure `captioner serve` under parallel uploads beside `captioner caption` on the same photos.

    python scripts/benchmark_serving.py FOLDER_OF_PHOTOS [--photos 400] [--connections 50]

Both run as separate processes with the shipped model and the same batch size. Each round runs the
command line on the photos, then uploads them to the server over parallel connections, mixed with
invalid requests (not an image, truncated, too large, an invalid option). Medians over the rounds
are printed. Startup is excluded: the command line is timed from its first batch on, and the server
is warmed up.

The status of every response is checked, and its caption is compared with the command line's. The
server's resident memory is printed after each quarter of the requests.

The client runs on the same machine, so its work is included in the server's figure.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from captioner.data.folders import find_images

TOO_LARGE = 3 << 20
"""The server's limit in bytes; photos of common data sets are smaller."""


class Upload(NamedTuple):
    """A request and the expected response."""

    body: bytes | Path
    query: str
    status: int
    caption: str | None


class Measured(NamedTuple):
    """The results of a round."""

    photos_per_second: float
    wrong_status: int
    other_caption: int
    memory: list[int]
    """Resident memory in bytes after each quarter."""


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--photos", type=int, default=400, help="valid photos per round")
    parser.add_argument(
        "--bad-share", type=float, default=0.2, help="invalid requests per valid photo"
    )
    parser.add_argument("--connections", type=int, default=50)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()

    photos = find_images([options.folder])[: options.photos]
    if len(photos) < 2 * options.batch_size:
        parser.error(f"{len(photos)} photos; give {2 * options.batch_size} or more")
    alone: list[float] = []
    served: list[Measured] = []
    with server(options.batch_size) as (port, process):
        for _ in range(options.rounds):
            rate, captions = command_line(photos, options.batch_size)
            alone.append(rate)
            uploads = mixed(photos, captions, options.bad_share)
            if not served:
                send(port, process, uploads[: 2 * options.batch_size], options.connections)
            served.append(send(port, process, uploads, options.connections))
            print(f"round {len(served)}: {rate:6.1f} photos/s alone, {summary(served[-1])}")
        batches = metric(port, "captioner_batch_photos_sum") / metric(
            port, "captioner_batch_photos_count"
        )
    rate = statistics.median(one.photos_per_second for one in served)
    print(f"captioner caption: {statistics.median(alone):.1f} photos/s")
    print(f"captioner serve:   {rate:.1f} photos/s, {batches:.1f} per batch")
    sys.exit(any(one.wrong_status for one in served))


def summary(one: Measured) -> str:
    """A round in one line."""
    memory = " ".join(f"{size / 2**20:.0f}" for size in one.memory)
    return (
        f"{one.photos_per_second:6.1f} served; wrong status {one.wrong_status}, other caption "
        f"{one.other_caption}; MiB {memory}"
    )


def command_line(photos: Sequence[Path], batch_size: int) -> tuple[float, dict[Path, str]]:
    """Photos per second after the first batch, and the captions."""
    command = [sys.executable, "-m", "captioner", "caption", "--format", "jsonl"]
    command += ["--batch-size", str(batch_size), *map(str, photos)]
    captions: dict[Path, str] = {}
    start = end = 0.0
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            entry = json.loads(line)
            captions[Path(entry["image"])] = entry["captions"][0]["text"]
            end = time.perf_counter()
            if len(captions) == batch_size:
                start = end
    if process.returncode:
        raise SystemExit("captioner caption failed; give a folder of valid photos")
    return (len(captions) - batch_size) / (end - start), captions


def mixed(photos: Sequence[Path], captions: dict[Path, str], bad_share: float) -> list[Upload]:
    """Valid photos and invalid requests in a fixed random order."""
    first = photos[0].read_bytes()
    kinds = [
        Upload(b"not an image", "", 415, None),
        Upload(first[: len(first) // 2], "", 422, None),
        Upload(bytes(TOO_LARGE + 1), "", 413, None),
        Upload(first, "?beam_size=99", 422, None),
    ]
    uploads = [Upload(photo, "", 200, captions[photo]) for photo in photos]
    uploads += [kinds[n % len(kinds)] for n in range(round(bad_share * len(photos)))]
    random.Random(0).shuffle(uploads)
    return uploads


@contextmanager
def server(batch_size: int) -> Iterator[tuple[int, subprocess.Popen[str]]]:
    """Run a server; yields its port and process."""
    command = [sys.executable, "-m", "captioner", "serve", "--port", "0"]
    command += ["--batch-size", str(batch_size), "--max-bytes", str(TOO_LARGE)]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, stderr=log, text=True)
        try:
            while process.poll() is None:
                log.seek(0)
                if found := re.search(r"http://127.0.0.1:(\d+)", log.read()):
                    yield int(found[1]), process
                    break
                time.sleep(0.1)
            else:
                log.seek(0)
                raise SystemExit(log.read().strip() or "the server exited during startup")
        finally:
            process.terminate()
            process.wait()


def send(
    port: int, process: subprocess.Popen[str], uploads: Sequence[Upload], connections: int
) -> Measured:
    """Send all uploads and check the responses."""
    lock, waiting = threading.Lock(), iter(uploads)
    done: list[tuple[bool, bool]] = []  # whether status and caption are correct
    memory: list[int] = []

    def work() -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
        while True:
            with lock:
                upload = next(waiting, None)
            if upload is None:
                return
            right = check(connection, upload)
            with lock:
                done.append(right)
                if len(done) * 4 // len(uploads) > len(memory):
                    memory.append(resident(process.pid))

    start = time.perf_counter()
    threads = [threading.Thread(target=work) for _ in range(connections)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - start
    good = sum(upload.status == 200 for upload in uploads)
    return Measured(
        good / seconds,
        sum(not status for status, _ in done),
        sum(status and not caption for status, caption in done),
        memory,
    )


def check(connection: http.client.HTTPConnection, upload: Upload) -> tuple[bool, bool]:
    """Whether the status and the caption are correct."""
    body = upload.body.read_bytes() if isinstance(upload.body, Path) else upload.body
    try:
        connection.request("POST", f"/v1/captions{upload.query}", body)
        response = connection.getresponse()
        answer = json.loads(response.read())
    except (OSError, http.client.HTTPException) as error:
        print(f"{type(error).__name__} instead of {upload.status}", file=sys.stderr)
        connection.close()
        return False, False
    if response.status != upload.status:
        print(f"{response.status} instead of {upload.status}: {answer}", file=sys.stderr)
        return False, False
    return True, upload.caption is None or answer["captions"][0]["text"] == upload.caption


def metric(port: int, name: str) -> float:
    """A value of /metrics."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("GET", "/metrics")
    text = connection.getresponse().read().decode()
    return float(next(x for x in text.splitlines() if x.startswith(f"{name} ")).split()[1])


def resident(pid: int) -> int:
    """Resident memory of a process in bytes."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    main()
