"""Stress a server with valid, corrupt, oversized, slow and hostile requests from 100 clients.

    python scripts/benchmarks/soak_serving.py --seconds 900 --model MODEL

The script starts `captioner serve`, restarts it with SIGTERM halfway, and checks that

- every request is answered with a status that is allowed for its kind;
- every valid photo gets its own caption;
- every photo that was accepted before SIGTERM gets its caption;
- every response in the server's log reaches its client;
- resident memory and open descriptors do not grow.

With ``--attackers 40``, 40 further clients with eight addresses try to block the server. They send
files that are hard to decode (scans, pixels, JSON of 1 to 330 MB), and ask for costly searches and
maps. At the same time, four ordinary clients send one photo after another. The script then checks
that 99% of the ordinary requests are answered within `ORDINARY` seconds, and that the server never
uses more than `MEMORY` MiB.

It prints the memory use, and the number of requests by kind and status. If a check fails, the exit
code is 1.
"""

from __future__ import annotations

import argparse
import base64
import json
import random
import secrets
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from datetime import datetime, timedelta, timezone
from functools import cache, partial
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

import httpx
import numpy as np
import psutil
from PIL import Image

from captioner.drawing.picture_files import encoded

MAX_BYTES = 200_000
"""Largest size of an upload that the server accepts (--max-bytes)."""
TIMEOUT = 10
"""Seconds after which the server gives up on a slow request (--timeout)."""
PATIENCE = 120
"""Seconds that a client waits for a response."""
BUSY = {429, 503}
"""Statuses with which a busy server may always reject a request."""
CLOSING = "shutting down"
"""Part of the error message after SIGTERM."""
VALID = "valid"
"""The kind of request that uploads a valid photo."""
CLIENTS = 100
"""Number of clients, without attackers."""
SAMPLES = 12
"""Number of measurements of memory and descriptors. The restart is after half of them."""
GROWTH = 1.1
"""Maximum factor by which memory may grow before the restart, and again after it."""
MEMORY = 2000_000_000 >> 20
"""Maximum memory of the server under attack (MiB)."""
ORDINARY = 2.0
"""Seconds within which 99 of 100 ordinary requests must be answered under attack."""
WARM_UP = 20
"""Seconds of attack before ordinary clients start. In this time, the server loads torch and
matplotlib."""
ATTACKING = [f"127.0.1.{number}" for number in range(1, 9)]
"""Addresses of the attackers."""


class Request(NamedTuple):
    """A request that a client sends over a new connection."""

    kind: str
    """Name of the kind in the results, such as ``corrupt``."""
    allowed: set[int]
    """Statuses that are allowed in addition to `BUSY`. 0: the connection was closed without a
    response."""
    parts: Sequence[bytes]
    """The bytes to send, in parts that are sent one after another."""
    photos: Sequence[int | None] = ()
    """Numbers of the photos in the request, with None in place of each broken photo."""
    id: str = ""
    """Id by which the response is found in the server's log, or empty if it is not checked."""
    pause: float = 0.0
    """Seconds between the parts of the request."""
    leaves: bool = False
    """Whether the client disconnects before the response."""


class Response(NamedTuple):
    """A response, or status 0 if the connection was closed without a response."""

    status: int
    body: str = ""


# --- kinds of requests ---------------------------------------------------------------------------


def photo(number: int) -> bytes:
    """Return a PNG file of noise with a colour that depends on the number."""
    noise = np.random.default_rng(number).integers(256, size=(48, 64, 3), dtype=np.uint8)
    colour = np.array([number % 2, number // 2 % 2, number // 4 % 2], dtype=np.uint8)
    return encoded(Image.fromarray(noise * colour), "PNG")


PHOTOS = [photo(number) for number in range(1, 8)]
"""Valid photos. Their captions should differ, so that a mix-up is noticed."""


def upload(path: str, headers: dict[str, str] | None = None, **content: Any) -> list[bytes]:
    """Return the head and the body of a POST request, as bytes.

    Args:
        path: Path of the endpoint below ``/v1/``.
        headers: Headers of the request.
        **content: Arguments of ``httpx.Request`` that make the body, such as ``json``.
    """
    request = httpx.Request("POST", f"http://localhost/v1/{path}", headers=headers, **content)
    lines = [b"POST %s HTTP/1.1" % request.url.raw_path]
    lines += [b"%s: %s" % header for header in request.headers.raw]
    return [b"\r\n".join([*lines, b"", b""]), request.read()]


def upload_photo(chance: random.Random, file: bytes, request_id: str = "") -> list[bytes]:
    """Return a request with a photo, in a random format that the server accepts.

    The formats are the file itself, a form, and JSON with Base64.
    """
    text = base64.b64encode(file).decode()
    forms = [{"content": file}, {"files": {"image": file}}, {"json": {"image": text}}]
    return upload("captions", {"X-Request-Id": request_id}, **chance.choice(forms))


SLOWLY = [b"x"] * (3 * TIMEOUT)
"""Parts of a body that takes too long if they are sent half a second apart."""
KINDS = {
    VALID: 65, "batch": 6, "overlay": 1, "corrupt": 8, "oversized": 4, "slow body": 1,
    "slow headers": 1, "wrong length": 4, "bad chunks": 4, "leaving": 5,
}  # fmt: skip
"""How often each kind of request is sent, relative to the others."""


def request_of(kind: str, chance: random.Random) -> Request:
    """Return a random request of this kind (see `KINDS`)."""
    one, two = chance.choices(range(len(PHOTOS)), k=2)
    file, id_ = PHOTOS[one], secrets.token_hex(8)
    head, body = upload("captions", content=file)
    photos = [("images", each) for each in (file, b"no photo", PHOTOS[two])]
    batch = upload("batch", {"Accept": "application/x-ndjson"}, files=photos)
    broken = chance.choice([b"no photo", file[:-300], b"%PDF-1.7"])
    large = b"x" * (MAX_BYTES + 1 + chance.randrange(MAX_BYTES))
    length = {"Content-Length": chance.choice(["-1", "x", "1e3", "9" * 30, "5, 6"])}
    chunked = upload("captions", {"Transfer-Encoding": "chunked"})[0]
    chunk = chance.choice([b"zz\r\nabc\r\n", b"-5\r\nabc\r\n", b"3\r\nabcdef\r\n", b"\0\r\n"])
    half = body[: chance.randrange(len(body) + 1)]
    return {
        VALID: Request(kind, {200}, upload_photo(chance, file, id_), [one], id_),
        "batch": Request(kind, {200}, batch, [one, None, two]),
        "overlay": Request(kind, {200}, upload("overlay.svg", content=file)),
        "corrupt": Request(kind, {415, 422}, upload_photo(chance, broken)),
        "oversized": Request(kind, {413}, upload("captions", content=large)),
        "slow body": Request(kind, {408}, [head, *SLOWLY], pause=0.5),
        "slow headers": Request(kind, {0}, [b"POST / HTTP/1.1\r\nX: ", *SLOWLY], pause=0.5),
        "wrong length": Request(kind, {400, 413}, upload("captions", length)[:1]),
        "bad chunks": Request(kind, {400, 499}, [chunked, chunk]),
        "leaving": Request(kind, {0}, [head, half], pause=0.02, leaves=True),
    }[kind]


def mixed(chance: random.Random) -> Request:
    """Return a random request of a randomly chosen kind."""
    [kind] = chance.choices(list(KINDS), list(KINDS.values()))
    return request_of(kind, chance)


def scans(repeats: int) -> bytes:
    """Return a progressive JPEG with its last scan repeated, which takes long to decode."""
    image = Image.new("RGB", (4000, 3000), (9, 99, 9))
    data = encoded(image, "JPEG", progressive=True, quality=30)
    start = data.rindex(b"\xff\xda")
    return data[:-2] + data[start:-2] * repeats + data[-2:]


@cache
def bombs() -> list[bytes]:
    """Return files that take a lot of time or memory to decode."""
    sizes = ((23_900, 1000), (11_000, 10_000), (60_000, 20))
    return [scans(2000), scans(90), *(encoded(Image.new("L", size), "PNG") for size in sizes)]


# Requests for the slowest searches and maps that the server allows, or that it rejects as too slow.
COSTLY = [
    "captions?beam_size=20&num_captions=20&max_length=50&min_length=49&attention=true&method=occlusion",
    "captions?beam_size=4&num_captions=4&max_length=50&min_length=49&attention=true&method=occlusion",
    "captions?beam_size=4&num_captions=4&max_length=50&min_length=49&attention=true&method=grad_cam",
    "captions?beam_size=20&num_captions=20&max_length=50&min_length=49&forced_words=a,dog,man,on,of",
    "overlay.png?beam_size=5&num_captions=5&max_length=50&min_length=20&panel_size=640",
    "overlay.html?beam_size=3&num_captions=3&method=occlusion",
]


BODIES = {  # JSON bodies: beginning, repeated part, end
    "lists": (b'{"images":[', b"[],", b"[]]}"),
    "objects": (b'{"messages":[', b'{"a":0},', b"0]}"),
    "depth": (b"", b"[", b""),
    "digits": (b'{"image":', b"9", b"}"),
    "letters": (b'{"images":["', b"A", b'"]}'),
    "escapes": (b'{"image":"', b"\\u0041", b'"}'),
    "quotes": (b'{"prompt":"', b'\\"', b'"}'),
    "photos": (b'{"images":["', b"A" * (39 << 20) + b'","', b'"]}'),
}
PATHS = ("/v1/batch", "/v1/captions", "/api/generate", "/api/chat", "/v1/chat/completions")
"""Endpoints that accept JSON."""


@cache
def repeated(name: str) -> bytes:
    """Return about a megabyte of the repeated part of a JSON body (see `BODIES`)."""
    part = BODIES[name][1]
    return part * max(1, 1_000_000 // len(part))


def json_body(chance: random.Random) -> Request:
    """Return a JSON request of 1 to 330 MB that a parser would expand up to 20 times."""
    name = chance.choice(list(BODIES))
    start, _, end = BODIES[name]
    part = repeated(name)
    count = max(1, chance.choice((1, 5, 20, 41, 100, 330)) * 1_000_000 // len(part))
    length = len(start) + count * len(part) + len(end)
    head = f"POST {chance.choice(PATHS)} HTTP/1.1\r\nHost: localhost\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {length}\r\n\r\n"
    return Request(
        "JSON", {0, 200, 400, 408, 413, 415, 422}, [head.encode() + start, *[part] * count, end]
    )


def attack(chance: random.Random) -> Request:
    """Return a request that takes as much time or memory as the server allows."""
    kind = chance.random()
    if kind < 1 / 3:
        return json_body(chance)
    if kind < 2 / 3:
        bomb = upload("captions", content=chance.choice(bombs()))
        return Request("attack", {0, 200, 413, 422}, bomb)
    costly = upload(chance.choice(COSTLY), content=chance.choice(PHOTOS))
    return Request("attack", {0, 200, 422}, costly)


# --- clients -------------------------------------------------------------------------------------


def send(port: int, request: Request, address: str) -> Response:
    """Send a request part by part over a new connection, until the response arrives.

    Args:
        port: Port of the server.
        request: The request.
        address: Address of the client.

    Raises:
        TimeoutError: No response arrived within `PATIENCE` seconds.
    """
    with suppress(ConnectionError, HTTPException):
        server = ("127.0.0.1", port)
        with socket.create_connection(server, PATIENCE, (address, 0)) as connection:
            with suppress(ConnectionError):  # the server may respond before all parts are sent
                for part in request.parts:
                    connection.sendall(part)
                    if select.select([connection], [], [], request.pause)[0]:
                        break
            if not request.leaves:
                response = HTTPResponse(connection)
                response.begin()
                return Response(response.status, response.read().decode(errors="replace"))
    return Response(0)


class Soak:
    """The state of all clients, and the problems that they have found."""

    def __init__(self, port: int, seconds: float) -> None:
        self.port = port
        self.end = time.monotonic() + seconds
        """Time at which the clients stop."""
        self.lock = Lock()
        self.captions: dict[int, str] = {}
        """The first caption of each photo, by the photo's number."""
        self.counts: Counter[tuple[str, str]] = Counter()
        """Number of responses by kind of request and status."""
        self.wrong: Counter[str] = Counter()
        """Number of times that each problem was found."""
        self.waited: list[float] = []
        """Duration of each valid request in seconds."""
        self.received: dict[str, Response] = {}
        """Responses to the requests that have an id."""
        self.restarting = False
        """True while the server restarts. Then it may close connections without a response."""

    def client(
        self,
        make: Callable[[random.Random], Request],
        seed: int,
        address: str = "127.0.0.1",
        pause: float | None = None,
    ) -> None:
        """Send requests until the end.

        Args:
            make: Function that makes a random request.
            seed: Seed of the random requests.
            address: Address of this client.
            pause: Seconds between requests, or None to pause only if the server is busy.
        """
        chance = random.Random(seed)
        while self.restarting or time.monotonic() < self.end:
            request, start = make(chance), time.monotonic()
            try:
                response = send(self.port, request, address)
            except TimeoutError:
                response = Response(-1)
            with self.lock:
                self.check(request, response)
                if request.kind == VALID:
                    self.waited.append(time.monotonic() - start)
            if pause is not None:
                time.sleep(pause)
            elif response.status in BUSY or self.restarting:
                time.sleep(chance.uniform(0, 1))

    def check(self, request: Request, response: Response) -> None:
        """Count a response and check its status and captions."""
        kind, status = request.kind, response.status
        self.counts[kind, str(status or "closed")] += 1
        if request.id:
            self.received[request.id] = response
        if status not in request.allowed | BUSY and not (status == 0 and self.restarting):
            self.wrong[f"{kind}: status {status}"] += 1
        if status != 200 or not request.photos:
            return
        results = [{"status": 200, **json.loads(line)} for line in response.body.splitlines()]
        if len(results) != len(request.photos):
            self.wrong[f"{kind}: {len(results)} results"] += 1
        for result, number in zip(results, request.photos, strict=False):
            if result["status"] == 200 and number is not None:
                caption = result["captions"][0]["text"]
                if self.captions.setdefault(number, caption) != caption:
                    self.wrong[f"photo {number} got the caption of another: {caption}"] += 1
            elif result["status"] not in {200 if number is not None else 415} | BUSY:
                self.wrong[f"{kind}: a photo with status {result['status']}"] += 1

    def check_log(self, lines: list[dict[str, Any]], stopped: datetime) -> None:
        """Compare the server's log with the received responses.

        Args:
            lines: The lines of the log.
            stopped: Time of SIGTERM. Requests that were accepted before it must not be rejected.
        """
        for line in lines:
            response = self.received.get(line.get("id", ""))
            if response is None:
                continue
            end = datetime.fromisoformat(line["time"])
            begin = end - timedelta(milliseconds=line["ms"] + 1)  # "ms" is rounded
            if line["status"] != response.status:
                both = f"status {line['status']} in the log, {response.status} received"
                self.wrong[f"valid: {both}"] += 1
            if begin < stopped < end and CLOSING in response.body and line["status"] != 429:
                self.wrong["a photo that was accepted before SIGTERM was rejected after it"] += 1


# --- the server ----------------------------------------------------------------------------------


class Server:
    """A server process that can be restarted on the same port."""

    def __init__(self, log: Path, *options: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.log = log
        self.command = [
            *(sys.executable, "-m", "captioner", "serve", "--port", str(self.port), *options),
            *("--log-format", "json", "--max-queue", "48"),
            *("--timeout", str(TIMEOUT)),
        ]

    def start(self) -> None:
        """Start the server and wait until it listens."""
        start = self.log.stat().st_size if self.log.exists() else 0
        with self.log.open("a") as log:
            self.process = subprocess.Popen(self.command, stderr=log)
        while b"serving on http" not in self.log.read_bytes()[start:]:
            if self.process.poll() is not None:
                raise SystemExit(self.log.read_text()[-2000:])
            time.sleep(0.1)

    def stop(self) -> int:
        """Stop the server with SIGTERM, and return its exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(120)

    def peak(self) -> int:
        """Print and return the peak resident memory of the server so far, in MiB."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        peak = int(status.partition("VmHWM:")[2].split()[0]) >> 10
        print(f"the server used at most {peak:,} MiB of memory")
        return peak

    def usage(self) -> tuple[int, int]:
        """Return the resident memory (MiB) and the number of open descriptors."""
        process = psutil.Process(self.process.pid)
        return process.memory_info().rss >> 20, process.num_fds()


def soak_and_restart(soak: Soak, server: Server, seconds: float) -> datetime:
    """Measure the server under load, restart it halfway, and return the time of SIGTERM."""
    start, half, samples = time.monotonic(), SAMPLES // 2, []
    print("| minute | memory, MiB | descriptors |\n|---|---|---|")
    for sample in range(1, SAMPLES + 1):
        time.sleep(seconds / SAMPLES)
        memory, descriptors = server.usage()
        samples.append(memory)
        minute = (time.monotonic() - start) / 60
        print(f"| {minute:.1f} | {memory:,} | {descriptors} |", flush=True)
        if sample == half:
            soak.restarting, began, stopped = True, time.monotonic(), datetime.now(timezone.utc)
            if code := server.stop():
                soak.wrong[f"the server exited with {code} on SIGTERM"] += 1
            server.start()
            soak.restarting = False
            soak.end += time.monotonic() - began
    # Compare the memory of each process after its warm-up with its memory at the end. A short soak
    # consists of the warm-up alone.
    for first, last in ((samples[1], samples[half - 1]), (samples[half + 1], samples[-1])):
        if seconds >= 600 and last > GROWTH * first:
            soak.wrong[f"memory grew from {first} to {last} MiB"] += 1
    return stopped


def check_ordinary(soak: Soak) -> None:
    """Print how long ordinary clients waited under attack, and check that it is short enough."""
    half, most, slowest = np.percentile(soak.waited, (50, 99, 100))
    print(
        f"{len(soak.waited)} ordinary requests: median {half:.2f} s, 99% within {most:.2f} s, "
        f"all within {slowest:.2f} s"
    )
    if most > ORDINARY:
        soak.wrong[f"1 of 100 ordinary requests took more than {most:.2f} s"] += 1
    if rejected := len(soak.waited) - soak.counts[VALID, "200"]:
        soak.wrong[f"{rejected} ordinary requests were rejected"] += 1


def main() -> None:
    """Stress the server, print the results, and exit with code 1 if a check fails."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=900, help="duration of the test")
    parser.add_argument(
        "--attackers", type=int, default=0, help="number of clients that try to block the server"
    )
    parser.add_argument("--model", default="shipped", help="model folder")
    options = parser.parse_args()
    attackers = options.attackers
    limits = ["--precision", "fp32", "--max-bytes", str(MAX_BYTES)]
    if attackers:
        limits = ["--max-per-client", "4"]
    with (
        tempfile.TemporaryDirectory() as folder,
        ThreadPoolExecutor(CLIENTS + attackers) as pool,
    ):
        server = Server(Path(folder) / "log", "--model", options.model, *limits)
        server.start()
        soak = Soak(server.port, options.seconds)
        tasks: list[Future[None]] = []
        try:
            if attackers:
                for seed in range(attackers):
                    address = ATTACKING[seed % len(ATTACKING)]
                    tasks.append(pool.submit(soak.client, attack, seed, address, 0.02))
                time.sleep(WARM_UP)
                valid = partial(request_of, VALID)
                tasks += [pool.submit(soak.client, valid, seed, pause=0.2) for seed in range(4)]
            else:
                tasks += [pool.submit(soak.client, mixed, seed) for seed in range(CLIENTS)]
                stopped = soak_and_restart(soak, server, options.seconds)
            for task in tasks:
                task.result()
            if attackers:
                check_ordinary(soak)
                stopped = datetime.now(timezone.utc)
            time.sleep(2 * TIMEOUT)  # so that the server closes idle connections
            if attackers and (peak := server.peak()) > MEMORY:
                soak.wrong[f"the server had {peak:,} MiB"] += 1
            memory, descriptors = server.usage()
            print(f"| after the last client disconnected | {memory:,} | {descriptors} |\n")
            if descriptors > 40:
                soak.wrong[f"{descriptors} descriptors are open after the clients have left"] += 1
            if code := server.stop():
                soak.wrong[f"the server exited with {code}"] += 1
        finally:
            soak.end = 0.0
            server.process.kill()
        log = server.log.read_text().splitlines()
    soak.check_log([json.loads(line) for line in log if line.startswith("{")], stopped)
    print("| requests | number by status |\n|---|---|")
    for kind in dict.fromkeys(kind for kind, _ in sorted(soak.counts)):
        found = sorted((outcome, n) for (one, outcome), n in soak.counts.items() if one == kind)
        print(f"| {kind} | {', '.join(f'{outcome}: {number:,}' for outcome, number in found)} |")
    for problem, count in soak.wrong.most_common(20):
        print(f"WRONG {problem} ({count} times)")
    sys.exit(bool(soak.wrong))


if __name__ == "__main__":
    main()
