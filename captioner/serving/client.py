"""A client for ``captioner serve``: one photo or many, sync or async, with retries.

    from captioner.serving.client import Client

    with Client("http://localhost:8000") as client:
        print(client.caption("photo.jpg").text)
        for result in client.stream(["1.jpg", "2.jpg"], num_captions=3):
            print(result.photo, result.error or result.captions.text)

Needs httpx (``pip install 'captioner[client]'``), but neither torch nor a model.

A request is repeated if the server is busy, restarting or unreachable, after as many seconds as its
Retry-After asks for. Repeating is safe: a caption request changes nothing on the server.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections import deque
from collections.abc import AsyncIterator, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from captioner.caption import Alternative, Caption, CropBox, Keyword, LeftOut
from captioner.data.reading import read_ahead
from captioner.errors import CaptionerError, ConfigError, ImageError, ServerError
from captioner.geometry import Geometry

try:
    import httpx
except ImportError as error:
    message = "captioner.serving.client needs httpx; run: pip install 'captioner[client]'"
    raise ConfigError(message) from error

Photo = str | os.PathLike[str] | bytes | BinaryIO
"""A path, the bytes of an image file, or an open binary file."""

_PATH = "v1/captions"
_RETRIED = frozenset({429, 502, 503, 504})
_MAX_DELAY = 30.0


@dataclass(frozen=True)
class ServedCaption:
    """One caption of a response; ``data`` is its JSON, with all that was requested.

    ``log_prob`` is the natural log-probability of the whole sentence, including its end token;
    ``log_probs`` are those of its T words, each given the previous ones.
    """

    text: str
    words: tuple[str, ...]
    log_prob: float
    log_probs: tuple[float, ...]
    data: dict[str, Any]

    def to_caption(self) -> Caption:
        """The same as a `captioner.Caption`, for `captioner.overlay` and other pictures.

        Raises:
            ConfigError: The request did not ask for attention.
        """
        data = self.data
        if "alphas" not in data:
            raise ConfigError("the response has no attention; request it with attention=True")
        words, rest = data.get("alternatives", []), data.get("left_out")
        keywords = data.get("keywords")
        return Caption(
            words=self.words,
            **_arrays(data),
            log_prob=self.log_prob,
            crop_box=CropBox(*data["region"]),
            alternatives=tuple(tuple(Alternative(**one) for one in others) for others in words),
            geometry=Geometry.from_dict(data["geometry"]),
            method=data.get("method", "attention"),
            confidence=data.get("confidence"),
            keywords=None if keywords is None else tuple(map(_keyword, keywords)),
            left_out=rest and LeftOut(tuple(rest["words"]), **_arrays(rest)),
        )


@dataclass(frozen=True)
class PhotoCaptions:
    """A photo's size after EXIF rotation (pixels) and its captions, best first.

    ``model`` is the name and fingerprint of the server's model, ``request_id`` as in its log.
    """

    width: int
    height: int
    captions: tuple[ServedCaption, ...]
    model: str
    request_id: str

    @property
    def text(self) -> str:
        """The best caption."""
        return self.captions[0].text


class Result(NamedTuple):
    """A photo of a stream with its captions or the error of ``caption``."""

    photo: Photo
    captions: PhotoCaptions | None
    error: CaptionerError | None


class _Base:
    _http: Any
    _kind: type

    def __init__(
        self, url: str, *, api_key: str | None = None, retry_for: float = 120.0, **options: Any
    ) -> None:
        """Prepare a connection; the first request opens it.

        Args:
            url: Address of the server, e.g. ``http://localhost:8000``, with its prefix if any.
            api_key: API key, if the server needs one.
            retry_for: Seconds for which a photo's request is repeated while the server is busy or
                unreachable; 0: never.
            **options: Passed to ``httpx.Client``, e.g. ``verify`` or ``timeout``.
        """
        self._retry_for = retry_for
        headers = dict(options.pop("headers", {}))
        if api_key is not None:
            headers["Authorization"] = f"Bearer {api_key}"
        # httpx's default of 20 connections kept alive would close and reopen those of 100 photos
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=100)
        # The server's own limits for upload and captioning are 30 seconds each by default.
        defaults = {"timeout": httpx.Timeout(120.0, connect=10.0), "limits": limits}
        given: dict[str, Any] = defaults | options | {"base_url": url, "headers": headers}
        self._http = self._kind(**given)


class Client(_Base):
    """A connection to a server; closed by ``close`` or at the end of a ``with`` block."""

    _http: httpx.Client
    _kind = httpx.Client

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection."""
        self._http.close()

    def caption(self, photo: Photo, **query: Any) -> PhotoCaptions:
        """Caption one photo.

        Args:
            photo: A path, the bytes of an image file, or an open binary file.
            **query: Parameters of ``POST /v1/captions``, e.g. ``num_captions=3``,
                ``words="a dog"``, ``attention=True``, ``banned_words=["man", "woman"]``.

        Raises:
            ServerError: The server refused the photo, or could not be reached in time.
            ImageError: The file cannot be read.
        """
        request: Any = {"content": _read(photo), "params": _query(query)}
        attempt, end = 0, time.monotonic() + self._retry_for
        while True:
            try:
                return _captions(self._http.post(_PATH, **request))
            except (httpx.TransportError, ServerError) as error:
                time.sleep(_delay(error, attempt, end))
            attempt += 1

    def stream(
        self, photos: Iterable[Photo], *, parallel: int = 4, **query: Any
    ) -> Iterator[Result]:
        """Caption any number of photos, in order; errors are returned with their photo.

        Args:
            photos: Photos as in ``caption``, read as they are needed.
            parallel: Number of requests at a time.
            **query: See ``caption``.
        """

        def one(photo: Photo) -> Result:
            try:
                return Result(photo, self.caption(photo, **query), None)
            except CaptionerError as error:
                return Result(photo, None, error)

        # One slow photo does not stop the others.
        return read_ahead(one, photos, ahead=2 * parallel, threads=parallel)


class AsyncClient(_Base):
    """`Client` for asyncio; closed by ``aclose`` or at the end of an ``async with`` block."""

    _http: httpx.AsyncClient
    _kind = httpx.AsyncClient

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close the connection."""
        await self._http.aclose()

    async def caption(self, photo: Photo, **query: Any) -> PhotoCaptions:
        """Caption one photo; see ``Client.caption``."""
        content = await asyncio.to_thread(_read, photo)
        request: Any = {"content": content, "params": _query(query)}
        attempt, end = 0, time.monotonic() + self._retry_for
        while True:
            try:
                return _captions(await self._http.post(_PATH, **request))
            except (httpx.TransportError, ServerError) as error:
                await asyncio.sleep(_delay(error, attempt, end))
            attempt += 1

    async def stream(
        self, photos: Iterable[Photo], *, parallel: int = 4, **query: Any
    ) -> AsyncIterator[Result]:
        """Caption any number of photos, in order; see ``Client.stream``."""
        free = asyncio.Semaphore(parallel)

        async def one(photo: Photo) -> Result:
            async with free:
                try:
                    return Result(photo, await self.caption(photo, **query), None)
                except CaptionerError as error:
                    return Result(photo, None, error)

        running: deque[asyncio.Task[Result]] = deque()
        try:
            for photo in photos:
                running.append(asyncio.create_task(one(photo)))
                if len(running) == 2 * parallel:
                    yield await running.popleft()
            while running:
                yield await running.popleft()
        finally:
            for task in running:
                task.cancel()


def _delay(error: httpx.TransportError | ServerError, attempt: int, end: float) -> float:
    """Seconds to wait after a failed attempt, counted from 0; `ServerError` if it was the last."""
    seconds: float = min(_MAX_DELAY, 0.5 * 2**attempt) * random.uniform(0.5, 1.0)
    again = not isinstance(error, httpx.UnsupportedProtocol | httpx.LocalProtocolError)
    if isinstance(error, ServerError):
        seconds = seconds if error.retry_after is None else error.retry_after
        again, failed = error.status in _RETRIED, error
    else:
        reason = str(error) or type(error).__name__
        failed = ServerError(f"cannot reach the server ({reason}); is it running?", None)
    if again and time.monotonic() + seconds <= end:
        return seconds
    raise failed from error


def _read(photo: Photo) -> bytes:
    try:
        if isinstance(photo, str | os.PathLike):
            return Path(photo).read_bytes()
        return photo if isinstance(photo, bytes) else photo.read()
    except OSError as error:
        name = os.fspath(photo) if isinstance(photo, str | os.PathLike) else "the given file"
        reason = error.strerror or str(error)
        raise ImageError(f"{name}: cannot be read ({reason}); check the path") from error


def _query(query: dict[str, Any]) -> dict[str, Any]:
    """Query parameters, lists joined by commas."""
    return {
        name: ",".join(map(str, value)) if isinstance(value, list | tuple) else value
        for name, value in query.items()
        if value is not None
    }


def _arrays(data: dict[str, Any]) -> dict[str, Any]:
    """The arrays of a caption or of left-out words; null becomes NaN."""
    names = ("log_probs", "alphas", "gates", "truth")
    return {name: np.array(data[name], np.float32) for name in names if name in data}


def _keyword(data: dict[str, Any]) -> Keyword:
    return Keyword(**data | ({"map": np.float32(data["map"])} if "map" in data else {}))


def _captions(response: httpx.Response) -> PhotoCaptions:
    """The captions of a response; ServerError if it is an error."""
    status, headers = response.status_code, response.headers
    try:
        body = response.json()
        if status == 200:
            captions = tuple(
                ServedCaption(
                    one["text"], tuple(one["words"]), one["log_prob"], tuple(one["log_probs"]), one
                )
                for one in body["captions"]
            )
            names = (headers.get(name, "") for name in ("x-captioner-model", "x-request-id"))
            return PhotoCaptions(body["width"], body["height"], captions, *names)
        message = str(body["error"])
    except (ValueError, KeyError, TypeError):  # another server's, or a proxy's
        address = response.url.copy_with(query=None)
        message = f"{address}: status {status}, but no response of captioner serve"
    given = headers.get("retry-after", "")
    raise ServerError(message, status, float(given) if given.isdecimal() else None)
