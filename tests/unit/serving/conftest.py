"""A running application with a model that captions a photo with its colour."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest
from colour_server import ColourModel, Server

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
    """``await serve(**options)`` starts an application; ``app`` are arguments of ``create_app``."""
    async with AsyncExitStack() as running:

        async def start(*, of: Any = model, batch_size=8, app=None, **options) -> Server:
            made = create_app(of, ServeOptions(batch_size=batch_size, **options), **(app or {}))
            await running.enter_async_context(made.router.lifespan_context(made))
            return Server(made, of)

        yield start
        model.gate.set()  # or shutdown would wait for it
