"""A running application with a model that captions a photo with its colour."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest
from colour_server import PATIENCE, ColourModel, Server
from running import running

from captioner.serving.app import create_app
from captioner.serving.options import ServeOptions


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def model() -> ColourModel:
    return ColourModel()


@pytest.fixture
async def serve(model) -> AsyncIterator[Callable[..., Awaitable[Server]]]:
    """``await serve(**options)`` starts an application; ``of`` is its model."""
    started: list[Server] = []

    async def start(*, of: Any = model, model_name="captioner", **options) -> Server:
        made = create_app(of, ServeOptions(**{"batch_size": 8, **options}), model_name=model_name)
        started.append(Server(made, of))
        return started[-1]

    yield start
    model.gate.set()
    for server in started:
        server.service.close()


@pytest.fixture
def listening() -> Iterator[Callable[..., SimpleNamespace]]:
    """``listening(timeout=1)`` starts a server over sockets.

    The result has ``connect()``, ``model`` and ``running``. ``of`` is its model.
    """
    with ExitStack() as ending:

        def start(*, of: Any = None, model_name="captioner", **options: Any) -> SimpleNamespace:
            model = of or ColourModel()
            application = create_app(model, ServeOptions(**options), model_name=model_name)
            found = ending.enter_context(running(application))
            ending.callback(model.gate.set)
            found.model = model
            found.connect = lambda: ending.enter_context(
                socket.create_connection(found.address, timeout=PATIENCE)
            )
            return found

        yield start
