"""The ASGI application: routes and error handlers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import asynccontextmanager

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from captioner.errors import ConfigError
from captioner.inference.captioner import Captioner
from captioner.options import METHOD_TITLES
from captioner.serving.access_log import REQUEST_ID, AccessLog
from captioner.serving.api_description import DESCRIPTION, describe_keys
from captioner.serving.api_pages import add_api_pages
from captioner.serving.connections import Drain
from captioner.serving.keys import KEY_HEADER, ApiKeys, KeyCheck
from captioner.serving.lifecycle import Admission, Lifecycle, closing
from captioner.serving.limits import Limits
from captioner.serving.metrics import Metrics
from captioner.serving.page import index_page, policy
from captioner.serving.paths import RootPath
from captioner.serving.requests import query_error
from captioner.serving.responses import (
    CLIENT_CLOSED,
    ERROR_RESPONSES,
    HealthResponse,
    ReadyResponse,
    RequestError,
    error_response,
)
from captioner.serving.routes import add_photo_routes
from captioner.serving.security import AllowedHosts, OriginCheck, SecurityHeaders, allowed_hosts
from captioner.serving.service import Service
from captioner.version import __version__

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
    origins: Collection[str] = (),
    root_path: str = "",
    keys: ApiKeys | None = None,
    model_name: str = "captioner",
) -> FastAPI:
    """Create the ASGI application.

    ``app.state.service`` is its `Service`, ``app.state.lifecycle`` its `Lifecycle`.

    Args:
        model: The model; it must not be used elsewhere from now on.
        limits: Resource limits; None for the defaults.
        batch_size: Maximum number of photos in a batch.
        hosts: Accepted host names; None for loopback only.
        origins: Origins of web pages that may use the server, besides its own page.
        root_path: Prefix of the paths at the proxy, e.g. ``/captioner``.
        keys: API keys, one of which every caption request needs; None: open to all.
        model_name: Name of the model, returned as header ``X-Captioner-Model``.

    Raises:
        ConfigError: batch_size is less than 1.
    """
    if batch_size < 1:
        raise ConfigError(f"batch-size is {batch_size}; give 1 or more")
    limits = limits or Limits()
    metrics = Metrics()
    service = Service(model, limits, batch_size=batch_size, on_batch=metrics.on_batch)
    lifecycle = Lifecycle()
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
    app.state.service, app.state.lifecycle = service, lifecycle
    ready = {"status": "ok", "model": model_name, "version": __version__}
    versions = {"X-Captioner-Model": model_name, "X-Captioner-Version": __version__}
    queries = add_photo_routes(app, service)
    add_api_pages(app)
    _add_probes(app, service, lifecycle, metrics, ReadyResponse(**ready))
    methods = [method for method in METHOD_TITLES if _supports(model, method)]
    styles, size = model.stored.vocabulary.styles, model.ensemble.image_size
    _add_page(app, index_page(limits, model.options(), size, methods, styles))
    _add_error_handlers(app, metrics, queries)
    _add_middleware(
        app,
        metrics,
        hosts=hosts or allowed_hosts("127.0.0.1"),
        origins=origins,
        keys=keys,
        versions=versions,
    )
    if keys is not None:
        describe_keys(app)
    if root_path:
        app.add_middleware(RootPath, root_path=root_path)
    return app


def _supports(model: Captioner, method: str) -> bool:
    try:
        model.check_method(method)
    except ConfigError:
        return False
    return True


def _add_middleware(
    app: FastAPI,
    metrics: Metrics,
    *,
    hosts: AllowedHosts,
    origins: Collection[str],
    keys: ApiKeys | None,
    versions: dict[str, str],
) -> None:
    """Add the checks around the routes, from the innermost to the outermost.

    Refusals are inside of CORS, or else pages could not read them; preflights are outside of the
    key check, because browsers send them without a key.
    """
    routes = {route.path for route in app.routes if hasattr(route, "path")}
    if keys is not None:
        limit = app.state.service.limits.rate_limit
        app.add_middleware(KeyCheck, keys=keys, per_minute=limit, metrics=metrics)
    app.add_middleware(Admission, lifecycle=app.state.lifecycle, metrics=metrics)
    if origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(origins),
            allow_methods=["GET", "HEAD", "POST"],
            allow_headers=["Authorization", KEY_HEADER, REQUEST_ID],
            expose_headers=["Retry-After", REQUEST_ID, *versions],
        )
    app.add_middleware(OriginCheck, hosts=hosts, origins=frozenset(origins), metrics=metrics)
    app.add_middleware(AccessLog, metrics=metrics, routes=routes)
    app.add_middleware(SecurityHeaders, extra=versions)
    app.add_middleware(Drain)


def _add_probes(
    app: FastAPI, service: Service, lifecycle: Lifecycle, metrics: Metrics, ready: ReadyResponse
) -> None:
    """Health, readiness and metrics, for orchestrators and monitoring."""

    def stopped() -> Response:
        return error_response(
            RequestError(503, "closing", "the model is not running; restart the server")
        )

    @app.head("/healthz", include_in_schema=False)
    @app.get("/healthz", response_model=HealthResponse, responses={503: ERROR_RESPONSES[503]})
    async def healthz() -> Response:
        """Whether the process works; if not, restart it."""
        return JSONResponse({"status": "ok"}) if service.batcher.alive else stopped()

    @app.head("/readyz", include_in_schema=False)
    @app.get("/readyz", response_model=ReadyResponse, responses={503: ERROR_RESPONSES[503]})
    async def readyz() -> Response:
        """Whether to send requests to this server; 503 from the start of a shutdown."""
        if lifecycle.draining:
            return error_response(closing())
        return JSONResponse(ready.model_dump()) if service.batcher.alive else stopped()

    @app.get(
        "/metrics",
        response_class=Response,
        responses={200: {"description": "Prometheus text format.", "content": {"text/plain": {}}}},
    )
    async def metrics_text() -> Response:
        """Metrics since the server started."""
        return Response(generate_latest(metrics.registry), media_type=CONTENT_TYPE_LATEST)


def _add_page(app: FastAPI, page: str) -> None:
    page_headers = {"Content-Security-Policy": policy(page)}

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
