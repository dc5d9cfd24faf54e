"""Soak a server with valid, corrupt, oversized, slow and hostile requests from 100 clients.

    python scripts/benchmarks/soak_serving.py --seconds 900 --model MODEL

Starts `captioner serve` itself, restarts it by SIGTERM in the middle, and checks that

- every request gets a status that its kind allows, and every valid photo its own caption;
- every photo that was accepted before SIGTERM got its caption, and no response that the server's
  log reports was lost on its way to a client;
- resident memory and open descriptors do not grow.

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
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

MAX_BYTES = 200_000
TIMEOUT = 10  # --timeout of the server, seconds
BUSY = {429, 503}
CLOSING = "shutting down"  # in the error of a server that has got SIGTERM
SAMPLES = 12
"""How often memory and descriptors are measured, the restart being in the middle."""
GROWTH = 1.1
"""Largest factor by which memory may grow before the restart, and after it."""


def photo(number: int) -> bytes:
    """A photo whose colour depends on its number."""
    noise = np.random.default_rng(number).integers(256, size=(48, 64, 3), dtype=np.uint8)
    file = io.BytesIO()
    colour = np.array([number % 2, number // 2 % 2, number // 4 % 2], dtype=np.uint8)
    Image.fromarray(noise * colour).save(file, "PNG")
    return file.getvalue()


PHOTOS = [photo(number) for number in range(1, 8)]


def as_bytes(photo: bytes) -> tuple[bytes, bytes]:
    """Content type and body of a request with the photo alone."""
    return b"image/png", photo


def as_form(*photos: bytes) -> tuple[bytes, bytes]:
    """Content type and body of a form with photos."""
    name = b"images" if len(photos) > 1 else b"image"
    head = b'--x\r\nContent-Disposition: form-data; name="%s"; filename="a.png"\r\n\r\n' % name
    parts = b"".join(head + photo + b"\r\n" for photo in photos)
    return b"multipart/form-data; boundary=x", parts + b"--x--\r\n"


def as_json(photo: bytes) -> tuple[bytes, bytes]:
    """Content type and body of a JSON object with the photo."""
    return b"application/json", json.dumps({"image": base64.b64encode(photo).decode()}).encode()


ENCODINGS: tuple[Callable[[bytes], tuple[bytes, bytes]], ...] = (as_bytes, as_form, as_json)


class Response(NamedTuple):
    """A response; status 0: the connection was closed without one."""

    status: int
    body: str = ""
    last: bool = True
    """Whether the server closes the connection after it."""

    @property
    def outcome(self) -> str:
        """The status, and which of its two causes 503 has."""
        if self.status == 503:
            return "503 stopping" if CLOSING in self.body else "503 busy"
        return str(self.status or "closed")


class Soak:
    """The state of the clients and what they found."""

    def __init__(self, port: int, seconds: float) -> None:
        self.port = port
        self.end = time.monotonic() + seconds
        self.captions: dict[int, str] = {}
        self.counts: Counter[tuple[str, str]] = Counter()
        """Responses by kind of request and outcome."""
        self.wrong: list[str] = []
        self.received: dict[str, Response] = {}
        """The responses to requests for a photo, by the id of the request."""
        self.sent: set[str] = set()
        """Ids of all requests for a photo."""
        self.restarting = False
        """Connections that the server had not accepted yet are closed without a response."""

    async def client(self, seed: int) -> None:
        """Send requests of all kinds until the end."""
        chance = random.Random(seed)
        while self.restarting or time.monotonic() < self.end:
            kind, weight = zip(*KINDS.items(), strict=True)
            [name] = chance.choices(kind, weight)
            try:
                response = await asyncio.wait_for(getattr(self, name)(chance), 120)
            except ConnectionRefusedError:
                if not self.restarting:
                    self.wrong.append("the server does not listen")
                response = Response(0)
            except (ConnectionError, asyncio.IncompleteReadError):  # cut off
                response = Response(0)
                self.check(name, response, {0} if name == "leaving" else set())
            except TimeoutError:
                self.wrong.append(f"{name}: no response within 120 s")
                continue
            if response.status in BUSY or self.restarting:
                await asyncio.sleep(chance.uniform(0, 1))

    async def send(self, *parts: bytes, pause: float = 0.0, close: bool = False) -> Response:
        """Send the parts over a new connection, until the response comes."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        reading = asyncio.create_task(read_response(reader))
        try:
            with suppress(ConnectionError):  # the response may have come before
                for part in parts:
                    writer.write(part)
                    await writer.drain()
                    if (await asyncio.wait({reading}, timeout=pause))[0]:
                        break
                if close:
                    writer.write_eof()
            return await reading
        finally:
            reading.cancel()
            writer.close()

    def check(self, kind: str, response: Response, allowed: set[int]) -> Response:
        """Count a response and check its status."""
        self.counts[kind, response.outcome] += 1
        if response.status not in allowed | BUSY and not (response.status == 0 and self.restarting):
            self.wrong.append(f"{kind}: status {response.status}")
        return response

    def compare(self, number: int, result: Any) -> None:
        """Compare the caption of a photo with its earlier ones."""
        caption = result["captions"][0]["text"]
        if self.captions.setdefault(number, caption) != caption:
            self.wrong.append(f"photo {number} got the caption of another: {caption}")

    async def valid(self, chance: random.Random) -> Response:
        """A photo as bytes, form or JSON."""
        number, request = chance.randrange(len(PHOTOS)), secrets.token_hex(8)
        self.sent.add(request)
        kind, body = chance.choice(ENCODINGS)(PHOTOS[number])
        response = await self.send(head(len(body), kind, request), body)
        if response.status:
            self.received[request] = response
        if response.status == 200:
            self.compare(number, json.loads(response.body))
        return self.check("valid", response, {200})

    async def batch(self, chance: random.Random) -> Response:
        """Photos in one form, a broken one among them; the results come line by line."""
        one, two = chance.choices(range(len(PHOTOS)), k=2)
        kind, body = as_form(PHOTOS[one], b"no photo", PHOTOS[two])
        start = head(len(body), kind, "", "Accept: application/x-ndjson", path="/v1/batch")
        response = await self.send(start, body)
        if response.status == 200:
            results = [json.loads(line) for line in response.body.splitlines()]
            if [result.get("index") for result in results] != [0, 1, 2]:
                self.wrong.append(f"batch: {len(results)} results")
            for result, number in zip(results, (one, None, two), strict=False):
                if result["status"] == 200 and number is not None:
                    self.compare(number, result)
                elif result["status"] not in {200 if number is not None else 415} | BUSY:
                    self.wrong.append(f"batch: a photo with status {result['status']}")
        return self.check("batch", response, {200})

    async def overlay(self, chance: random.Random) -> Response:
        """A figure of a photo."""
        body = chance.choice(PHOTOS)
        response = await self.send(head(len(body), path="/v1/overlay.svg"), body)
        if response.status == 200 and "</svg>" not in response.body:
            self.wrong.append("overlay: no SVG")
        return self.check("overlay", response, {200})

    async def corrupt(self, chance: random.Random) -> Response:
        """Not a photo, or a broken one."""
        encode = chance.choice(ENCODINGS)
        kind, body = encode(chance.choice([b"no photo", PHOTOS[6][:-300], b"%PDF-1.7"]))
        return self.check("corrupt", await self.send(head(len(body), kind), body), {415, 422})

    async def oversized(self, chance: random.Random) -> Response:
        """More bytes than allowed."""
        size = MAX_BYTES + 1 + chance.randrange(MAX_BYTES)
        return self.check("oversized", await self.send(head(size), b"x" * size), {413})

    async def slow_body(self, _: random.Random) -> Response:
        """A body that arrives byte by byte, too slowly."""
        parts = [head(len(PHOTOS[0])), *(PHOTOS[0][i : i + 1] for i in range(3 * TIMEOUT))]
        return self.check("slow_body", await self.send(*parts, pause=0.5), {408})

    async def slow_headers(self, _: random.Random) -> Response:
        """Headers that arrive byte by byte, too slowly; the connection is closed."""
        parts = [b"POST /v1/captions HTTP/1.1\r\nX: ", *[b"x"] * (3 * TIMEOUT)]
        return self.check("slow_headers", await self.send(*parts, pause=0.5), {0})

    async def half_closed(self, chance: random.Random) -> Response:
        """Closes its side after the request, or before its end, which counts as disconnecting."""
        missing = chance.choice((0, 9))
        response = await self.send(head(len(PHOTOS[0]) + missing), PHOTOS[0], close=True)
        return self.check("half_closed", response, {499, 0} if missing else {200, 0})

    async def wrong_length(self, chance: random.Random) -> Response:
        """A Content-Length that is no number, or enormous."""
        length = chance.choice(["-1", "x", "1e3", "9" * 30, "5, 6"])
        return self.check("wrong_length", await self.send(head(length)), {400, 413})

    async def bad_chunks(self, chance: random.Random) -> Response:
        """Invalid chunked encoding."""
        start = (
            b"POST /v1/captions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
        )
        chunk = chance.choice([b"zz\r\nabc\r\n", b"-5\r\nabc\r\n", b"3\r\nabcdef\r\n", b"\0\r\n"])
        return self.check("bad_chunks", await self.send(start, chunk), {400, 499})

    async def pipelined(self, chance: random.Random) -> Response:
        """Two requests at once: the responses come in their order."""
        numbers = chance.sample(range(len(PHOTOS)), 2)
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            for number in numbers:
                writer.write(head(len(PHOTOS[number])) + PHOTOS[number])
            for number in numbers:
                response = self.check("pipelined", await read_response(reader), {200})
                if response.status == 200:
                    self.compare(number, json.loads(response.body))
                if response.last:
                    break
            return response
        finally:
            writer.close()

    async def leaving(self, chance: random.Random) -> Response:
        """Disconnects before the response."""
        _, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(head(len(PHOTOS[0])) + PHOTOS[0][: chance.randrange(len(PHOTOS[0]) + 1)])
        await asyncio.sleep(chance.uniform(0, 0.1))
        writer.close()
        return self.check("leaving", Response(0), {0})


KINDS = {
    "valid": 58, "batch": 6, "overlay": 1, "corrupt": 8, "oversized": 4, "slow_body": 1,
    "slow_headers": 1, "half_closed": 7, "wrong_length": 4, "bad_chunks": 4,
    "pipelined": 6, "leaving": 5,
}  # fmt: skip
"""Methods of ``Soak`` and how often each is called, relative to the others."""


def head(
    length: int | str,
    kind: bytes = b"image/png",
    request: str = "",
    *lines: str,
    path: str = "/v1/captions",
) -> bytes:
    """Headers of an upload."""
    first = [
        f"POST {path} HTTP/1.1", "Host: localhost", f"Content-Length: {length}",
        f"Content-Type: {kind.decode()}", *lines,
    ]  # fmt: skip
    if request:
        first.append(f"X-Request-Id: {request}")
    return "\r\n".join([*first, "", ""]).encode()


async def read_response(reader: asyncio.StreamReader) -> Response:
    """Read the next response."""
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
    return Response(int(head.split()[1]), body.decode(), "connection: close" in head.lower())


class Server:
    """The server's process; can be restarted on its port."""

    def __init__(self, port: int, model: str | None, log: Path) -> None:
        self.log = log
        self.command = [sys.executable, "-m", "captioner", "serve", "--port", str(port)]
        self.command += ["--precision", "fp32", "--log-format", "json", "--max-queue", "48"]
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
        proc = Path(f"/proc/{self.process.pid}")
        pages = int((proc / "statm").read_text().split()[1])
        return pages * 4096 >> 20, len(list((proc / "fd").iterdir()))


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


def check_log(soak: Soak, lines: list[dict[str, Any]], stopped: datetime) -> None:
    """Compare the server's log with what the clients received."""
    for line in lines:
        if line.get("id") not in soak.sent:
            continue
        end = datetime.fromisoformat(line["time"])
        begin = end - timedelta(milliseconds=line["ms"] + 1)  # it is rounded
        response = soak.received.get(line["id"], Response(0))
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
    parser.add_argument("--model", help="model folder; default: the shipped model")
    options = parser.parse_args()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        server = Server(port, options.model, Path(folder) / "log")
        server.start()
        try:
            soak = Soak(port, options.seconds)
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
    for kind in KINDS:
        found = sorted((outcome, n) for (name, outcome), n in soak.counts.items() if name == kind)
        cells = [f"{outcome}: {number:,}" for outcome, number in found]
        print(f"| {kind.replace('_', ' ')} | {', '.join(cells)} |")
    for problem, count in Counter(soak.wrong).most_common(20):
        print(f"WRONG {problem} ({count} times)")
    sys.exit(bool(soak.wrong))


if __name__ == "__main__":
    main()
