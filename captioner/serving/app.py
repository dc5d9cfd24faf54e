"""The ASGI application: routes, error handlers and the checks around them."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from functools import partial
from importlib.resources import files
from typing import Any, NamedTuple

import numpy as np
from fastapi import FastAPI, Request
from fastapi.openapi.docs import get_redoc_html, get_swagger_ui_html
from fastapi.responses import HTMLResponse, JSONResponse, RedirectResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from captioner.caption import Caption
from captioner.drawing import pages
from captioner.drawing.figure import overlay
from captioner.drawing.options import FigureOptions, PageOptions
from captioner.errors import ConfigError, ImageError
from captioner.inference.captioner import Captioner
from captioner.option_fields import option_fields
from captioner.serving import schema, security
from captioner.serving.bulk import NDJSON, BulkResponse
from captioner.serving.observe import REQUEST_ID, AccessLog
from captioner.serving.options import ResponseOptions, ServeOptions, WordOptions
from captioner.serving.page import index_page
from captioner.serving.protocols import IGNORED, add_protocols
from captioner.serving.request_errors import RequestError, closing, error_response
from captioner.serving.service import Decoded, Render, Service, captions_json
from captioner.version import __version__

DESCRIPTION = """Captions photos and returns where the model looked for every word.

There are three ways to send a photo, distinguished by the Content-Type:

    curl -F image=@photo.jpg http://localhost:8000/v1/captions
    curl --data-binary @photo.jpg http://localhost:8000/v1/captions
    echo '{"image": "'$(base64 -w0 photo.jpg)'"}' | curl --json @- http://localhost:8000/v1/captions

Options are query parameters, or fields of the form or of the JSON object. Errors are JSON,
`{"error": "..."}`, with one line that states what was given, what is allowed and what to do."""

_FORWARDED = frozenset({"forwarded", "via", "x-forwarded-for", "x-real-ip"})
MAX_FIGURE = 24_000_000  # pixels of a figure, each of 30 bytes while it is drawn


def _look(options: Any, kind: type) -> dict[str, Any]:
    """The options of a picture."""
    names = option_fields(kind).keys()
    return {name: value for name, value in options if name in names and value is not None}


def _figure(suffix: str, photo: Decoded, captions: Sequence[Caption], options: Any) -> bytes:
    """A figure in the format of a file name extension."""
    assert photo.picture is not None
    look = _look(options, FigureOptions)
    return overlay(photo.picture, captions, max_pixels=MAX_FIGURE, **look).encode(suffix)


def _page(photo: Decoded, captions: Sequence[Caption], options: Any) -> bytes:
    assert photo.picture is not None
    return pages.page(photo.picture, captions, **_look(options, PageOptions)).encode()


def _maps(_: Decoded, captions: Sequence[Caption], __: Any) -> bytes:
    if captions[0].keywords is not None:
        raise ConfigError("keywords is given, but an array holds the maps of a caption; omit it")
    if len(captions) > 1:
        raise ConfigError(
            f"an array holds the maps of one caption, not of {len(captions)}; give num_captions=1, "
            "or POST /v1/captions with attention=true to get all of them as JSON"
        )
    file = io.BytesIO()
    np.save(file, captions[0].alphas)
    return file.getvalue()


# Sandboxed: an opened document cannot send requests in the name of this server's page. The rest of
# a page's policy is in the page.
_PAGE_POLICY = "frame-ancestors 'none'; sandbox allow-scripts"
_SVG_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; img-src data:; font-src data:; "
    "frame-ancestors 'none'; sandbox"
)


class Output(NamedTuple):
    """An endpoint that takes a photo: what it makes of the captions.

    All take the same requests, with the options of a picture beside those of the search; ``words``
    explains or draws a caption of the client's own.
    """

    path: str
    summary: str
    media_type: str
    options: tuple[type, ...]
    """Dataclasses, beside that of the search."""
    render: Render
    policy: str | None = None
    """Content-Security-Policy of the body, for opening it in a browser."""


_LOOKED = "Draw where the model looked, as"
_FIGURE, _PAGE = (FigureOptions, WordOptions), (PageOptions, WordOptions)
_PNG, _SVG = partial(_figure, ".png"), partial(_figure, ".svg")
_JSON, _HTML = "application/json", "Make an interactive page of where the model looked"
_ARRAY = "Return the attention maps of a caption, a NumPy array (T, Gh, Gw)"

CAPTIONS = Output("/v1/captions", "Caption a photo", _JSON, (ResponseOptions,), captions_json)
OUTPUTS = (
    CAPTIONS,
    Output("/v1/overlay.png", f"{_LOOKED} PNG", "image/png", _FIGURE, _PNG),
    Output("/v1/overlay.svg", f"{_LOOKED} SVG", "image/svg+xml", _FIGURE, _SVG, _SVG_POLICY),
    Output("/v1/overlay.html", _HTML, "text/html", _PAGE, _page, _PAGE_POLICY),
    Output("/v1/maps.npy", _ARRAY, "application/octet-stream", (WordOptions,), _maps),
)


def create_app(
    model: Captioner, options: ServeOptions | None = None, *, model_name: str = "captioner"
) -> FastAPI:
    """Create the ASGI application; ``app.state.service`` is its `Service`, to be closed at the end.

    ``app.state.keys`` are the API keys; None: every client may send requests.

    Args:
        model: The model; it must not be used elsewhere from now on.
        options: Those of the command; None for the defaults.
        model_name: Name of the model, returned as header ``X-Captioner-Model``.
    """
    options = options or ServeOptions()

    app = FastAPI(
        title="captioner",
        description=DESCRIPTION,
        version=__version__,
        docs_url=None,  # see _add_api_pages
        redoc_url=None,
        openapi_url=None,
        redirect_slashes=False,
    )
    app.state.service = service = Service(model, options)
    keys = None
    if options.has_keys:
        keys = security.ApiKeys(options.api_key_file, options.api_keys or "")
    app.state.keys = keys
    checks = security.checks(keys, options.rate_limit)
    for output in OUTPUTS:
        _add_output(app, service, output, checks)
    _add_batch(app, service, checks)
    add_protocols(app, service, checks, model_name)
    _add_api_pages(app, keys=keys is not None)
    html = index_page(options, model)
    policy = pages.policy(html, connect="'self'") + "; frame-ancestors 'none'"
    _add_file(app, "/", HTMLResponse(html, headers={"Content-Security-Policy": policy}))
    _add_file(app, "/favicon.ico", Response(status_code=204))
    _add_probes(app, service, model_name)
    for kind in (RequestError, ConfigError, ImageError, HTTPException):
        app.add_exception_handler(kind, _refuse)

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
        leaving=lambda: service.leaving,
    )
    return app


def _add_output(app: FastAPI, service: Service, output: Output, checks: list[Any]) -> None:
    """Add an endpoint that takes a photo."""

    async def endpoint(request: Request) -> Response:
        body = await service.caption(request, query, output.render)
        headers = {"Content-Security-Policy": output.policy} if output.policy else {}
        return Response(body, media_type=output.media_type, headers=headers)

    if output is CAPTIONS:
        example, model, content = "?num_captions=3", schema.CaptionsResponse, {}
    else:
        example, model = f"' -o 'photo.{output.path.rpartition('.')[2]}", None
        binary = {} if output.media_type.startswith("text/") else {"format": "binary"}
        content = {output.media_type: {"schema": {"type": "string", **binary}}}
    name = output.path.removeprefix("/v1/").replace(".", "_")
    query = schema.query_model(service.options, *output.options)
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
        openapi_extra=schema.described_request(query, output.path + example),
    )(endpoint)


def _add_batch(app: FastAPI, service: Service, checks: list[Any]) -> None:
    query = schema.query_model(service.options, ResponseOptions)

    async def batch(request: Request) -> Response:
        """Caption many photos; the results are in their order, each with its own status.

        With `Accept: application/x-ndjson`, the response is a line per photo, sent as soon as it is
        ready, and the number of photos is not limited.
        """
        return BulkResponse(service, request, schema.read_query(request.query_params, query))

    lines = {NDJSON: {"schema": {"$ref": "#/components/schemas/BatchResult"}}}
    app.post(
        "/v1/batch",
        summary="Caption many photos",
        dependencies=checks,
        response_model=schema.BatchResponse,
        responses={**schema.ERROR_RESPONSES, 200: {"content": lines}},
        openapi_extra=schema.described_request(query, "/v1/batch", several=True),
    )(batch)


def _add_api_pages(app: FastAPI, *, keys: bool) -> None:
    """Add ``/openapi.json``, ``/docs`` (Swagger UI) and ``/redoc``, which need no network.

    The commands in it have the address that was requested and, with ``keys``, a header for one.
    FastAPI's own pages load scripts from another host; the package fastapi-offline has these files.
    Addresses are relative, so that they also hold below a proxy's prefix.
    """

    async def described(request: Request) -> Response:
        address = json.dumps(str(request.base_url).rstrip("/"))[1:-1]
        curl = "curl -H 'Authorization: Bearer KEY' " if keys else "curl "
        text = json.dumps(app.openapi()).replace("http://localhost:8000", address)
        prefix = request.scope.get("root_path")
        servers = {"servers": [{"url": prefix}]} if prefix else {}
        return JSONResponse(json.loads(text.replace("curl ", curl)) | servers)

    app.add_route("/openapi.json", described, include_in_schema=False)
    same: dict[str, Any] = {"openapi_url": "openapi.json", "title": "captioner API"}
    js, css, redoc_js = "swagger-ui-bundle.js", "swagger-ui.css", "redoc.standalone.js"
    swagger = get_swagger_ui_html(
        **same,
        swagger_js_url=f"docs/{js}",
        swagger_css_url=f"docs/{css}",
        swagger_favicon_url="data:,",
    )
    redoc = get_redoc_html(
        **same, redoc_js_url=f"docs/{redoc_js}", redoc_favicon_url="data:,", with_google_fonts=False
    )
    for path, response in {"/docs": swagger, "/redoc": redoc}.items():
        html = bytes(response.body).decode()
        scripts = pages.hashes("script", html) if "<script>" in html else ""
        response.headers["Content-Security-Policy"] = (
            f"default-src 'none'; script-src 'self' {scripts}; "
            "style-src 'self' 'unsafe-inline'; worker-src blob:; img-src 'self' data: blob:; "
            "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        )
        _add_file(app, path, response)
    for name, kind in {css: "text/css", js: "text/javascript", redoc_js: "text/javascript"}.items():
        content = (files("fastapi_offline") / "static" / name).read_bytes()
        content = content.replace(b"https://cdn.redoc.ly/redoc/logo-mini.svg", b"data:,")
        headers = {"Cache-Control": "max-age=86400"}
        _add_file(app, f"/docs/{name}", Response(content, media_type=kind, headers=headers))


def _add_file(app: FastAPI, path: str, response: Response) -> None:
    """Add a page that is not part of the API."""

    async def file(_: Any) -> Response:
        return response

    app.add_route(path, file, include_in_schema=False)


def _add_probes(app: FastAPI, service: Service, model_name: str) -> None:
    """Health, readiness and metrics, for orchestrators and monitoring."""
    unavailable: dict[int | str, Any] = {503: schema.ERROR_RESPONSES[503]}

    @app.head("/healthz", include_in_schema=False)
    @app.get("/healthz", responses=unavailable)
    async def healthz() -> dict[str, str]:
        """Whether the process responds; 503 only at the end of a shutdown."""
        if service.captions.closed:
            raise closing()
        return {"status": "ok"}

    @app.head("/readyz", include_in_schema=False)
    @app.get("/readyz", responses=unavailable)
    async def readyz() -> dict[str, str]:
        """Whether to send requests to this server; 503 from SIGTERM on.

        With the name and fingerprint of its model, and captioner's version.
        """
        if service.leaving:
            raise closing()
        return {"status": "ok", "model": model_name, "version": __version__}

    text = {"description": "Prometheus text format.", "content": {"text/plain": {}}}

    if service.options.metrics_port is not None:
        return

    @app.get("/metrics", response_class=Response, responses={200: text})
    async def metrics_text(request: Request) -> Response:
        """Metrics since the server started; 404 for requests that come through a proxy.

        A proxy that should keep the path to itself may pass another spelling of it.
        """
        if request.scope["path"] != "/metrics" or _FORWARDED & {*request.headers}:
            raise HTTPException(404)
        return Response(generate_latest(service.metrics.registry), media_type=CONTENT_TYPE_LATEST)


async def _refuse(request: Request, error: Exception) -> Response:
    """Return every error as one line of JSON."""
    prefix = request.scope.get("root_path")
    if isinstance(error, HTTPException) and prefix == request.scope["path"] and prefix:
        return RedirectResponse(f"{prefix}/", 308)  # the page's links are relative to it
    return error_response(error, request.scope)
