"""The ASGI application: routes, error handlers and the checks around them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated, Any, get_args

from fastapi import FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, RedirectResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from captioner.errors import ConfigError
from captioner.inference.captioner import Captioner
from captioner.serving import schema, security
from captioner.serving.api_docs import DESCRIPTION, add_api_pages, add_file, request_body
from captioner.serving.bulk import NDJSON, BulkResponse
from captioner.serving.observe import REQUEST_ID, AccessLog, route_path
from captioner.serving.options import ServeOptions
from captioner.serving.outputs import CAPTIONS, OUTPUTS
from captioner.serving.page import index_page, policy
from captioner.serving.protocols import IGNORED, add_protocols, error_body
from captioner.serving.schema import RequestError
from captioner.serving.service import Output, Service
from captioner.version import __version__

_HTTP_ERRORS = {
    404: "not found; captions are at POST /v1/captions, the API is described at /docs",
    405: "method not allowed; see /docs",
}


def create_app(
    model: Captioner,
    options: ServeOptions | None = None,
    *,
    keys: security.ApiKeys | None = None,
    model_name: str = "captioner",
) -> FastAPI:
    """Create the ASGI application; ``app.state.service`` is its `Service`.

    Args:
        model: The model; it must not be used elsewhere from now on.
        options: Those of the command; None for the defaults.
        keys: API keys, one of which every caption request needs; None: open to all.
        model_name: Name of the model, returned as header ``X-Captioner-Model``.
    """
    options = options or ServeOptions()

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        service.close()

    app = FastAPI(
        title="captioner",
        description=DESCRIPTION,
        version=__version__,
        docs_url=None,  # see add_api_pages
        redoc_url=None,
        openapi_url=None,
        redirect_slashes=False,
        lifespan=lifespan,
    )
    app.state.service = service = Service(model, options)
    checks = security.checks(keys, options.rate_limit)
    for output in OUTPUTS:
        _add_output(app, service, output, checks)
    _add_batch(app, service, checks)
    add_protocols(app, service, checks, model_name)
    add_api_pages(app, keys=keys is not None)
    page = index_page(options, model)
    add_file(app, "/", HTMLResponse(page, headers={"Content-Security-Policy": policy(page)}))
    add_file(app, "/favicon.ico", Response(status_code=204))
    _add_probes(app, service, model_name)
    _add_error_handlers(app, service)

    # From the innermost to the outermost. Pages of allowed origins can read all errors but those of
    # the outer checks.
    versions = {"X-Captioner-Model": model_name, "X-Captioner-Version": __version__}
    if options.allow_origin:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=options.allow_origin,
            allow_methods=["GET", "HEAD", "POST"],
            allow_headers=["Authorization", security.KEY_HEADER, REQUEST_ID],
            expose_headers=["Retry-After", REQUEST_ID, IGNORED, *versions],
        )
    routes = {route.path for route in app.routes if hasattr(route, "path")}
    app.add_middleware(
        AccessLog,
        metrics=service.metrics,
        check=security.origin_check(options),
        routes=routes,
        headers=security.HEADERS | versions,
        root_path=options.root_path,
    )
    return app


def _add_output(app: FastAPI, service: Service, output: Output, checks: list[Any]) -> None:
    """Add an endpoint that takes a photo."""

    async def endpoint(request: Request, query: schema.RequestQuery) -> Response:
        body = await service.caption(request, query, output)
        headers = {"Content-Security-Policy": output.policy(body)} if output.policy else {}
        return Response(body, media_type=output.media_type, headers=headers)

    if output is CAPTIONS:
        example, model, content = "?num_captions=3", schema.CaptionsResponse, {}
    else:
        example, model = f"' -o 'photo.{output.path.rpartition('.')[2]}", None
        binary = {} if output.media_type.startswith("text/") else {"format": "binary"}
        content = {output.media_type: {"schema": {"type": "string", **binary}}}
    name = output.path.removeprefix("/v1/").replace(".", "_")
    query = schema.query_model(service.options, name, *output.options)
    endpoint.__annotations__["query"] = Annotated[query, Query()]
    app.post(
        output.path,
        summary=output.summary,
        operation_id=name,
        dependencies=checks,
        response_model=model,
        responses={
            **schema.ERROR_RESPONSES,
            200: {"description": output.summary, "content": content},
        },
        openapi_extra=request_body(query, output.path + example),
    )(endpoint)


def _add_batch(app: FastAPI, service: Service, checks: list[Any]) -> None:
    async def batch(request: Request, query: schema.RequestQuery) -> Response:
        """Caption many photos; the results are in their order, each with its own status.

        With `Accept: application/x-ndjson`, the response is a line per photo, sent as soon as it is
        ready, and the number of photos is not limited.
        """
        return BulkResponse(service, request, query)

    query = schema.query_model(service.options, "batch", schema.ResponseOptions)
    batch.__annotations__["query"] = Annotated[query, Query()]
    lines = {NDJSON: {"schema": {"$ref": "#/components/schemas/BatchResult"}}}
    app.post(
        "/v1/batch",
        summary="Caption many photos",
        dependencies=checks,
        response_model=schema.BatchResponse,
        responses={**schema.ERROR_RESPONSES, 200: {"content": lines}},
        openapi_extra=request_body(query, "/v1/batch", several=True),
    )(batch)


def _add_probes(app: FastAPI, service: Service, model_name: str) -> None:
    """Health, readiness and metrics, for orchestrators and monitoring."""
    unavailable: dict[int | str, Any] = {503: schema.ERROR_RESPONSES[503]}

    @app.head("/healthz", include_in_schema=False)
    @app.get("/healthz", responses=unavailable)
    async def healthz() -> dict[str, str]:
        """Whether the process responds; 503 only at the end of a shutdown."""
        if service.captions.closed:
            raise schema.closing()
        return {"status": "ok"}

    @app.head("/readyz", include_in_schema=False)
    @app.get("/readyz", responses=unavailable)
    async def readyz() -> dict[str, str]:
        """Whether to send requests to this server; 503 from the start of a shutdown.

        With the name and fingerprint of its model, and captioner's version.
        """
        if service.draining:
            raise schema.closing()
        return {"status": "ok", "model": model_name, "version": __version__}

    text = {"description": "Prometheus text format.", "content": {"text/plain": {}}}

    @app.get("/metrics", response_class=Response, responses={200: text})
    async def metrics_text() -> Response:
        """Metrics since the server started."""
        return Response(generate_latest(service.metrics.registry), media_type=CONTENT_TYPE_LATEST)


def _add_error_handlers(app: FastAPI, service: Service) -> None:
    """Return every error as one line of JSON, and count it."""

    async def refuse(request: Request, error: Any) -> Response:
        headers: dict[str, str] = {}
        if isinstance(error, RequestValidationError):
            query = get_args(request.scope["endpoint"].__annotations__["query"])[0]
            error = RequestError(422, "options", schema.query_error(error.errors(), query))
        elif isinstance(error, ConfigError):
            error = RequestError(422, "options", str(error))
        elif isinstance(error, HTTPException):
            status, headers = error.status_code, dict(error.headers or {})
            prefix = request.scope.get("root_path")
            if status == 404 and prefix and request.scope["path"] == prefix:
                return RedirectResponse(f"{prefix}/", 308)  # the page's links are relative to it
            message = _HTTP_ERRORS.get(status, str(error.detail))
            error = RequestError(status, f"http_{status}", message)
        service.metrics.refused.labels(error.reason).inc()
        response: Response = error.response(error_body(route_path(request.scope), error))
        response.headers.update(headers)
        return response

    for kind in (RequestError, ConfigError, RequestValidationError, HTTPException):
        app.add_exception_handler(kind, refuse)
