"""A running application with a model that captions a photo with its colour."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
from colour_server import ColourModel, Server

from captioner.serving.app import create_app
from captioner.serving.options import Limits


@pytest.fixture
def model() -> ColourModel:
    return ColourModel()


@pytest.fixture
def serve(model):
    """``serve(test, **limits)`` runs ``await test(server)`` against a running application.

    ``app`` has further arguments of ``create_app``.
    """

    def run(
        test: Callable[[Server], Awaitable[None]], *, batch_size=8, of=model, app=None, **limits
    ) -> None:
        @asynccontextmanager
        async def running(app):
            async with app.router.lifespan_context(app):
                try:
                    yield Server(app, of)
                finally:
                    getattr(of, "gate", threading.Event()).set()  # or shutdown would wait for it

        async def main() -> None:
            made = create_app(of, Limits(**limits), batch_size=batch_size, **(app or {}))
            async with running(made) as server:
                await test(server)

        asyncio.run(main())

    return run
