"""Response bodies: captions, or one line that explains an error.

The pydantic models describe the responses in the OpenAPI schema; captions are serialized by
`Caption.as_dict`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, Field

from captioner.caption import Caption

RETRY_AFTER = 2
"""Retry-After (seconds) of refusals whose cause is not measured, such as a restart."""


class RequestError(Exception):
    """A request that cannot be served."""

    def __init__(
        self, status: int, reason: str, message: str, *, retry_after: int = RETRY_AFTER
    ) -> None:
        """Initialize the error.

        Args:
            status: HTTP status.
            reason: Label for the metrics.
            message: One line: what was given, what is allowed, what to do.
            retry_after: Retry-After (seconds), for status 429 and 503.
        """
        super().__init__(message)
        self.status = status
        self.reason = reason
        self.retry_after = retry_after


def error_response(error: RequestError) -> Response:
    """The HTTP response to a request that cannot be served."""
    headers = {}
    if error.status in (429, 503):
        headers["Retry-After"] = str(error.retry_after)
    if error.status in (408, 503):  # do not send the next request here
        headers["Connection"] = "close"
    return JSONResponse({"error": str(error)}, error.status, headers)


def captions_json(size: tuple[int, int], captions: Sequence[Caption], attention: bool) -> bytes:
    """The response body for a photo of this size (width, height)."""
    body = {
        "width": size[0],
        "height": size[1],
        "captions": [caption.as_dict(attention=attention) for caption in captions],
    }
    return json.dumps(body, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


class ErrorResponse(BaseModel):
    """Why the request failed."""

    error: str = Field(description="One line: what was given, what is allowed, what to do.")


class AlternativeResult(BaseModel):
    """A candidate word at one position."""

    word: str = Field(description="Vocabulary entry, or <end> for the end of the caption.")
    log_prob: float = Field(description="Natural log-probability given the preceding words.")


class AxisResult(BaseModel):
    """The regions along one axis, as fractions of the photo's width or height."""

    first: float = Field(description="Centre of the first region.")
    pitch: float = Field(description="Distance between the centres of neighbouring regions.")
    start: float = Field(description="Where the part that the model sees begins.")
    stop: float = Field(description="Where it ends.")


class GeometryResult(BaseModel):
    """Where the regions lie: (i, j) is centred on y.first + i y.pitch, x.first + j x.pitch."""

    x: AxisResult
    y: AxisResult


class CaptionResult(BaseModel):
    """A caption of T words with attention over a grid of Gh x Gw regions."""

    text: str = Field(description="The caption as plain text.")
    words: list[str] = Field(description="The T words of the caption, as in the vocabulary.")
    log_prob: float = Field(
        description="Natural log-probability of the caption, including its end token."
    )
    log_probs: list[float] = Field(
        description="T natural log-probabilities, one per word, given the preceding words."
    )
    alternatives: list[list[AlternativeResult]] | None = Field(
        None,
        description="The most probable words at each of the T positions, best first. Only if "
        "alternatives > 0.",
    )
    gates: list[float] | None = Field(
        None,
        description="T gate values from 0 (photo ignored for this word) to 1 (fully used). Only if "
        "attention is true.",
    )
    alphas: list[list[list[float]]] | None = Field(
        None,
        description="Attention weights, T x Gh x Gw; each map sums to 1. Only if attention is "
        "true.",
    )
    region: tuple[float, float, float, float] | None = Field(
        None,
        description="Part of the photo covered by the attention maps: left, top, right, bottom as "
        "fractions of its width and height. Only if attention is true.",
    )
    geometry: GeometryResult | None = Field(
        None, description="Where the regions lie in the photo. Only if attention is true."
    )


class CaptionsResponse(BaseModel):
    """The captions of a photo."""

    width: int = Field(description="Width of the photo after EXIF rotation, in pixels.")
    height: int = Field(description="Height of the photo after EXIF rotation, in pixels.")
    captions: list[CaptionResult] = Field(description="Best first.")


class HealthResponse(BaseModel):
    """The server can caption photos."""

    status: str = Field(description='"ok"')


class ReadyResponse(BaseModel):
    """The server accepts requests."""

    status: str = Field(description='"ok"')
    model: str = Field(description="Name and fingerprint of the model.")
    version: str = Field(description="Version of captioner.")


ERROR_RESPONSES: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorResponse, "description": text}
    for status, text in {
        400: "Malformed request.",
        401: "No API key, or an unknown one.",
        403: "Cross-origin request.",
        408: "The photo was not received in time.",
        413: "The photo has too many bytes or pixels.",
        415: "Not an image, an unsupported image format, or a form upload.",
        421: "Unknown host name.",
        422: "A corrupt image, or an invalid parameter.",
        429: "Too many requests; retry after Retry-After seconds.",
        500: "Internal error.",
        503: "Timed out, or the server is shutting down; retry after Retry-After seconds.",
    }.items()
}
"""The error responses of the OpenAPI schema."""
