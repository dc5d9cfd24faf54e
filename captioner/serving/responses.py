"""Response bodies: captions, or one line that explains an error.

The pydantic models describe the responses in the OpenAPI schema; captions are serialized by
`Caption.as_dict`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, Field

from captioner.caption import Caption

RETRY_AFTER = 2
"""Retry-After (seconds) of refusals whose cause is not measured, such as a restart."""


CLIENT_CLOSED = 499
"""Status when the client disconnected before the response, as in nginx."""


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


def internal_error() -> RequestError:
    """An unexpected exception; the server's log has its location."""
    return RequestError(500, "mistake", "internal error; see the server log")


def client_closed() -> RequestError:
    """The client disconnected, which cannot be told from a body that ends early."""
    message = "the body is shorter than declared or not valid HTTP, or the client disconnected"
    return RequestError(CLIENT_CLOSED, "left", message)


def closing() -> RequestError:
    """The refusal of a server that shuts down."""
    return RequestError(503, "closing", "the server is shutting down; try again later")


def error_response(error: RequestError) -> Response:
    """The HTTP response to a request that cannot be served."""
    headers = {}
    if error.status in (429, 503):
        headers["Retry-After"] = str(error.retry_after)
    if error.status in (408, 503):  # do not send the next request here
        headers["Connection"] = "close"
    if error.status == 401:
        headers["WWW-Authenticate"] = 'Bearer realm="captioner"'
    return JSONResponse({"error": str(error)}, error.status, headers)


def captions_json(
    size: tuple[int, int],
    captions: Sequence[Caption],
    attention: bool,
    head: Mapping[str, Any] | None = None,
    min_confidence: float | None = None,
) -> bytes:
    """The response body for a photo of this size (width, height), in one line.

    Args:
        size: Size of the photo.
        captions: Its captions.
        attention: Include attention maps.
        head: Fields that come before the others.
        min_confidence: See ``Caption.as_dict``.
    """
    return json_line(
        {
            **(head or {}),
            "width": size[0],
            "height": size[1],
            "captions": [
                caption.as_dict(attention=attention, min_confidence=min_confidence)
                for caption in captions
            ],
        }
    )


def json_line(body: Mapping[str, Any]) -> bytes:
    """JSON in one line, without its end."""
    return json.dumps(body, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


def shortened(value: object) -> str:
    """A value of a request, shortened to fit into the line of an error."""
    text = str(value) if str(value).isprintable() else repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"


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
    confidence: float | None = Field(
        description="Calibrated probability that the caption is right, 0 to 1; null if the model "
        "or the search options are not calibrated, or the caption is not the best.",
    )
    unsure: bool | None = Field(
        None, description="Whether the confidence is below min_confidence. Only if that is given."
    )
    doubtful: list[int] = Field(
        description="Positions, from 0, of the words with a probability below 0.25."
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
        description="Attention weights, T x Gh x Gw; each map sums to 1. With another method, its "
        "maps: of attention_gate they sum to the gates, of the others to 1, or 0 if no region "
        "supports the word. Only if attention is true.",
    )
    region: tuple[float, float, float, float] | None = Field(
        None,
        description="Part of the photo covered by the attention maps: left, top, right, bottom as "
        "fractions of its width and height. Only if attention is true.",
    )
    geometry: GeometryResult | None = Field(
        None, description="Where the regions lie in the photo. Only if attention is true."
    )
    method: str | None = Field(
        None, description="How alphas was computed. Only if it is not attention."
    )


class CaptionsResponse(BaseModel):
    """The captions of a photo."""

    width: int = Field(description="Width of the photo after EXIF rotation, in pixels.")
    height: int = Field(description="Height of the photo after EXIF rotation, in pixels.")
    captions: list[CaptionResult] = Field(description="Best first.")


class BatchResult(BaseModel):
    """The captions of one photo of a batch, or its error."""

    index: int = Field(description="Position of the photo in the request, counted from 0.")
    name: str | None = Field(None, description="File name, if the form has one.")
    status: int = Field(description="HTTP status that the photo alone would have got.")
    width: int | None = Field(None, description="See CaptionsResponse.")
    height: int | None = Field(None, description="See CaptionsResponse.")
    captions: list[CaptionResult] | None = Field(None, description="If the status is 200.")
    error: str | None = Field(None, description="If the status is not 200.")


class BatchResponse(BaseModel):
    """The results of many photos."""

    results: list[BatchResult] = Field(description="In the order of the photos.")


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
        400: "Malformed request, form or JSON.",
        401: "No API key, or an unknown one.",
        403: "Cross-origin request.",
        408: "The photo was not received in time.",
        413: "The photo has too many bytes or pixels.",
        415: "Not an image, or an unsupported image format or encoding.",
        421: "Unknown host name.",
        422: "A corrupt image, an invalid option, or no field with a photo.",
        429: "Too many requests; retry after Retry-After seconds.",
        500: "Internal error.",
        503: "Timed out, or the server is shutting down; retry after Retry-After seconds.",
    }.items()
}
"""The error responses of the OpenAPI schema."""
