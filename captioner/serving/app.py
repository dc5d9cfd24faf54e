"""The ASGI application: routes, error handlers and the checks around them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from typing import Annotated, Any

from fastapi import FastAPI, Query, Request, Security
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, Response
from fastapi.security import APIKeyHeader, HTTPBearer
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.types import Scope

from captioner.errors import ConfigError
from captioner.inference.captioner import Captioner
from captioner.serving.api_docs import (
    BATCH_EXAMPLE,
    CAPTIONS_EXAMPLE,
    DESCRIPTION,
    add_api_pages,
    request_body,
)
from captioner.serving.bulk import NDJSON, BulkResponse
from captioner.serving.keys import KEY_HEADER, ApiKeys, KeyCheck
from captioner.serving.observe import REQUEST_ID, AccessLog, Metrics, route_path
from captioner.serving.options import Limits
from captioner.serving.outputs import CAPTIONS, OVERLAYS, Output
from captioner.serving.page import index_page, policy
from captioner.serving.requests import query_error, query_model
from captioner.serving.responses import (
    ERROR_RESPONSES,
    BatchResponse,
    CaptionsResponse,
    HealthResponse,
    ReadyResponse,
    RequestError,
    closing,
    error_response,
    json_line,
)
from captioner.serving.security import (
    HEADERS,
    PROBES,
    AllowedHosts,
    Guard,
    OriginCheck,
    RootPath,
    allowed_hosts,
)
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
    """Create the ASGI application; ``app.state.service`` is its `Service`.

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
        docs_url=None,  # see add_api_pages
        redoc_url=None,
        redirect_slashes=False,
        lifespan=lifespan,
    )
    app.state.service = service
    app.state.queries = {}  # the options of each endpoint by its path
    _add_photo_routes(app, service, has_keys=keys is not None)
    add_api_pages(app)
    ready = ReadyResponse(status="ok", model=model_name, version=__version__)
    _add_probes(app, service, metrics, ready)
    _add_page(app, index_page(limits, model))
    _add_error_handlers(app, metrics)

    # From the innermost to the outermost. Refusals are inside of CORS, or else pages could not read
    # them; preflights are outside of the key check, because browsers send them without a key.
    versions = {"X-Captioner-Model": model_name, "X-Captioner-Version": __version__}
    if keys is not None:
        app.add_middleware(Guard, check=KeyCheck(keys, limits.rate_limit), metrics=metrics)
    app.add_middleware(Guard, check=_refused_when_draining(service), metrics=metrics)
    if origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(origins),
            allow_methods=["GET", "HEAD", "POST"],
            allow_headers=["Authorization", KEY_HEADER, REQUEST_ID],
            expose_headers=["Retry-After", REQUEST_ID, *versions],
        )
    check = OriginCheck(hosts or allowed_hosts("127.0.0.1"), frozenset(origins))
    app.add_middleware(Guard, check=check, metrics=metrics)
    routes = {route.path for route in app.routes if hasattr(route, "path")}
    app.add_middleware(AccessLog, metrics=metrics, routes=routes, headers=HEADERS | versions)
    if root_path:
        app.add_middleware(RootPath, root_path=root_path)
    return app


def _refused_when_draining(service: Service) -> Callable[[Scope], RequestError | None]:
    def check(scope: Scope) -> RequestError | None:
        return closing() if service.draining and route_path(scope) not in PROBES else None

    return check


def _add_photo_routes(app: FastAPI, service: Service, *, has_keys: bool) -> None:
    """Add the endpoints that take photos."""
    schemes = (HTTPBearer(auto_error=False), APIKeyHeader(name=KEY_HEADER, auto_error=False))
    # These only describe the keys; KeyCheck checks them before a body is read.
    dependencies = [Security(scheme) for scheme in schemes] if has_keys else []
    _add_output(app, service, CAPTIONS, dependencies)
    query = app.state.queries["/v1/batch"] = query_model(service.limits)

    async def batch(request: Request, parameters: Any) -> Response:
        """Caption many photos; the results are in their order, each with its own status.

        With `Accept: application/x-ndjson`, the response is a line per photo, sent as soon as it is
        ready, and the number of photos is not limited.
        """
        return BulkResponse(service, request, parameters)

    lines = b"".join(json_line(one) + b"\n" for one in BATCH_EXAMPLE["results"]).decode()
    content = {
        "application/json": {"example": BATCH_EXAMPLE},
        NDJSON: {"schema": {"$ref": "#/components/schemas/BatchResult"}, "example": lines},
    }
    app.post(
        "/v1/batch",
        summary="Caption many photos",
        dependencies=dependencies,
        response_model=BatchResponse,
        responses={**ERROR_RESPONSES, 200: {"content": content}},
        openapi_extra=request_body(query, "/v1/batch", several=True),
    )(_with_query(batch, query))
    for output in OVERLAYS:
        _add_output(app, service, output, dependencies)


def _add_output(app: FastAPI, service: Service, output: Output, dependencies: Any) -> None:
    async def endpoint(request: Request, parameters: Any) -> Response:
        body = await service.caption(request, parameters, output.renderer)
        headers = {"Content-Security-Policy": output.policy(body)} if output.policy else {}
        return Response(body, media_type=output.media_type, headers=headers)

    name = output.path.removeprefix("/v1/").replace(".", "_")
    query = app.state.queries[output.path] = query_model(service.limits, name, output.options)
    binary = {"schema": {"type": "string", "format": "binary"}}
    content = {"example": CAPTIONS_EXAMPLE} if output is CAPTIONS else binary
    ending = output.path.rpartition(".")[2]
    example = "?num_captions=3" if output is CAPTIONS else f"' -o 'photo.{ending}"
    app.post(
        output.path,
        summary=output.summary,
        operation_id=name,
        dependencies=dependencies,
        response_class=Response,
        response_model=CaptionsResponse if output is CAPTIONS else None,
        responses={
            **ERROR_RESPONSES,
            200: {"description": output.summary, "content": {output.media_type: content}},
        },
        openapi_extra=request_body(query, output.path + example),
    )(_with_query(endpoint, query))


def _with_query(endpoint: Callable[..., Any], query: type[BaseModel]) -> Callable[..., Any]:
    """Declare the query of an endpoint, whose model is created at run time."""
    endpoint.__annotations__["parameters"] = Annotated[query, Query()]
    return endpoint


def _add_probes(app: FastAPI, service: Service, metrics: Metrics, ready: ReadyResponse) -> None:
    """Health, readiness and metrics, for orchestrators and monitoring."""

    def stopped() -> Response:
        message = "the model is not running; restart the server"
        return error_response(RequestError(503, "closing", message))

    @app.head("/healthz", include_in_schema=False)
    @app.get("/healthz", response_model=HealthResponse, responses={503: ERROR_RESPONSES[503]})
    async def healthz() -> Response:
        """Whether the process works; if not, restart it."""
        return JSONResponse({"status": "ok"}) if service.batcher.alive else stopped()

    @app.head("/readyz", include_in_schema=False)
    @app.get("/readyz", response_model=ReadyResponse, responses={503: ERROR_RESPONSES[503]})
    async def readyz() -> Response:
        """Whether to send requests to this server; 503 from the start of a shutdown."""
        if service.draining:
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


def _add_error_handlers(app: FastAPI, metrics: Metrics) -> None:
    """Return every error as one line of JSON, and count it."""

    def refuse(error: RequestError) -> Response:
        metrics.refused.labels(error.reason).inc()
        return error_response(error)

    @app.exception_handler(RequestError)
    async def request_error(_: Request, error: RequestError) -> Response:
        return refuse(error)

    @app.exception_handler(ConfigError)
    async def config_error(_: Request, error: ConfigError) -> Response:
        return refuse(RequestError(422, "options", str(error)))

    @app.exception_handler(RequestValidationError)
    async def validation_error(request: Request, error: RequestValidationError) -> Response:
        query = app.state.queries[request.scope["route"].path]
        return refuse(RequestError(422, "options", query_error(error.errors(), query)))

    @app.exception_handler(HTTPException)
    async def http_error(_: Request, error: HTTPException) -> Response:
        message = _HTTP_ERRORS.get(error.status_code, str(error.detail))
        response = refuse(RequestError(error.status_code, f"http_{error.status_code}", message))
        response.headers.update(error.headers or {})
        return response
