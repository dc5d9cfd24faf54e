"""A model that captions a photo with its colour, and a client that controls its upload."""

from __future__ import annotations

import asyncio
import io
import json
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlencode

import numpy as np
from PIL import Image

from captioner.caption_types import Alternative, Caption, CropBox
from captioner.errors import ConfigError
from captioner.inference.engine import Prepared
from captioner.options import SearchOptions

BAD = (255, 0, 0)
"""A photo of this colour can make its whole batch fail."""
OWN = SearchOptions(beam_size=2, max_length=6)
PATIENCE = 30  # seconds that a test waits for a server


class ColourVocabulary:
    """A vocabulary with every word except zebra."""

    styles = ()
    subwords = None

    def known_words(self, text: str) -> list[str]:
        if "zebra" in text or not text:
            raise ConfigError(f"{text!r}: the model does not know zebra")
        return text.split()


class ColourModel:
    """A model that captions a photo with its colour. It records its batches and can be blocked."""

    ensemble = SimpleNamespace(image_size=224)
    stored = SimpleNamespace(vocabulary=ColourVocabulary(), reading=None, search=OWN)

    def __init__(self) -> None:
        self.batches: list[list[str]] = []
        """The colours of every batch, in order of their start."""
        self.searches: list[SearchOptions] = []
        self.entered = threading.Semaphore(0)
        """Released when a batch starts."""
        self.gate = threading.Event()
        """While unset, batches wait."""
        self.gate.set()
        self.held = 0
        """While set, only searches with this beam size wait for the gate."""
        self.broken: Exception | None = None
        """Raised for a photo of the bad colour."""

    def options(self, **changes: Any) -> SearchOptions:
        return OWN.changed(**changes)

    def prepare(self, photo: Image.Image) -> Prepared:
        return Prepared((np.asarray(photo.resize((1, 1)), dtype=np.uint8),), CropBox())

    def check_method(self, method) -> None:
        if method == "occlusion":
            raise ConfigError("method occlusion needs a single model, not an ensemble")

    def caption_batch(
        self, photos, options, *, alternatives=0, method="attention", check=lambda: None
    ) -> list[list[Caption]]:
        self.searches.append(options)
        colours = self._begin(photos, options.beam_size)
        return [
            [
                _caption((colour, str(options.beam_size), str(rank)), alternatives, method)
                for rank in range(options.num_captions)
            ]
            for colour in colours
        ]

    def explain_batch(
        self, photos, sentences, *, alternatives=0, method="attention", style=None
    ) -> list[Caption]:
        colours = self._begin(photos)
        return [
            _caption((colour, *words), alternatives, method)
            for colour, words in zip(colours, sentences, strict=True)
        ]

    def _begin(self, photos, beam_size=0) -> list[str]:
        colours = [name(photo.pixels[0][0, 0]) for photo in photos]
        self.batches.append(colours)
        self.entered.release()
        assert self.held not in (0, beam_size) or self.gate.wait(30)
        if name(BAD) in colours and self.broken is not None:
            raise self.broken
        return colours


def name(colour) -> str:
    return "-".join(str(int(value)) for value in colour)


def _caption(words: tuple[str, ...], alternatives: int, method: str) -> Caption:
    length = len(words)
    others = tuple(Alternative(f"other{n}", -float(n)) for n in range(alternatives))
    return Caption(
        words=words,
        log_probs=np.full(length, -0.5, dtype=np.float32),
        alphas=np.full((length, 2, 2), 0.25, dtype=np.float32),
        gates=np.ones(length, dtype=np.float32),
        log_prob=-0.5 * length,
        alternatives=(others,) * length if alternatives else (),
        method=method,
    )


def png(colour=(1, 2, 3), size=(6, 4)) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", size, colour).save(file, "PNG")
    return file.getvalue()


class Exchange:
    """One request, sent in parts, and its response."""

    def __init__(self, app, scope: dict[str, Any]) -> None:
        self._messages: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._sent: list[dict[str, Any]] = []
        self.read = 0
        """Number of body parts that the server has read."""
        self.task = asyncio.ensure_future(app(scope, self._receive, self._send))

    async def _receive(self) -> dict[str, Any]:
        message = await self._messages.get()
        self.read += 1
        return message

    async def _send(self, message: dict[str, Any]) -> None:
        self._sent.append(message)

    def send(self, part: bytes, more: bool = False) -> Exchange:
        self._messages.put_nowait({"type": "http.request", "body": part, "more_body": more})
        return self

    def disconnect(self) -> None:
        self._messages.put_nowait({"type": "http.disconnect"})

    async def response(self) -> Response:
        await asyncio.wait_for(self.task, 30)
        return Response(self._sent)


class Response:
    def __init__(self, messages: list[dict[str, Any]]) -> None:
        self.status = messages[0]["status"]
        self.headers = {k.decode().lower(): v.decode() for k, v in messages[0]["headers"]}
        self.body = b"".join(message.get("body", b"") for message in messages[1:])

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> str:
        assert list(self.json) == ["error"]
        line = self.json["error"]
        assert "\n" not in line
        return line

    @property
    def texts(self) -> list[str]:
        assert self.status == 200, self.body
        return [caption["text"] for caption in self.json["captions"]]


class Server:
    """A running application inside an event loop."""

    def __init__(self, app, model) -> None:
        self.app = app
        self.model = model
        self.service = app.state.service

    def open(
        self, path="/v1/captions", *, verb="POST", headers=None, client="127.0.0.1", **query
    ) -> Exchange:
        named = {"host": "localhost"} | (headers or {})
        scope = {
            "type": "http",
            "method": verb,
            "path": path,
            "scheme": "http",
            "query_string": urlencode(query, doseq=True).encode(),
            "headers": [(k.lower().encode(), v.encode("latin-1")) for k, v in named.items()],
            "client": (client, 1),
            "server": ("127.0.0.1", 8000),
        }
        return Exchange(self.app, scope)

    def post(self, body: bytes, *, headers=None, **query) -> Exchange:
        return self.open(headers=headers, **query).send(body)

    async def get(self, path: str, method: str = "GET", **headers: str) -> Response:
        return await self.open(path, verb=method, headers=headers).send(b"").response()

    async def hold(self) -> Exchange:
        """Block the model while it works on a photo."""
        self.model.gate.clear()
        exchange = self.post(png((0, 0, 0)))
        assert await asyncio.to_thread(self.model.entered.acquire, timeout=30)
        return exchange

    async def metric(self, line: str) -> float:
        """The value of a line of /metrics; 0 if there is none yet."""
        text = (await self.get("/metrics")).body.decode()
        values = [one.rsplit(" ", 1)[1] for one in text.splitlines() if one.startswith(line + " ")]
        return float(values[0]) if values else 0.0


async def until(condition: Callable[[], bool]) -> None:
    """Let other tasks run until a condition holds."""
    for _ in range(30_000):
        if condition():
            return
        await asyncio.sleep(0.001)
    raise AssertionError("timed out")
