"""Servers, in a thread of the tests or as a process."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

PATIENCE = 60  # seconds


@contextmanager
def running(app: Any) -> Iterator[SimpleNamespace]:
    """Serve a FastAPI application: ``app``, ``address``, ``url``, ``stop()`` and ``thread``."""
    from captioner.serving.server import Running, free_address

    address, ready = free_address("127.0.0.1", 0), threading.Event()
    found = SimpleNamespace(app=app, address=address, url=f"http://127.0.0.1:{address[1]}")

    async def main() -> None:
        server, loop = Running(app, address), asyncio.get_running_loop()
        found.stop = lambda: loop.call_soon_threadsafe(server.stop)
        serving = asyncio.create_task(server.serve())
        await server.started.wait()
        ready.set()
        await serving

    found.thread = threading.Thread(target=asyncio.run, args=(main(),))
    found.thread.start()
    assert ready.wait(PATIENCE)
    try:
        yield found
    finally:
        with suppress(RuntimeError):  # it has ended
            found.stop()
            found.stop()  # at once
        found.thread.join(PATIENCE)
        assert not found.thread.is_alive()


@contextmanager
def static_server(folder: Path) -> Iterator[str]:
    """A plain static file server, like ``python -m http.server``: its address."""

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_: Any) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/"
        finally:
            server.shutdown()
            thread.join()


# Loaded into a server's process: reports every file that is opened for writing.
_SPY = """
import os, signal, sys
# Tests started in the background ignore Ctrl-C, and child processes inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
def spy(event, details):
    if event == "open" and details[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
        os.write(2, f"WROTE {details[0]}\\n".encode())
    elif event == "os.mkdir":
        os.write(2, f"WROTE {details[0]}\\n".encode())
sys.addaudithook(spy)
"""


@contextmanager
def serve_command(folder: Path, *options: str) -> Iterator[SimpleNamespace]:
    """``captioner serve`` with the shipped model: ``url``, ``process``, ``stop(signal)``.

    ``stop`` returns the exit code and what was logged, also of files that the server wrote.
    """
    (folder / "spy").mkdir(parents=True)
    (folder / "spy" / "sitecustomize.py").write_text(_SPY)
    path = os.pathsep.join([str(folder / "spy"), os.environ.get("PYTHONPATH", "")])
    more = {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    log = folder / "log"
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "captioner", "serve", "--port", "0", *options],
            stderr=file,
            env=os.environ | more,
        )
    ready = r"serving on (http://\S+) \(press Ctrl-C to stop\)\"?}?\n"
    try:
        while not (found := re.search(ready, log.read_text())):
            assert process.poll() is None, log.read_text()
            time.sleep(0.02)
        beginning = found.end()

        def stop(number: int = signal.SIGTERM) -> tuple[int, str]:
            process.send_signal(number)
            return process.wait(300), log.read_text()[beginning:]

        yield SimpleNamespace(url=found[1], process=process, stop=stop, log=log)
    finally:
        process.kill()
        process.wait()
