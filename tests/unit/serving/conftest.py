"""A running application with a model that captions a photo with its colour."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, ExitStack, suppress
from types import SimpleNamespace
from typing import Any

import pytest
from colour_server import PATIENCE, ColourModel, Server

from captioner.serving.app import create_app
from captioner.serving.options import ServeOptions
from captioner.serving.server import Running, free_address


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def model() -> ColourModel:
    return ColourModel()


@pytest.fixture
async def serve(model) -> AsyncIterator[Callable[..., Awaitable[Server]]]:
    """``await serve(**options)`` starts an application; ``app`` are arguments of ``create_app``."""
    async with AsyncExitStack() as running:

        async def start(*, of: Any = model, batch_size=8, app=None, **options) -> Server:
            made = create_app(of, ServeOptions(batch_size=batch_size, **options), **(app or {}))
            await running.enter_async_context(made.router.lifespan_context(made))
            return Server(made, of)

        yield start
        model.gate.set()  # or shutdown would wait for it


@pytest.fixture
def listening() -> Iterator[Callable[..., SimpleNamespace]]:
    """``listening(timeout=1)`` starts a server over sockets: connect(), app, model, stop(), thread,
    url. ``of`` is its model, ``app`` are arguments of ``create_app``."""
    with ExitStack() as ending:

        def start(*, of: Any = None, app: Any = None, **options: Any) -> SimpleNamespace:
            model, ready = of or ColourModel(), threading.Event()
            application = create_app(model, ServeOptions(**options), **(app or {}))
            address = free_address("127.0.0.1", 0)
            url = f"http://127.0.0.1:{address[1]}"
            found = SimpleNamespace(app=application, model=model, url=url)

            async def main() -> None:
                running = Running(application, address)
                loop = asyncio.get_running_loop()
                found.stop = lambda: loop.call_soon_threadsafe(running.stop)
                serving = asyncio.create_task(running.serve())
                await running.started.wait()
                ready.set()
                await serving

            found.thread = threading.Thread(target=asyncio.run, args=(main(),))
            found.thread.start()
            assert ready.wait(PATIENCE)

            def connect() -> socket.socket:
                return ending.enter_context(socket.create_connection(address, timeout=PATIENCE))

            def end() -> None:
                model.gate.set()
                with suppress(RuntimeError):  # it has ended
                    found.stop()
                    found.stop()
                found.thread.join(PATIENCE)
                assert not found.thread.is_alive()

            ending.callback(end)
            found.connect = connect
            return found

        yield start
