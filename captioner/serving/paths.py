"""Paths of requests, without the prefix that a proxy may add."""

from __future__ import annotations

from starlette.responses import RedirectResponse
from starlette.types import ASGIApp, Receive, Scope, Send

PROBES = frozenset({"/healthz", "/readyz", "/metrics"})
"""Paths for orchestrators and monitoring: open to any Host, needing no key, answered while the
server drains. They reveal counts only."""

API = "/v1/"
"""Prefix of the paths that need an API key, if there are any keys."""


def route_path(scope: Scope) -> str:
    """The path of a request without the proxy's prefix."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


class RootPath:
    """Middleware for a server whose proxy publishes it under a prefix (``--root-path``).

    Both kinds of proxies work: those that remove the prefix, and those that keep it.
    """

    def __init__(self, app: ASGIApp, root_path: str) -> None:
        self.app = app
        self.root_path = root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on with ASGI's ``root_path``, which ``path`` includes."""
        if scope["type"] == "http":
            if scope["path"] == self.root_path:  # the page's links are relative to its folder
                response = RedirectResponse(f"{self.root_path}/", 308)
                await response(scope, receive, send)
                return
            kept = scope["path"].startswith(f"{self.root_path}/")
            path = scope["path"] if kept else self.root_path + scope["path"]
            scope = {**scope, "root_path": self.root_path, "path": path}
        await self.app(scope, receive, send)
