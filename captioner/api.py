"""Captioning from Python: load a model, give it photos, get captions with their evidence.

model = captioner.load()
caption = model.caption("photo.jpg")
captioner.overlay("photo.jpg", caption).save("attention.png")
"""

from __future__ import annotations

import copy
import dataclasses
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import nn

from captioner.caption import Caption, Region
from captioner.config import SearchOptions
from captioner.data.images import open_image
from captioner.decoding.search import Hypothesis, beam_search
from captioner.decoding.stepper import DecoderStepper
from captioner.errors import ConfigError, ImageError
from captioner.hardware import Precision, autocast, pick_device, pick_precision
from captioner.model_folder import StoredModel, load_model, save_model
from captioner.models.attention import Memory, widen
from captioner.models.captioner import CaptionModel
from captioner.tokenizer import tokenize
from captioner.vocabulary import END, START

Photo = str | Path | Image.Image | BinaryIO

SHIPPED_MODEL = Path(__file__).parent / "pretrained"
"""The folder of the model that comes with the package."""


class Prepared(NamedTuple):
    """A photo ready for the encoder."""

    pixels: NDArray[np.uint8]
    """(H, W, 3)."""
    region: Region
    """The part of the photo that the pixels show."""


class Result(NamedTuple):
    """What became of one photo: captions or an error, never both."""

    photo: Photo
    captions: list[Caption]
    """Best first; empty when the photo could not be read."""
    error: ImageError | None


def load(
    folder: str | Path | None = None, *, device: str = "auto", precision: Precision = "auto"
) -> Captioner:
    """Load a model.

    Args:
        folder: A model folder; None: the model that comes with the package.
        device: ``auto``, ``cpu``, ``cuda``, ``cuda:1``, ...
        precision: ``auto`` (bf16 where the hardware multiplies it natively), ``fp32``, ``bf16``.

    Raises:
        ModelError: The folder cannot be loaded.
        ConfigError: The device is not there.
    """
    return Captioner(load_model(folder or SHIPPED_MODEL), device=device, precision=precision)


class Captioner:
    """A loaded model: photos in, captions out."""

    def __init__(
        self, stored: StoredModel, *, device: str = "auto", precision: Precision = "auto"
    ) -> None:
        """Put a model to use.

        Args:
            stored: A model in memory, e.g. from ``load_model``.
            device: Where it runs.
            precision: See ``load``.
        """
        self.stored = stored
        self.device = pick_device(device)
        self.precision: Precision = precision
        self.model = _working_copy(stored.model, self.device, precision)

    @property
    def info(self) -> dict[str, Any]:
        """Where the model was trained and how it scored."""
        return self.stored.info

    def save(self, folder: str | Path) -> None:
        """Write the model as a model folder."""
        save_model(folder, self.stored)

    def options(self, **changes: Any) -> SearchOptions:
        """The model's own search options with some of them changed.

        Raises:
            ConfigError: An option is unknown or out of range.
        """
        known = {field.name for field in dataclasses.fields(SearchOptions)}
        unknown = sorted(changes.keys() - known)
        if unknown:
            raise ConfigError(
                f"{unknown[0]!r} is no search option; give {', '.join(sorted(known))}"
            )
        return dataclasses.replace(self.stored.search, **changes)

    def caption(self, photo: Photo, **search: Any) -> Caption:
        """Caption one photo.

        Args:
            photo: A path, a PIL image or a binary file.
            **search: Fields of ``SearchOptions`` to change, e.g. ``beam_size=1``.

        Returns:
            The best caption.

        Raises:
            ImageError: The photo cannot be read.
        """
        return self.captions(photo, **search)[0]

    def captions(self, photo: Photo, **search: Any) -> list[Caption]:
        """The best ``num_captions`` captions of one photo, best first; see ``caption``."""
        return self.caption_batch([self.prepare(photo)], self.options(**search))[0]

    @torch.inference_mode()
    def explain(self, photo: Photo, text: str) -> Caption:
        """Where the model looks, and how probable it finds each word, when it says this sentence.

        Args:
            photo: A path, a PIL image or a binary file.
            text: The sentence; tokenized as captions are.

        Returns:
            The sentence with its attention, log-probabilities and gates.

        Raises:
            ImageError: The photo cannot be read.
            ConfigError: The sentence is empty or holds words that the model does not know.
        """
        vocabulary, decoder = self.stored.vocabulary, self.model.decoder
        words = tokenize(text)
        unknown = [word for word in words if word not in vocabulary]
        if unknown or not words:
            given = f"the model does not know {', '.join(unknown)}" if unknown else "no words"
            raise ConfigError(f"{text!r}: {given}; give a sentence of words from its vocabulary")
        prepared = self.prepare(photo)
        tokens = torch.tensor([[[START, *vocabulary.encode(words), END]]], device=self.device)
        with autocast(self.precision, self.device):
            unrolled = decoder(self._memory([prepared]), tokens[..., :-1])
            logits = decoder.readout(unrolled.embedded, *unrolled.outputs)
        said = widen(logits).log_softmax(dim=-1).take_along_dim(tokens[..., 1:, None], dim=-1)
        log_probs = said.flatten().cpu()  # the words', then the end's
        return self._caption(
            Hypothesis(
                tokens=tokens[0, 0, 1:-1].tolist(),
                token_log_probs=log_probs[:-1],
                alphas=unrolled.alphas[0, 0, :-1].cpu(),
                gates=unrolled.gates[0, 0, :-1].cpu(),
                log_prob=float(log_probs.sum()),
                ended=True,
            ),
            prepared.region,
        )

    def prepare(self, photo: Photo) -> Prepared:
        """Read and resize one photo.

        Raises:
            ImageError: The photo cannot be read.
        """
        image = open_image(photo)
        preprocessing = self.model.preprocessing
        return Prepared(preprocessing.pixels(image), preprocessing.region(*image.size))

    @torch.inference_mode()
    def caption_batch(
        self, photos: Sequence[Prepared], options: SearchOptions
    ) -> list[list[Caption]]:
        """Caption prepared photos together.

        Returns:
            For each photo its best captions, best first.
        """
        with autocast(self.precision, self.device):
            stepper = DecoderStepper(self.model.decoder, self._memory(photos))
            found = beam_search(stepper, options)
        return [
            [self._caption(hypothesis, photo.region) for hypothesis in hypotheses]
            for photo, hypotheses in zip(photos, found, strict=True)
        ]

    def stream(
        self, photos: Iterable[Photo], options: SearchOptions | None = None, *, batch_size: int = 32
    ) -> Iterator[Result]:
        """Caption any number of photos in batches, in their order, in constant memory.

        Photos are read ahead by threads while the model works. A photo that cannot be read gives a
        result with its error and the others go on.

        Args:
            photos: Paths, PIL images or binary files; consumed as they are needed.
            options: How to search; None: the model's own.
            batch_size: Photos captioned together.
        """
        if batch_size < 1:
            raise ConfigError(f"batch-size is {batch_size}; give 1 or more")
        options = options or self.stored.search
        with ThreadPoolExecutor(max_workers=2) as readers:
            for batch in _read_ahead(photos, self._try_prepare, readers, batch_size):
                good = [prepared for _, prepared in batch if isinstance(prepared, Prepared)]
                captions = iter(self.caption_batch(good, options) if good else [])
                for photo, prepared in batch:
                    if isinstance(prepared, ImageError):
                        yield Result(photo, [], prepared)
                    else:
                        yield Result(photo, next(captions), None)

    def _memory(self, photos: Sequence[Prepared]) -> Memory:
        """Encode photos for the decoder."""
        pixels = torch.from_numpy(np.stack([photo.pixels for photo in photos])).to(self.device)
        memory: Memory = self.model.decoder.memory(self.model.encode(pixels))
        return memory

    def _try_prepare(self, photo: Photo) -> Prepared | ImageError:
        try:
            return self.prepare(photo)
        except ImageError as error:
            return error

    def _caption(self, hypothesis: Hypothesis, region: Region) -> Caption:
        alphas = hypothesis.alphas.float().numpy()
        return Caption(
            words=tuple(self.stored.vocabulary.decode(hypothesis.tokens)),
            log_probs=hypothesis.token_log_probs.float().numpy(),
            alphas=alphas.reshape(len(alphas), *self.model.grid),
            gates=hypothesis.gates.float().numpy(),
            log_prob=hypothesis.log_prob,
            region=region,
        )


def _working_copy(model: CaptionModel, device: torch.device, precision: Precision) -> CaptionModel:
    """A copy laid out for use; the original keeps its float32 weights, e.g. to go on training.

    In bf16 the weights of products are cast here, once: without gradients, autocast would cast
    them anew at every word, which took a third of the search.
    """
    copied = copy.deepcopy(model).to(device).eval().requires_grad_(False)
    copied.encoder.to(memory_format=torch.channels_last)
    if pick_precision(precision, device) == "bf16":
        for module in copied.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                module.to(torch.bfloat16)
    return copied


def _read_ahead(
    photos: Iterable[Photo], prepare: Any, readers: ThreadPoolExecutor, batch_size: int
) -> Iterator[list[tuple[Photo, Prepared | ImageError]]]:
    """Batches of prepared photos; while one is out, the next is being read."""
    source = iter(photos)
    waiting: deque[tuple[Photo, Future[Prepared | ImageError]]] = deque()

    def fill(size: int) -> None:
        for photo in islice(source, size - len(waiting)):
            waiting.append((photo, readers.submit(prepare, photo)))

    while True:
        fill(2 * batch_size)
        if not waiting:
            return
        taken = [waiting.popleft() for _ in range(min(batch_size, len(waiting)))]
        yield [(photo, future.result()) for photo, future in taken]
