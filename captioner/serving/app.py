"""The application: which routes there are and what each answers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated, Any

from fastapi import FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from captioner import __version__
from captioner.api import Captioner
from captioner.errors import ConfigError
from captioner.serving import front
from captioner.serving.answers import PROBLEMS, Answer, Health, Refusal, refusal_response
from captioner.serving.asks import query_model, query_problem, read_ask
from captioner.serving.connections import Drain
from captioner.serving.limits import Limits
from captioner.serving.metrics import Metrics, Watch
from captioner.serving.security import Guard, Hosts, SecurityHeaders, answered_hosts
from captioner.serving.service import LEFT, Service

_ABOUT = """Captions photos and tells where the model looked for every word.

The body of a request is the photo's bytes:
`curl --data-binary @photo.jpg 'http://localhost:8000/v1/captions?num_captions=3'`"""

_PHOTO = {
    "requestBody": {
        "required": True,
        "description": "The photo's bytes: JPEG, PNG, WebP, GIF, BMP or TIFF, told apart by "
        "themselves; the content type is not looked at.",
        "content": {
            kind: {"schema": {"type": "string", "format": "binary"}}
            for kind in ("application/octet-stream", "image/*")
        },
    }
}

_LINES = {
    404: "there is nothing here; captions are at /v1/captions, their description at /openapi.json",
    405: "this method is not answered here; see /openapi.json",
}


def create_app(
    model: Captioner,
    limits: Limits | None = None,
    *,
    batch_size: int = 32,
    hosts: Hosts | None = None,
) -> FastAPI:
    """The server as an ASGI application; ``app.state.service`` is what works behind it.

    Args:
        model: The model; from now on the application's alone.
        limits: What is taken on; None: the defaults.
        batch_size: Photos captioned together.
        hosts: The names that are answered; None: loopback's.

    Raises:
        ConfigError: batch_size is less than 1.
    """
    if batch_size < 1:
        raise ConfigError(f"batch-size is {batch_size}; give 1 or more")
    limits = limits or Limits()
    metrics = Metrics()
    service = Service(model, limits, batch_size=batch_size, on_batch=metrics.on_batch)
    metrics.watch(lambda: service.batcher.waiting, lambda: service.held)

    @asynccontextmanager
    async def working(_: FastAPI) -> AsyncIterator[None]:
        service.start()
        yield
        service.close()
        service.join()

    app = FastAPI(
        title="captioner",
        description=_ABOUT,
        version=__version__,
        docs_url=None,  # they load their scripts from elsewhere
        redoc_url=None,
        redirect_slashes=False,
        lifespan=working,
    )
    app.state.service = service
    query = query_model(limits)
    _add_captions(app, service, query)
    _add_the_rest(app, service, metrics, front.front_page(limits, model.options()))
    _add_errors(app, metrics, query)
    routes = {route.path for route in app.routes if hasattr(route, "path")}
    app.add_middleware(Guard, hosts=hosts or answered_hosts("127.0.0.1"), metrics=metrics)
    app.add_middleware(Watch, metrics=metrics, routes=routes)
    app.add_middleware(SecurityHeaders)
    app.add_middleware(Drain)  # the outermost
    return app


def _add_captions(app: FastAPI, service: Service, query: type[BaseModel]) -> None:
    async def captions(request: Request, parameters: Any) -> Response:
        """Caption a photo, or explain own words about it."""
        ask = read_ask(service.model, parameters)
        attention = parameters.attention
        body = await service.answer(request, ask, attention=attention)
        return Response(body, media_type="application/json")

    # The parameters are made from the search options, so their type is not known before.
    captions.__annotations__["parameters"] = Annotated[query, Query()]
    app.post(
        "/v1/captions",
        summary="Caption a photo",
        response_model=Answer,
        responses=PROBLEMS,
        openapi_extra=_PHOTO,
    )(captions)


def _add_the_rest(app: FastAPI, service: Service, metrics: Metrics, page: str) -> None:
    policy = front.policy(page)

    @app.head("/healthz", include_in_schema=False)
    @app.get("/healthz", response_model=Health, responses={503: PROBLEMS[503]})
    async def healthz() -> Response:
        """Whether photos are captioned."""
        if service.batcher.alive:
            return JSONResponse({"status": "ok"})
        return refusal_response(Refusal(503, "closing", "no photos are captioned; start it again"))

    @app.get(
        "/metrics",
        response_class=Response,
        responses={200: {"description": "Prometheus' text format.", "content": {"text/plain": {}}}},
    )
    async def metrics_text() -> Response:
        """What was counted since the start."""
        return Response(generate_latest(metrics.registry), media_type=CONTENT_TYPE_LATEST)

    @app.head("/", include_in_schema=False)
    @app.get("/", include_in_schema=False)
    async def index() -> Response:
        return HTMLResponse(page, headers={"Content-Security-Policy": policy})

    @app.get("/favicon.ico", include_in_schema=False)
    async def favicon() -> Response:
        return Response(status_code=204)


def _add_errors(app: FastAPI, metrics: Metrics, query: type[BaseModel]) -> None:
    """Every error is one line of JSON, and counted."""

    def refuse(refusal: Refusal) -> Response:
        metrics.refused.labels(refusal.reason).inc()
        if refusal.status == LEFT:
            return Response(status_code=LEFT)  # nobody reads it
        return refusal_response(refusal)

    @app.exception_handler(Refusal)
    async def refused(_: Request, error: Refusal) -> Response:
        return refuse(error)

    @app.exception_handler(ConfigError)
    async def contradicted(_: Request, error: ConfigError) -> Response:
        return refuse(Refusal(422, "options", str(error)))

    @app.exception_handler(RequestValidationError)
    async def not_valid(_: Request, error: RequestValidationError) -> Response:
        return refuse(Refusal(422, "options", query_problem(error.errors(), query)))

    @app.exception_handler(HTTPException)
    async def other(_: Request, error: HTTPException) -> Response:
        line = _LINES.get(error.status_code, str(error.detail))
        response = refuse(Refusal(error.status_code, f"http_{error.status_code}", line))
        response.headers.update(error.headers or {})
        return response
