"""The ASGI application: routes and error handlers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from captioner import __version__
from captioner.api import Captioner
from captioner.errors import ConfigError
from captioner.serving.api_description import DESCRIPTION
from captioner.serving.api_pages import add_api_pages
from captioner.serving.connections import Drain
from captioner.serving.limits import Limits
from captioner.serving.metrics import AccessLog, Metrics
from captioner.serving.page import index_page, policy
from captioner.serving.requests import query_error
from captioner.serving.responses import (
    CLIENT_CLOSED,
    ERROR_RESPONSES,
    HealthResponse,
    RequestError,
    error_response,
)
from captioner.serving.routes import add_photo_routes
from captioner.serving.security import AllowedHosts, OriginCheck, SecurityHeaders, allowed_hosts
from captioner.serving.service import Service

_HTTP_ERRORS = {
    404: "not found; captions are at POST /v1/captions, the API is described at /docs",
    405: "method not allowed; see /docs",
}


def create_app(
    model: Captioner,
    limits: Limits | None = None,
    *,
    batch_size: int = 32,
    hosts: AllowedHosts | None = None,
) -> FastAPI:
    """Create the ASGI application; ``app.state.service`` is its `Service`.

    Args:
        model: The model; it must not be used elsewhere from now on.
        limits: Resource limits; None for the defaults.
        batch_size: Maximum number of photos in a batch.
        hosts: Accepted host names; None for loopback only.

    Raises:
        ConfigError: batch_size is less than 1.
    """
    if batch_size < 1:
        raise ConfigError(f"batch-size is {batch_size}; give 1 or more")
    limits = limits or Limits()
    metrics = Metrics()
    service = Service(model, limits, batch_size=batch_size, on_batch=metrics.on_batch)
    metrics.watch(lambda: service.batcher.waiting, lambda: service.in_flight)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        service.start()
        yield
        service.close()
        service.join()

    app = FastAPI(
        title="captioner",
        description=DESCRIPTION,
        version=__version__,
        docs_url=None,  # FastAPI's own pages load scripts from a CDN; see add_api_pages
        redoc_url=None,
        redirect_slashes=False,
        lifespan=lifespan,
    )
    app.state.service = service
    queries = add_photo_routes(app, service)
    add_api_pages(app)
    _add_other_routes(
        app, service, metrics, index_page(limits, model.options(), model.ensemble.image_size)
    )
    _add_error_handlers(app, metrics, queries)
    routes = {route.path for route in app.routes if hasattr(route, "path")}
    app.add_middleware(OriginCheck, hosts=hosts or allowed_hosts("127.0.0.1"), metrics=metrics)
    app.add_middleware(AccessLog, metrics=metrics, routes=routes)
    app.add_middleware(SecurityHeaders)
    app.add_middleware(Drain)  # outermost
    return app


def _add_other_routes(app: FastAPI, service: Service, metrics: Metrics, page: str) -> None:
    page_headers = {"Content-Security-Policy": policy(page)}

    @app.head("/healthz", include_in_schema=False)
    @app.get("/healthz", response_model=HealthResponse, responses={503: ERROR_RESPONSES[503]})
    async def healthz() -> Response:
        """Whether the server can caption photos."""
        if service.batcher.alive:
            return JSONResponse({"status": "ok"})
        message = "the model is not running; restart the server"
        return error_response(RequestError(503, "closing", message))

    @app.get(
        "/metrics",
        response_class=Response,
        responses={200: {"description": "Prometheus text format.", "content": {"text/plain": {}}}},
    )
    async def metrics_text() -> Response:
        """Metrics since the server started."""
        return Response(generate_latest(metrics.registry), media_type=CONTENT_TYPE_LATEST)

    @app.head("/", include_in_schema=False)
    @app.get("/", include_in_schema=False)
    async def index() -> Response:
        return HTMLResponse(page, headers=page_headers)

    @app.get("/favicon.ico", include_in_schema=False)
    async def favicon() -> Response:
        return Response(status_code=204)


def _add_error_handlers(
    app: FastAPI, metrics: Metrics, queries: Mapping[str, type[BaseModel]]
) -> None:
    """Return every error as one line of JSON, and count it."""

    def refuse(error: RequestError) -> Response:
        metrics.refused.labels(error.reason).inc()
        if error.status == CLIENT_CLOSED:
            return Response(status_code=CLIENT_CLOSED)  # the client has gone
        return error_response(error)

    @app.exception_handler(RequestError)
    async def request_error(_: Request, error: RequestError) -> Response:
        return refuse(error)

    @app.exception_handler(ConfigError)
    async def config_error(_: Request, error: ConfigError) -> Response:
        return refuse(RequestError(422, "options", str(error)))

    @app.exception_handler(RequestValidationError)
    async def validation_error(request: Request, error: RequestValidationError) -> Response:
        query = queries[request.scope["route"].path]
        return refuse(RequestError(422, "options", query_error(error.errors(), query)))

    @app.exception_handler(HTTPException)
    async def http_error(_: Request, error: HTTPException) -> Response:
        message = _HTTP_ERRORS.get(error.status_code, str(error.detail))
        response = refuse(RequestError(error.status_code, f"http_{error.status_code}", message))
        response.headers.update(error.headers or {})
        return response
