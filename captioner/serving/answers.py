"""What the server answers: captions, or one clear line.

The pydantic models are the OpenAPI description's; what is sent is `Caption.as_dict`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, Field

from captioner.caption import Caption

RETRY_SECONDS = 2
"""After so many seconds it is worth trying again."""


class Refusal(Exception):  # noqa: N818 - what it is, not what went wrong
    """A request that gets no captions, and why."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        """Say no.

        Args:
            status: HTTP status.
            reason: One word for the metrics.
            message: One line: what was given, what is allowed, what to do.
        """
        super().__init__(message)
        self.status = status
        self.reason = reason


def refusal_response(refusal: Refusal) -> Response:
    """The answer to a refused request."""
    headers = {}
    if refusal.status in (429, 503):
        headers["Retry-After"] = str(RETRY_SECONDS)
    if refusal.status in (408, 503):  # what is left of the photo is not waited for
        headers["Connection"] = "close"
    return JSONResponse({"error": str(refusal)}, refusal.status, headers)


def captions_json(size: tuple[int, int], captions: Sequence[Caption], attention: bool) -> bytes:
    """The answer to a photo of this size (width, height)."""
    told = {
        "width": size[0],
        "height": size[1],
        "captions": [caption.as_dict(attention=attention) for caption in captions],
    }
    return json.dumps(told, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


class Problem(BaseModel):
    """Why there are no captions."""

    error: str = Field(description="One line: what was given, what is allowed, what to do.")


class AlternativeAnswer(BaseModel):
    """A word that the model could have said at a place."""

    word: str = Field(description="As the vocabulary spells it; <end> for the sentence's end.")
    log_prob: float = Field(description="Natural log-probability given the words before it.")


class CaptionAnswer(BaseModel):
    """One sentence about the photo: T words, a grid of Gh x Gw regions."""

    text: str = Field(description="The sentence as a person writes it.")
    words: list[str] = Field(description="Its T words, as the vocabulary spells them.")
    log_prob: float = Field(description="Natural log-probability of the sentence with its end.")
    log_probs: list[float] = Field(
        description="T natural log-probabilities, of each word given the words before it."
    )
    alternatives: list[list[AlternativeAnswer]] | None = Field(
        None,
        description="The most probable words at each of the T places, best first; with "
        "alternatives above 0.",
    )
    gates: list[float] | None = Field(
        None,
        description="T values, 0 (the photo was ignored for this word) to 1 (fully used); with "
        "attention.",
    )
    alphas: list[list[list[float]]] | None = Field(
        None,
        description="T x Gh x Gw: where the model looked while it chose each word; a map's values "
        "sum to 1; with attention.",
    )
    region: tuple[float, float, float, float] | None = Field(
        None,
        description="Left, top, right, bottom of the part of the photo that the maps cover, as "
        "fractions of its width and height; with attention.",
    )


class Answer(BaseModel):
    """A photo's captions."""

    width: int = Field(description="Of the upright photo, pixels.")
    height: int = Field(description="Of the upright photo, pixels.")
    captions: list[CaptionAnswer] = Field(description="Best first.")


class Health(BaseModel):
    """The server can caption."""

    status: str = Field(description='"ok"')


PROBLEMS: dict[int | str, dict[str, Any]] = {
    status: {"model": Problem, "description": text}
    for status, text in {
        400: "The request cannot be understood.",
        403: "A page of another site asks.",
        408: "The photo did not arrive in time.",
        413: "The photo has too many bytes or pixels.",
        415: "No picture, or not sent as plain bytes.",
        421: "The server does not answer to this host name.",
        422: "A broken picture, or a parameter that cannot be.",
        429: "Too many requests are on their way; come back after Retry-After seconds.",
        500: "A mistake of the server's.",
        503: "It took too long, or the server is stopping; come back after Retry-After seconds.",
    }.items()
}
"""The error answers of the OpenAPI description."""
