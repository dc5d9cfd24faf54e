"""The endpoints that take photos: captions, batches and overlays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

from fastapi import FastAPI, Query, Request
from fastapi.responses import Response
from pydantic import BaseModel

from captioner.serving.api_description import (
    BATCH_EXAMPLE,
    CAPTIONS_EXAMPLE,
    describe_bodies,
    request_body,
)
from captioner.serving.bulk import NDJSON, BulkResponse
from captioner.serving.overlays import OVERLAYS, Overlay
from captioner.serving.requests import query_model
from captioner.serving.responses import (
    ERROR_RESPONSES,
    BatchResponse,
    CaptionsResponse,
    captions_json,
    json_line,
)
from captioner.serving.service import Renderer, Service

_JSON = Renderer(
    lambda photo, captions, options: captions_json(
        photo.size, captions, options.attention, min_confidence=options.min_confidence
    )
)


def add_photo_routes(app: FastAPI, service: Service) -> dict[str, type[BaseModel]]:
    """Add the endpoints.

    Args:
        app: The application.
        service: Captions the photos.

    Returns:
        The options of each endpoint by its path.
    """
    query = query_model(service.limits)
    _add_captions(app, service, query)
    _add_batch(app, service, query)
    models = {"Caption": query}
    for overlay in OVERLAYS:
        if overlay.name not in models:
            models[overlay.name] = query_model(service.limits, overlay.name, overlay.options)
        _add_overlay(app, service, overlay, models[overlay.name])
    describe_bodies(app, models)
    overlays = {overlay.path: models[overlay.name] for overlay in OVERLAYS}
    return {"/v1/captions": query, "/v1/batch": query, **overlays}


def _add_captions(app: FastAPI, service: Service, query: type[BaseModel]) -> None:
    async def captions(request: Request, parameters: Any) -> Response:
        """Caption a photo, or explain a caption of your own."""
        body = await service.caption(request, parameters, _JSON)
        return Response(body, media_type="application/json")

    example = {"content": {"application/json": {"example": CAPTIONS_EXAMPLE}}}
    app.post(
        "/v1/captions",
        summary="Caption a photo",
        response_model=CaptionsResponse,
        responses={**ERROR_RESPONSES, 200: example},
        openapi_extra=request_body("Caption", "/v1/captions?num_captions=3"),
    )(_with_query(captions, query))


def _add_batch(app: FastAPI, service: Service, query: type[BaseModel]) -> None:
    async def batch(request: Request, parameters: Any) -> Response:
        """Caption many photos; the results are in their order, each with its own status.

        With `Accept: application/x-ndjson`, the response is a line per photo, sent as soon as it is
        ready, and the number of photos is not limited.
        """
        return BulkResponse(service, request, parameters)

    lines = "\n".join(json_line(one).decode() for one in BATCH_EXAMPLE["results"])
    content = {
        "application/json": {"example": BATCH_EXAMPLE},
        NDJSON: {"schema": {"$ref": "#/components/schemas/BatchResult"}, "example": lines + "\n"},
    }
    app.post(
        "/v1/batch",
        summary="Caption many photos",
        response_model=BatchResponse,
        responses={**ERROR_RESPONSES, 200: {"content": content}},
        openapi_extra=request_body("Caption", "/v1/batch", several=True),
    )(_with_query(batch, query))


def _add_overlay(app: FastAPI, service: Service, kind: Overlay, query: type[BaseModel]) -> None:
    async def overlay(request: Request, parameters: Any) -> Response:
        body = await service.caption(request, parameters, kind.renderer)
        headers = {"Content-Security-Policy": kind.policy(body)} if kind.policy else {}
        return Response(body, media_type=kind.media_type, headers=headers)

    ending = kind.path.rpartition(".")[2]
    example = f"{kind.path}' -o 'photo.{ending}"
    app.post(
        kind.path,
        summary=kind.summary,
        operation_id=kind.path.removeprefix("/v1/").replace(".", "_"),
        response_class=Response,
        responses={
            **ERROR_RESPONSES,
            200: {
                "description": kind.summary,
                "content": {kind.media_type: {"schema": {"type": "string", "format": "binary"}}},
            },
        },
        openapi_extra=request_body(kind.name, example),
    )(_with_query(overlay, query))


def _with_query(endpoint: Callable[..., Any], query: type[BaseModel]) -> Callable[..., Any]:
    """Declare the query of an endpoint, whose model is created at run time."""
    endpoint.__annotations__["parameters"] = Annotated[query, Query()]
    return endpoint
