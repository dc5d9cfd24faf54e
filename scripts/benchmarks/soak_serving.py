"""Soak a server with valid, corrupt, oversized, slow and hostile requests from 100 clients.

    python scripts/benchmarks/soak_serving.py --seconds 900 --model MODEL

Starts `captioner serve` itself, restarts it by SIGTERM in the middle, and checks that

- every request gets a status that its kind allows, and every valid photo its own caption;
- every photo that was accepted before SIGTERM got its caption, and no response that the server's
  log reports was lost on its way to a client;
- resident memory and open descriptors do not grow.

With ``--attackers 40``, clients of eight other addresses hold every slot they can get with bombs
(scans, pixels) and costly searches and maps, while four ordinary clients send one photo after the
other: 99 of 100 of these are answered within `ORDINARY` seconds.

Prints the use of memory and the requests by kind and status. Exits with 1 if a check fails.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import json
import random
import re
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
from PIL import Image

MAX_BYTES = 200_000
TIMEOUT = 10  # --timeout of the server, seconds
BUSY = {429, 503}
CLOSING = "shutting down"  # in the error of a server that has got SIGTERM
SAMPLES = 12
"""How often memory and descriptors are measured, the restart being in the middle."""
GROWTH = 1.1
"""Largest factor by which memory may grow before the restart, and after it."""


ORDINARY = 2.0
"""Seconds within which 99 of 100 ordinary requests are answered under attack."""
ATTACKING = [f"127.0.1.{number}" for number in range(1, 9)]
"""Addresses of the attackers."""
WARM_UP = 20
"""Seconds after which ordinary clients start."""
PER_CLIENT = 4
"""--max-per-client of the server under attack."""


class Request(NamedTuple):
    """What a client sends over a new connection."""

    allowed: set[int]
    """Statuses, besides those of a busy server; 0: the connection is closed without a response."""
    parts: Sequence[bytes]
    photos: Sequence[int | None] = ()
    """Numbers of the photos in it; None for a broken one."""
    id: str = ""
    pause: float = 0.0
    """Seconds between the parts."""
    leaves: bool = False
    """Disconnects before the response."""


class Response(NamedTuple):
    """A response; status 0: the connection was closed without one."""

    status: int
    body: str = ""


# --- kinds of requests ---------------------------------------------------------------------------


def photo(number: int) -> bytes:
    """A photo whose colour depends on its number."""
    noise = np.random.default_rng(number).integers(256, size=(48, 64, 3), dtype=np.uint8)
    file = io.BytesIO()
    colour = np.array([number % 2, number // 2 % 2, number // 4 % 2], dtype=np.uint8)
    Image.fromarray(noise * colour).save(file, "PNG")
    return file.getvalue()


PHOTOS = [photo(number) for number in range(1, 8)]


def head(length: int | str, kind: str = "image/png", path: str = "captions", *lines: str) -> bytes:
    """Headers of an upload."""
    fixed = ["Host: localhost", f"Content-Length: {length}", f"Content-Type: {kind}"]
    return "\r\n".join([f"POST /v1/{path} HTTP/1.1", *fixed, *lines, "", ""]).encode()


def form(name: bytes, photos: Sequence[bytes]) -> tuple[str, bytes]:
    """Content type and body of a form with photos."""
    start = b'--x\r\nContent-Disposition: form-data; name="%s"; filename="a.png"\r\n\r\n' % name
    parts = b"".join(start + photo + b"\r\n" for photo in photos)
    return "multipart/form-data; boundary=x", parts + b"--x--\r\n"


def encoded(chance: random.Random, photo: bytes) -> tuple[str, bytes]:
    """Content type and body of a photo as bytes, form or JSON."""
    text = json.dumps({"image": base64.b64encode(photo).decode()}).encode()
    kinds = [("image/png", photo), form(b"image", [photo]), ("application/json", text)]
    return chance.choice(kinds)


SLOWLY = [b"x"] * (3 * TIMEOUT)
"""Too slow with half a second between them."""
KINDS = {
    "valid": 65, "batch": 6, "overlay": 1, "corrupt": 8, "oversized": 4, "slow body": 1,
    "slow headers": 1, "wrong length": 4, "bad chunks": 4, "leaving": 5,
}  # fmt: skip
"""How often each kind of request is sent, relative to the others."""


def make_request(name: str, chance: random.Random) -> Request:
    """A request of a kind."""
    one, two = chance.choices(range(len(PHOTOS)), k=2)
    body, id_ = PHOTOS[one], secrets.token_hex(8)
    kind, photo = encoded(chance, body)
    kind_of_broken, broken = encoded(chance, chance.choice([b"no photo", body[:-300], b"%PDF-1.7"]))
    kind_of_form, photos = form(b"images", [body, b"no photo", PHOTOS[two]])
    start_of_form = head(len(photos), kind_of_form, "batch", "Accept: application/x-ndjson")
    half = body[: chance.randrange(len(body) + 1)]
    size = MAX_BYTES + 1 + chance.randrange(MAX_BYTES)
    length = chance.choice(["-1", "x", "1e3", "9" * 30, "5, 6"])
    chunked = b"POST /v1/captions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    bad_chunk = chance.choice([b"zz\r\nabc\r\n", b"-5\r\nabc\r\n", b"3\r\nabcdef\r\n", b"\0\r\n"])
    requests = {
        "valid": Request(
            {200}, [head(len(photo), kind, "captions", f"X-Request-Id: {id_}"), photo], [one], id_
        ),
        "batch": Request({200}, [start_of_form, photos], [one, None, two]),
        "overlay": Request({200}, [head(len(body), path="overlay.svg"), body]),
        "corrupt": Request({415, 422}, [head(len(broken), kind_of_broken), broken]),
        "oversized": Request({413}, [head(size), b"x" * size]),
        "slow body": Request({408}, [head(len(body)), *SLOWLY], pause=0.5),
        "slow headers": Request({0}, [b"POST / HTTP/1.1\r\nX: ", *SLOWLY], pause=0.5),
        "wrong length": Request({400, 413}, [head(length)]),
        "bad chunks": Request({400, 499}, [chunked, bad_chunk]),
        "leaving": Request({0}, [head(len(body)), half], pause=0.02, leaves=True),
    }
    return requests[name]


def scans(repeats: int) -> bytes:
    """A progressive JPEG whose last scan is repeated."""
    file = io.BytesIO()
    Image.new("RGB", (4000, 3000), (9, 99, 9)).save(file, "JPEG", progressive=True, quality=30)
    data = file.getvalue()
    start = data.rindex(b"\xff\xda")
    return data[:-2] + data[start:-2] * repeats + data[-2:]


def pixels(width: int, height: int) -> bytes:
    """A PNG of one colour."""
    file = io.BytesIO()
    Image.new("L", (width, height)).save(file, "PNG")
    return file.getvalue()


BOMBS = [lambda: scans(2000), lambda: scans(90), lambda: pixels(23_900, 1000),
         lambda: pixels(11_000, 10_000), lambda: pixels(60_000, 20)]  # fmt: skip
COSTLY = [
    "captions?beam_size=20&num_captions=20&max_length=50&min_length=49&attention=true&method=occlusion",
    "captions?beam_size=4&num_captions=4&max_length=50&min_length=49&attention=true&method=occlusion",
    "captions?beam_size=4&num_captions=4&max_length=50&min_length=49&attention=true&method=grad_cam",
    "captions?beam_size=20&num_captions=20&max_length=50&min_length=49&forced_words=a,dog,man,on,of",
    "overlay.png?beam_size=5&num_captions=5&max_length=50&min_length=20&panel_size=640",
    "overlay.html?beam_size=3&num_captions=3&method=occlusion",
]


def make_attack(chance: random.Random, bombs: Sequence[bytes]) -> Request:
    """A request that costs the server as much as it lets it."""
    if chance.random() < 0.5:
        bomb = chance.choice(bombs)
        return Request({200, 413, 422}, [head(len(bomb)), bomb])
    photo = chance.choice(PHOTOS)
    return Request({200, 422}, [head(len(photo), path=chance.choice(COSTLY)), photo])


# --- clients -------------------------------------------------------------------------------------


async def read_response(reader: asyncio.StreamReader) -> Response:
    """Read the response."""
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    except (asyncio.IncompleteReadError, ConnectionError):
        return Response(0)
    body = b""
    if length := re.search(r"(?i)content-length: (\d+)", head):
        body = await reader.readexactly(int(length[1]))
    else:  # chunked
        while size := int(await reader.readline() or b"0", 16):
            body += (await reader.readexactly(size + 2))[:-2]
        await reader.readline()
    return Response(int(head.split()[1]), body.decode(errors="replace"))


class Soak:
    """The state of the clients and what they found."""

    def __init__(self, port: int, seconds: float) -> None:
        self.port = port
        self.end = time.monotonic() + seconds
        self.captions: dict[int, str] = {}
        self.counts: Counter[tuple[str, str]] = Counter()
        """Responses by kind of request and outcome."""
        self.wrong: list[str] = []
        self.seconds: list[float] = []
        """Of ordinary requests under attack."""
        self.received: dict[str, Response] = {}
        """The responses to requests with an id."""
        self.restarting = False
        """Connections that the server had not accepted yet are closed without a response."""

    async def client(self, seed: int) -> None:
        """Send requests of all kinds until the end."""
        chance = random.Random(seed)
        while self.restarting or time.monotonic() < self.end:
            [kind] = chance.choices(list(KINDS), list(KINDS.values()))
            request = make_request(kind, chance)
            try:
                response = await asyncio.wait_for(self.send(request), 120)
            except TimeoutError:
                self.wrong.append(f"{kind}: no response within 120 s")
                continue
            except (ConnectionError, asyncio.IncompleteReadError):  # refused or cut off
                response = Response(0)
            self.check(kind, request, response)
            if response.status in BUSY or self.restarting:
                await asyncio.sleep(chance.uniform(0, 1))

    async def attacker(self, seed: int, bombs: Sequence[bytes]) -> None:
        """Attack until the end, each time with another of the address's connections."""
        chance, address = random.Random(seed), ATTACKING[seed % len(ATTACKING)]
        while time.monotonic() < self.end:
            with suppress(ConnectionError, asyncio.IncompleteReadError, TimeoutError):
                request = make_attack(chance, bombs)
                response = await asyncio.wait_for(self.send(request, address), 60)
                self.check("attack", request, response)
            await asyncio.sleep(0.02)

    async def ordinary(self, seed: int) -> None:
        """Send one photo after the other until the end, once torch and matplotlib are loaded."""
        chance = random.Random(seed)
        await asyncio.sleep(WARM_UP)
        while time.monotonic() < self.end:
            request, start = make_request("valid", chance), time.monotonic()
            self.check("valid", request, await asyncio.wait_for(self.send(request), 60))
            self.seconds.append(time.monotonic() - start)
            await asyncio.sleep(0.2)

    async def send(self, request: Request, address: str = "127.0.0.1") -> Response:
        """Send the parts over a new connection, until the response comes."""
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", self.port, local_addr=(address, 0)
        )
        reading = asyncio.create_task(read_response(reader))
        try:
            with suppress(ConnectionError):  # the response may have come before
                for part in request.parts:
                    writer.write(part)
                    await writer.drain()
                    if (await asyncio.wait({reading}, timeout=request.pause))[0]:
                        break
            return Response(0) if request.leaves else await reading
        finally:
            reading.cancel()
            writer.close()

    def check(self, kind: str, request: Request, response: Response) -> None:
        """Count a response and check its status and captions."""
        status = response.status
        closing = "stopping" if CLOSING in response.body else "busy"
        self.counts[kind, f"503 {closing}" if status == 503 else str(status or "closed")] += 1
        if request.id:
            self.received[request.id] = response
        if status not in request.allowed | BUSY and not (status == 0 and self.restarting):
            self.wrong.append(f"{kind}: status {status}")
        if status != 200 or not request.photos:
            return
        results = [{"status": 200, **json.loads(line)} for line in response.body.splitlines()]
        if len(results) != len(request.photos):
            self.wrong.append(f"{kind}: {len(results)} results")
        for result, number in zip(results, request.photos, strict=False):
            if result["status"] == 200 and number is not None:
                caption = result["captions"][0]["text"]
                if self.captions.setdefault(number, caption) != caption:
                    self.wrong.append(f"photo {number} got the caption of another: {caption}")
            elif result["status"] not in {200 if number is not None else 415} | BUSY:
                self.wrong.append(f"{kind}: a photo with status {result['status']}")


# --- the server ----------------------------------------------------------------------------------


class Server:
    """A server's process, which can be started again on its port."""

    def __init__(self, port: int, model: str | None, log: Path, *, attacked: bool) -> None:
        self.log = log
        self.command = [sys.executable, "-m", "captioner", "serve", "--port", str(port)]
        self.command += ["--log-format", "json", "--max-queue", "48"]
        self.command += (
            ["--max-per-client", str(PER_CLIENT)] if attacked else ["--precision", "fp32"]
        )
        self.command += ["--max-bytes", str(MAX_BYTES), "--timeout", str(TIMEOUT)]
        self.command += ["--model", model] if model else []

    def start(self) -> None:
        """Start, and wait until it listens."""
        start = self.log.stat().st_size if self.log.exists() else 0
        with self.log.open("a") as log:
            self.process = subprocess.Popen(self.command, stderr=log)
        while b"serving on" not in self.log.read_bytes()[start:]:
            if self.process.poll() is not None:
                raise SystemExit(self.log.read_text()[-2000:])
            time.sleep(0.1)

    def stop(self) -> int:
        """Send SIGTERM; the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(120)

    def usage(self) -> tuple[int, int]:
        """Resident memory (MiB) and open descriptors."""
        process = psutil.Process(self.process.pid)
        return process.memory_info().rss >> 20, process.num_fds()


async def run(soak: Soak, server: Server, clients: int, seconds: float) -> datetime:
    """Run the clients and restart the server in the middle; returns the time of SIGTERM."""
    start = time.monotonic()
    tasks = [asyncio.create_task(soak.client(seed)) for seed in range(clients)]
    print("| minute | memory, MiB | descriptors |\n|---|---|---|")
    samples = []
    for sample in range(1, SAMPLES + 1):
        await asyncio.sleep(seconds / SAMPLES)
        memory, descriptors = server.usage()
        samples.append(memory)
        minute = (time.monotonic() - start) / 60
        print(f"| {minute:.1f} | {memory:,} | {descriptors} |", flush=True)
        if sample == SAMPLES // 2:
            soak.restarting, began, stopped = True, time.monotonic(), datetime.now(timezone.utc)
            if code := await asyncio.to_thread(server.stop):
                soak.wrong.append(f"the server exited with {code} on SIGTERM")
            await asyncio.to_thread(server.start)
            soak.restarting = False
            soak.end += time.monotonic() - began
    await asyncio.gather(*tasks)
    half = SAMPLES // 2
    # Of each process after its warm-up, which is all there is of a short soak.
    for first, last in ((samples[1], samples[half - 1]), (samples[half + 1], samples[-1])):
        if seconds >= 600 and last > GROWTH * first:
            soak.wrong.append(f"memory grew from {first} to {last} MiB")
    return stopped


async def attack(soak: Soak, server: Server, attackers: int, seconds: float) -> None:
    """Run attackers and ordinary clients; print how long the latter wait."""
    bombs = [make() for make in BOMBS]
    clients = [soak.attacker(seed, bombs) for seed in range(attackers)]
    running = asyncio.gather(*clients, *(soak.ordinary(seed) for seed in range(4)))
    await asyncio.sleep(seconds / 2)
    memory, descriptors = server.usage()
    print(f"under attack: {memory:,} MiB, {descriptors} descriptors")
    await running
    used = sum(psutil.Process(server.process.pid).cpu_times()[:2])
    print(f"processor time of the server, start included: {used:.0f} s")
    found = [float(np.percentile(soak.seconds, share)) for share in (50, 95, 99, 100)]
    print(f"{len(soak.seconds)} ordinary requests: 50%, 95%, 99%, all within ", end="")
    print(", ".join(f"{one:.2f}" for one in found), "s")
    if found[2] > ORDINARY:
        soak.wrong.append(f"1 of 100 ordinary requests took more than {found[2]:.2f} s")
    if refused := sum(
        n
        for (kind, outcome), n in soak.counts.items()
        if (kind, outcome) != ("valid", "200") and kind == "valid"
    ):
        soak.wrong.append(f"{refused} ordinary requests were refused")


def check_log(soak: Soak, lines: list[dict[str, Any]], stopped: datetime) -> None:
    """Compare the server's log with what the clients received."""
    for line in lines:
        response = soak.received.get(line.get("id", ""))
        if response is None:
            continue
        end = datetime.fromisoformat(line["time"])
        begin = end - timedelta(milliseconds=line["ms"] + 1)  # it is rounded
        if line["status"] != response.status:
            problem = f"valid: status {line['status']} in the log, {response.status} received"
            soak.wrong.append(problem)
        if begin < stopped < end and line["status"] not in (200, 429) and CLOSING in response.body:
            soak.wrong.append("a photo that was accepted before SIGTERM was refused after it")


def main() -> None:
    """Soak, and print what was found."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=900)
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--attackers", type=int, default=0)
    parser.add_argument("--model", help="model folder; default: the shipped model")
    options = parser.parse_args()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        server = Server(port, options.model, Path(folder) / "log", attacked=bool(options.attackers))
        server.start()
        try:
            soak = Soak(port, options.seconds)
            if options.attackers:
                asyncio.run(attack(soak, server, options.attackers, options.seconds))
                stopped = datetime.now(timezone.utc)
            else:
                stopped = asyncio.run(run(soak, server, options.clients, options.seconds))
            time.sleep(2 * TIMEOUT)  # idle connections are closed
            memory, descriptors = server.usage()
            if descriptors > 40:
                soak.wrong.append(f"{descriptors} descriptors are open after the clients have left")
            if code := server.stop():
                soak.wrong.append(f"the server exited with {code}")
        finally:
            server.process.kill()
        log = server.log.read_text().splitlines()
    check_log(soak, [json.loads(line) for line in log if line.startswith("{")], stopped)
    print(f"| the clients have left | {memory:,} | {descriptors} |\n")
    print("| requests | number by status |\n|---|---|")
    for kind in [*KINDS, "attack"]:
        found = sorted((outcome, n) for (one, outcome), n in soak.counts.items() if one == kind)
        print(f"| {kind} | {', '.join(f'{outcome}: {number:,}' for outcome, number in found)} |")
    for problem, count in Counter(soak.wrong).most_common(20):
        print(f"WRONG {problem} ({count} times)")
    sys.exit(bool(soak.wrong))


if __name__ == "__main__":
    main()
