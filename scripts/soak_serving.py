"""Soak a server with valid, corrupt, oversized, slow and hostile requests from 100 clients.

    python scripts/soak_serving.py --seconds 900 --model MODEL

Starts `captioner serve` itself, restarts it by SIGTERM in the middle, and checks that

- every request gets a status that its kind allows, and every valid photo its own caption;
- no request that appears in the server's log with status 200 was lost on its way to a client;
- resident memory and open descriptors do not grow (printed per quarter).

Exits with 1 if a check fails.
"""

from __future__ import annotations

import argparse
import asyncio
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
from pathlib import Path

import numpy as np
from PIL import Image

MAX_BYTES = 200_000
TIMEOUT = 5  # --timeout of the server, seconds
BUSY = {429, 503}


def photo(number: int) -> bytes:
    """A photo whose colour depends on its number."""
    noise = np.random.default_rng(number).integers(256, size=(48, 64, 3), dtype=np.uint8)
    file = io.BytesIO()
    colour = np.array([number % 2, number // 2 % 2, number // 4 % 2], dtype=np.uint8)
    Image.fromarray(noise * colour).save(file, "PNG")
    return file.getvalue()


PHOTOS = [photo(number) for number in range(1, 8)]


class Soak:
    """The state of the clients and what they found."""

    def __init__(self, port: int, seconds: float) -> None:
        self.port = port
        self.end = time.monotonic() + seconds
        self.captions: dict[int, str] = {}
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.received: set[str] = set()
        """Ids of the valid requests whose response arrived."""
        self.sent: set[str] = set()
        self.restarting = False
        """Connections that the server had not accepted yet are closed without a response."""

    async def client(self, seed: int) -> None:
        """Send requests of all kinds until the end."""
        chance = random.Random(seed)
        while self.restarting or time.monotonic() < self.end:
            kind, weight = zip(*KINDS.items(), strict=True)
            [name] = chance.choices(kind, weight)
            try:
                await asyncio.wait_for(getattr(self, name)(chance), 120)
            except (ConnectionError, asyncio.IncompleteReadError):
                self.counts[f"{name}: closed"] += 1
                await asyncio.sleep(chance.uniform(0.05, 0.5))
            except TimeoutError:
                self.wrong.append(f"{name}: no response within 120 s")

    async def send(self, *parts: bytes, pause: float = 0.0, close: bool = False) -> tuple[int, str]:
        """Send the parts over a new connection; status and body of the response (0: none)."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            for part in parts:
                writer.write(part)
                await writer.drain()
                await asyncio.sleep(pause)
            if close:
                writer.write_eof()
            return await response(reader)
        finally:
            writer.close()

    def head(self, length: int | str, *lines: str) -> bytes:
        """Headers of an upload."""
        first = [
            "POST /v1/captions HTTP/1.1", "Host: localhost", f"Content-Length: {length}", *lines,
        ]  # fmt: skip
        return "\r\n".join([*first, "", ""]).encode()

    def check(self, kind: str, status: int, allowed: set[int]) -> None:
        """Count a response and check its status."""
        self.counts[f"{kind}: {status}"] += 1
        if status not in allowed | BUSY and not (status == 0 and self.restarting):
            self.wrong.append(f"{kind}: status {status}")

    async def valid(self, chance: random.Random) -> None:
        """A photo, whose caption is compared with its earlier ones."""
        number, request = chance.randrange(len(PHOTOS)), secrets.token_hex(8)
        self.sent.add(request)
        body = PHOTOS[number]
        head = self.head(len(body), f"X-Request-Id: {request}")
        status, text = await self.send(head, body)
        self.check("valid", status, {200})
        if status == 200:
            self.received.add(request)
            caption = json.loads(text)["captions"][0]["text"]
            if self.captions.setdefault(number, caption) != caption:
                self.wrong.append(f"photo {number} got the caption of another: {caption}")

    async def corrupt(self, chance: random.Random) -> None:
        """Not a photo, or a broken one."""
        body = chance.choice([b"no photo", PHOTOS[6][:-300], b"%PDF-1.7"])
        self.check("corrupt", (await self.send(self.head(len(body)), body))[0], {415, 422})

    async def oversized(self, chance: random.Random) -> None:
        """More bytes than allowed."""
        size = MAX_BYTES + 1 + chance.randrange(MAX_BYTES)
        self.check("oversized", (await self.send(self.head(size), b"x" * size))[0], {413})

    async def slow_body(self, _: random.Random) -> None:
        """A body that arrives byte by byte."""
        body = PHOTOS[0]
        parts = [self.head(len(body)), *(body[i : i + 1] for i in range(30))]
        self.check("slow body", (await self.send(*parts, pause=0.3))[0], {408, 0})

    async def slow_headers(self, _: random.Random) -> None:
        """Headers that arrive byte by byte."""
        parts = [b"POST /v1/captions HTTP/1.1\r\nX: ", *[b"x"] * 30]
        self.check("slow headers", (await self.send(*parts, pause=0.3))[0], {0})

    async def half_closed(self, _: random.Random) -> None:
        """Closes its side after the request."""
        body = PHOTOS[0]
        status, _ = await self.send(self.head(len(body)), body, close=True)
        self.check("half closed", status, {200, 0})

    async def short(self, _: random.Random) -> None:
        """Less than its Content-Length."""
        status, _ = await self.send(self.head(len(PHOTOS[0]) + 9), PHOTOS[0], close=True)
        self.check("short", status, {0, 400, 408})

    async def wrong_length(self, chance: random.Random) -> None:
        """A Content-Length that is no number, or enormous."""
        length = chance.choice(["-1", "x", "1e3", "9" * 30, "5, 6"])
        self.check("wrong length", (await self.send(self.head(length)))[0], {400, 413})

    async def bad_chunks(self, chance: random.Random) -> None:
        """Invalid chunked encoding."""
        start = (
            b"POST /v1/captions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
        )
        chunk = chance.choice([b"zz\r\nabc\r\n", b"-5\r\nabc\r\n", b"3\r\nabcdef\r\n", b"\0\r\n"])
        self.check("bad chunks", (await self.send(start, chunk))[0], {400, 0})

    async def pipelined(self, chance: random.Random) -> None:
        """Two requests at once: the responses come in their order."""
        one, two = chance.sample(range(len(PHOTOS)), 2)
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            for number in (one, two):
                writer.write(self.head(len(PHOTOS[number])) + PHOTOS[number])
            for number in (one, two):
                status, text = await response(reader)
                if status == 0:
                    return
                self.check("pipelined", status, {200})
                if status == 200 and number in self.captions:
                    caption = json.loads(text)["captions"][0]["text"]
                    if caption != self.captions[number]:
                        self.wrong.append(f"pipelined photo {number} got another's caption")
        finally:
            writer.close()

    async def leaving(self, chance: random.Random) -> None:
        """Disconnects before the response."""
        _, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(self.head(len(PHOTOS[0])) + PHOTOS[0][: chance.randrange(len(PHOTOS[0]) + 1)])
        await asyncio.sleep(chance.uniform(0, 0.1))
        writer.close()
        self.counts["leaving"] += 1


KINDS = {
    "valid": 60, "corrupt": 8, "oversized": 4, "slow_body": 2, "slow_headers": 2, "half_closed": 4,
    "short": 3, "wrong_length": 4, "bad_chunks": 4, "pipelined": 6, "leaving": 5,
}  # fmt: skip


async def response(reader: asyncio.StreamReader) -> tuple[int, str]:
    """Status and body of the next response; 0 if the connection was closed without one."""
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    except (asyncio.IncompleteReadError, ConnectionError):
        return 0, ""
    length = re.search(r"(?i)content-length: (\d+)", head)
    body = await reader.readexactly(int(length[1])) if length else b""
    return int(head.split()[1]), body.decode()


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


async def run(soak: Soak, server: Server, clients: int, seconds: float) -> None:
    """Run the clients; restart the server in the middle and print its usage per eighth."""
    tasks = [asyncio.create_task(soak.client(seed)) for seed in range(clients)]
    for eighth in range(1, 9):
        await asyncio.sleep(seconds / 8)
        memory, descriptors = server.usage()
        print(f"{eighth / 8:4.0%}: {memory:,} MiB, {descriptors} descriptors", flush=True)
        if eighth == 4:
            soak.restarting, start = True, time.monotonic()
            if code := await asyncio.to_thread(server.stop):
                soak.wrong.append(f"the server exited with {code} on SIGTERM")
            await asyncio.to_thread(server.start)
            soak.restarting = False
            soak.end += time.monotonic() - start
            print("restarted", flush=True)
    await asyncio.gather(*tasks)


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
            asyncio.run(run(soak, server, options.clients, options.seconds))
            time.sleep(2 * TIMEOUT)  # idle connections are closed
            _, descriptors = server.usage()
            if descriptors > 40:
                soak.wrong.append(f"{descriptors} descriptors are open after the clients have left")
            if code := server.stop():
                soak.wrong.append(f"the server exited with {code}")
        finally:
            server.process.kill()
        lines = [json.loads(x) for x in server.log.read_text().splitlines() if x.startswith("{")]
    done = {line["id"] for line in lines if line.get("status") == 200} & soak.sent
    if lost := done - soak.received:
        soak.wrong.append(f"{len(lost)} accepted requests were lost: {sorted(lost)[:3]}")
    for name, count in sorted(soak.counts.items()):
        print(f"{name:24} {count:,}")
    print(f"descriptors at the end: {descriptors}; accepted and completed: {len(done):,}")
    for problem, count in Counter(soak.wrong).most_common(20):
        print(f"WRONG {problem} ({count} times)")
    sys.exit(bool(soak.wrong))


if __name__ == "__main__":
    main()
