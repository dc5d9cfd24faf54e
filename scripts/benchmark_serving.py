"""Measure `captioner serve` under parallel uploads beside `captioner caption` on the same photos.

    python scripts/benchmark_serving.py FOLDER_OF_PHOTOS [--photos 400] [--connections 50]

Both run as their users start them, with the model that ships and the same batch size. A round is
the command line over the photos, then the server with the photos coming over parallel connections,
bad files among them (no picture, cut off, too large, an option that cannot be); rounds are
repeated, medians printed. Start-up is left out on both sides: of the command line, time counts
from its first batch on; the server has captioned one before.

Every answer is checked: its status, and its caption against the command line's for the photo. The
server's memory (resident) is told after each quarter of its photos.

The client's own work is in the server's figure: it sends from the same machine.
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
"""Bytes that the server is told to refuse; photos of the usual data sets have less."""


class Upload(NamedTuple):
    """One request and what it must give."""

    body: bytes | Path
    query: str
    status: int
    caption: str | None


class Measured(NamedTuple):
    """A round."""

    photos_a_second: float
    wrong_status: int
    other_caption: int
    memory: list[int]
    """Resident bytes after each quarter."""


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--photos", type=int, default=400, help="good photos a round")
    parser.add_argument("--bad-share", type=float, default=0.2, help="bad files for a good photo")
    parser.add_argument("--connections", type=int, default=50)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()

    photos = list(find_images([options.folder]))[: options.photos]
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
            print(f"round {len(served)}: {rate:6.1f} photos/s alone, {told(served[-1])}")
        batches = metric(port, "captioner_batch_photos_sum") / metric(
            port, "captioner_batch_photos_count"
        )
    rate = statistics.median(one.photos_a_second for one in served)
    print(f"captioner caption: {statistics.median(alone):.1f} photos/s")
    print(f"captioner serve:   {rate:.1f} photos/s, {batches:.1f} a batch")
    sys.exit(any(one.wrong_status for one in served))


def told(one: Measured) -> str:
    """A round on a line."""
    memory = " ".join(f"{size / 2**20:.0f}" for size in one.memory)
    return (
        f"{one.photos_a_second:6.1f} served; wrong status {one.wrong_status}, other caption "
        f"{one.other_caption}; MiB {memory}"
    )


def command_line(photos: Sequence[Path], batch_size: int) -> tuple[float, dict[Path, str]]:
    """Photos a second after the first batch, and the captions."""
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
        raise SystemExit("the command line failed; give a folder of good photos")
    return (len(captions) - batch_size) / (end - start), captions


def mixed(photos: Sequence[Path], captions: dict[Path, str], bad_share: float) -> list[Upload]:
    """Good photos and bad files in a random order, the same every time."""
    first = photos[0].read_bytes()
    kinds = [
        Upload(b"no picture", "", 415, None),
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
    """A server's port and process."""
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
                raise SystemExit(log.read().strip() or "the server ended before it began")
        finally:
            process.terminate()
            process.wait()


def send(
    port: int, process: subprocess.Popen[str], uploads: Sequence[Upload], connections: int
) -> Measured:
    """Send all, and check the answers."""
    lock, waiting = threading.Lock(), iter(uploads)
    done: list[tuple[bool, bool]] = []  # status as it must be, caption as it must be
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
    """Whether the status and the caption are as they must be."""
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
    """One value of /metrics."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("GET", "/metrics")
    text = connection.getresponse().read().decode()
    return float(next(x for x in text.splitlines() if x.startswith(f"{name} ")).split()[1])


def resident(pid: int) -> int:
    """Bytes of a process in memory."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    main()
