"""The ASGI application: its endpoints, and the checks around them.

A request with a photo passes through these modules in turn:

    app        the route, with an API key and a rate limit as its dependencies
    service    `Service.caption`: a place in the queue, deadlines, decoding, captioning
    requests   the options and the photo, read from the query and the body
    lanes      the wait for the client's turn, then a batch for the model
    app        the response, rendered from the captions

An exception in any of these modules becomes a response in `request_errors`. Two modules wrap the
application: `observe` (log, metrics, and the host and origin checks in `security`) and `server`
(connections and signals).
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from captioner.caption_types import Caption
from captioner.drawing import pages
from captioner.drawing.figure import overlay
from captioner.drawing.options import FigureOptions, PageOptions
from captioner.errors import ConfigError, ImageError
from captioner.inference.captioner import Captioner
from captioner.schema import option_fields
from captioner.serving import openapi, security
from captioner.serving.batch_endpoint import NDJSON, BulkResponse
from captioner.serving.observe import REQUEST_ID, AccessLog
from captioner.serving.options import ResponseOptions, ServeOptions, WordOptions
from captioner.serving.page import index_page
from captioner.serving.protocols import IGNORED, add_protocols
from captioner.serving.request_errors import RequestError, closing, error_response, logger
from captioner.serving.requests import JSON, query_model, read_query
from captioner.serving.service import Decoded, Render, Service
from captioner.version import __version__

DESCRIPTION = """This API captions photos and returns where the model looked for each word.

There are three ways to send a photo, distinguished by the Content-Type:

    curl -F image=@photo.jpg http://localhost:8000/v1/captions
    curl --data-binary @photo.jpg http://localhost:8000/v1/captions
    echo '{"image": "'$(base64 -w0 photo.jpg)'"}' | curl --json @- http://localhost:8000/v1/captions

Options are query parameters, or fields of the form or of the JSON object. Errors are JSON,
`{"error": "..."}`, with one line: the problem, the allowed values, and a remedy."""

# Headers that proxies add to requests.
_FORWARDED = frozenset({"forwarded", "via", "x-forwarded-for", "x-real-ip"})
MAX_FIGURE = 24_000_000  # most pixels of a figure; drawing needs 30 bytes of memory per pixel


# --- endpoints that take a photo -----------------------------------------------------------------


class Endpoint(NamedTuple):
    """An endpoint that takes a photo and returns a response that shows its captions."""

    path: str
    summary: str
    media_type: str
    options: tuple[type, ...]
    """Dataclasses with the endpoint's options, in addition to the search options. If a field is
    named ``words``, clients can pass their own caption. If a field is named ``panel_size``, the
    response is a picture."""
    policy: str | None
    """Header Content-Security-Policy of the response, or None for the default policy of the server.
    It applies if a browser opens the response as a page."""
    render: Render


ENDPOINTS: list[Endpoint] = []


def endpoint(
    path: str, summary: str, media_type: str, *options: type, policy: str | None = None
) -> Callable[[Render], Render]:
    """Register the decorated function, which renders responses, as an endpoint.

    The arguments are the fields of `Endpoint`.
    """

    def add(render: Render) -> Render:
        ENDPOINTS.append(Endpoint(path, summary, media_type, options, policy, render))
        return render

    return add


@endpoint("/v1/captions", "Caption a photo", JSON, ResponseOptions)
def captions(photo: Decoded, found: Sequence[Caption], options: Any, **head: Any) -> bytes:
    """Render the captions of a photo and its size in pixels as JSON.

    The additional fields in ``head`` come first.
    """
    how = {"attention": options.attention, "min_confidence": options.min_confidence}
    width, height = photo.size
    captions = [caption.to_dict(**how) for caption in found]
    return openapi.json_line({**head, "width": width, "height": height, "captions": captions})


def _figure(suffix: str, photo: Decoded, found: Sequence[Caption], options: Any) -> bytes:
    assert photo.picture is not None
    look = _look(options, FigureOptions)
    try:
        return overlay(photo.picture, found, max_pixels=MAX_FIGURE, **look).encode(suffix)
    except OSError as error:
        if "MPLCONFIGDIR" not in str(error):  # the advice of matplotlib, raised by its import
            raise
        message = (
            "the server cannot draw figures, because Matplotlib has no writable folder; set the "
            "variable MPLCONFIGDIR of the server to a writable folder"
        )
        logger.error(message)
        raise RequestError(500, "drawing", message) from error


def _look(options: Any, kind: type) -> dict[str, Any]:
    """Return the options of the dataclass ``kind`` that a request sets, by name."""
    names = option_fields(kind).keys()
    return {name: value for name, value in options if name in names and value is not None}


@endpoint(
    "/v1/overlay.png",
    "Draw where the model looked, as PNG",
    "image/png",
    *(FigureOptions, WordOptions),
)
def overlay_png(photo: Decoded, found: Sequence[Caption], options: Any) -> bytes:
    """Render a figure of the photo with an attention map per word, as PNG."""
    return _figure(".png", photo, found, options)


# The sandbox keeps an opened document from sending requests in the name of this server's page.
@endpoint(
    "/v1/overlay.svg",
    "Draw where the model looked, as SVG",
    "image/svg+xml",
    *(FigureOptions, WordOptions),
    policy="default-src 'none'; style-src 'unsafe-inline'; img-src data:; font-src data:; "
    "frame-ancestors 'none'; sandbox",
)
def overlay_svg(photo: Decoded, found: Sequence[Caption], options: Any) -> bytes:
    """Render a figure of the photo with an attention map per word, as SVG."""
    return _figure(".svg", photo, found, options)


@endpoint(
    "/v1/overlay.html",
    "Make an interactive page that shows where the model looked",
    "text/html",
    *(PageOptions, WordOptions),
    policy="frame-ancestors 'none'; sandbox allow-scripts",  # the page itself sets the other rules
)
def overlay_html(photo: Decoded, found: Sequence[Caption], options: Any) -> bytes:
    """Render an interactive HTML page with the photo and an attention map per word."""
    assert photo.picture is not None
    return pages.page(photo.picture, found, **_look(options, PageOptions)).encode()


@endpoint(
    "/v1/maps.npy",
    "Return the attention maps of a caption as a NumPy array (T, Gh, Gw)",
    "application/octet-stream",
    WordOptions,
)
def maps(_: Decoded, found: Sequence[Caption], __: Any) -> bytes:
    """Render the attention maps of a single caption, (T, Gh, Gw), as a NumPy file.

    Raises:
        ConfigError: Keywords or several captions were requested.
    """
    if found[0].keywords is not None:
        raise ConfigError(
            "keywords cannot be combined with /v1/maps.npy; leave out keywords, or POST to "
            "/v1/captions with attention=true"
        )
    if len(found) > 1:
        raise ConfigError(
            "/v1/maps.npy returns the maps of one caption, but num_captions is "
            f"{len(found)}; use num_captions=1, or POST to /v1/captions with attention=true"
        )
    file = io.BytesIO()
    np.save(file, found[0].alphas)
    return file.getvalue()


# --- the application -----------------------------------------------------------------------------


def create_app(
    model: Captioner, options: ServeOptions | None = None, *, model_name: str = "captioner"
) -> FastAPI:
    """Create the ASGI application.

    ``app.state.service`` is the `Service` of the application. Close the service at the end.
    ``app.state.keys`` contains the API keys, or None if no key is required.

    Args:
        model: The model. From now on, only the application may use it.
        options: Options of ``captioner serve``, or None for the defaults.
        model_name: Name of the model, returned in the header ``X-Captioner-Model``.
    """
    options = options or ServeOptions()

    app = FastAPI(
        title="captioner",
        description=DESCRIPTION,
        version=__version__,
        docs_url=None,  # see openapi.add_api_pages
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
    for one in ENDPOINTS:
        _add_endpoint(app, service, one, checks)
    _add_batch(app, service, checks)
    add_protocols(app, service, checks, model_name)
    openapi.add_api_pages(app, keys=keys is not None)
    html = index_page(options, model)
    policy = pages.policy(html, connect="'self'") + "; frame-ancestors 'none'"
    openapi.add_file(app, "/", HTMLResponse(html, headers={"Content-Security-Policy": policy}))
    openapi.add_file(app, "/favicon.ico", Response(status_code=204))
    _add_probes(app, service, model_name)
    for kind in (RequestError, ConfigError, ImageError, HTTPException):
        app.add_exception_handler(kind, _refuse)

    # Middleware, from the innermost to the outermost. AccessLog runs the host and origin checks
    # outside the CORS middleware, so web pages from allowed origins cannot read errors of these
    # checks.
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


def _add_endpoint(app: FastAPI, service: Service, endpoint: Endpoint, checks: list[Any]) -> None:
    """Add an endpoint that takes a photo."""
    query = query_model(service.options, *endpoint.options)
    headers = {"Content-Security-Policy": endpoint.policy} if endpoint.policy else {}

    async def respond(request: Request) -> Response:
        body = await service.caption(request, query, endpoint.render)
        return Response(body, media_type=endpoint.media_type, headers=headers)

    if endpoint.media_type == JSON:
        example, model, content = "?num_captions=3", openapi.CaptionsResponse, {}
    else:
        example, model = f"' -o 'photo.{endpoint.path.rpartition('.')[2]}", None
        binary = {} if endpoint.media_type.startswith("text/") else {"format": "binary"}
        content = {endpoint.media_type: {"schema": {"type": "string", **binary}}}
    app.post(
        endpoint.path,
        summary=endpoint.summary,
        operation_id=endpoint.path.removeprefix("/v1/").replace(".", "_"),
        dependencies=checks,
        response_model=model,
        responses={
            **openapi.error_responses(endpoint.path),
            200: {"description": endpoint.summary, "content": content},
        },
        openapi_extra=openapi.described_request(query, endpoint.path + example),
    )(respond)


def _add_batch(app: FastAPI, service: Service, checks: list[Any]) -> None:
    query = query_model(service.options, ResponseOptions)

    async def batch(request: Request) -> Response:
        """Caption many photos, and return their results in order, each with its own status.

        With `Accept: application/x-ndjson`, the response has one line per photo. Each line is sent
        as soon as it is ready, and the number of photos is not limited.
        """
        return BulkResponse(service, request, read_query(request.query_params, query), captions)

    lines = {NDJSON: {"schema": {"$ref": "#/components/schemas/BatchResult"}}}
    app.post(
        "/v1/batch",
        summary="Caption many photos",
        dependencies=checks,
        response_model=openapi.BatchResponse,
        responses={**openapi.error_responses("/v1/batch"), 200: {"content": lines}},
        openapi_extra=openapi.described_request(query, "/v1/batch", several=True),
    )(batch)


def _add_probes(app: FastAPI, service: Service, model_name: str) -> None:
    """Add the endpoints for health, readiness and metrics, for orchestrators and monitoring."""
    unavailable: dict[int | str, Any] = {503: openapi.error_responses("/readyz")[503]}

    @app.head("/healthz", include_in_schema=False)
    @app.get("/healthz", responses=unavailable)
    async def healthz() -> dict[str, str]:
        """Report that the server responds. The status is 503 only at the end of a shutdown."""
        if service.captions.closed:
            raise closing()
        return {"status": "ok"}

    @app.head("/readyz", include_in_schema=False)
    @app.get("/readyz", responses=unavailable)
    async def readyz() -> dict[str, str]:
        """Report whether this server accepts new requests. After SIGTERM, the status is 503.

        The response contains the name and fingerprint of the model, and the version of captioner.
        """
        if service.leaving:
            raise closing()
        return {"status": "ok", "model": model_name, "version": __version__}

    text = {"description": "Prometheus text format.", "content": {"text/plain": {}}}

    if service.options.metrics_port is not None:
        return

    @app.get("/metrics", response_class=Response, responses={200: text})
    async def metrics_text(request: Request) -> Response:
        """Return the metrics since the server started.

        Requests that come through a proxy get 404, even if the proxy spells the path differently.
        """
        if request.scope["path"] != "/metrics" or _FORWARDED & {*request.headers}:
            raise HTTPException(404)
        return Response(generate_latest(service.metrics.registry), media_type=CONTENT_TYPE_LATEST)


async def _refuse(request: Request, error: Exception) -> Response:
    """Return an error as one line of JSON, or redirect from the proxy's prefix to the page."""
    prefix = request.scope.get("root_path")
    if isinstance(error, HTTPException) and prefix == request.scope["path"] and prefix:
        return RedirectResponse(f"{prefix}/", 308)  # the page's links need the slash at the end
    return error_response(error, request.scope)
