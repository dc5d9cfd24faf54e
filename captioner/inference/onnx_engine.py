"""An engine that runs an exported model with ONNX Runtime, without torch.

An exported folder contains a model folder's ``config.json`` and two graphs (docs/export.md):

    encoder.onnx    pixels -> hidden, cell [, fed], values, keys, summary
                        [, reading, reading_regions]; once per photo
    decoder.onnx    tokens, hidden, cell [, fed], values, keys
                        -> log_probs, alphas, gate, next_hidden, next_cell [, next_fed]; per word

A graph has only the inputs and outputs that its attention mechanism needs, so they are accessed by
name. ``STATE`` lists the names of the decoder's state. The decoder's other inputs, except for the
tokens, form the memory. Shapes are as in ``model.decoder`` and ``model.reading``, with a dynamic
number of photos and beams. Pixels are (B, H, W, 3) bytes, because the graph includes the
normalization.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from captioner.errors import ConfigError, ModelError
from captioner.geometry import Geometry
from captioner.inference.engine import CaptionScores
from captioner.inference.names import CONFIG, DECODER_GRAPH, ENCODER_GRAPH, EXPORTED
from captioner.inference.reading import READING, Reading
from captioner.inference.stored_model import StoredModel
from captioner.messages import first_line
from captioner.model.preprocessing import Preprocessing
from captioner.search.arrays import NUMPY
from captioner.search.search import Advance
from captioner.text.vocabulary import END, NEVER_GENERATED

STATE = ("hidden", "cell", "fed")
"""Names of the decoder's state among its inputs. Among its outputs, the names begin with
``NEXT``."""
NEXT = "next_"
SUMMARY = "summary"
READ = (READING, "reading_regions")
"""Names of the outputs that belong to the fields of ``Reading``, if the model has a reading."""

Arrays = dict[str, NDArray[Any]]


class OnnxEngine:
    """An engine that runs a model's exported graphs with ONNX Runtime, without torch.

    The arguments ``grids`` (features of photos) and ``memory`` (inputs of the decoder) are both the
    outputs of the encoder's graph by name.
    """

    def __init__(self, stored: StoredModel, device: str, precision: str) -> None:
        """Load the graphs.

        Raises:
            ModelError: A graph is damaged or does not belong to the config.
            ConfigError: The device or the precision is not available.
        """
        folder, config = stored.folder, stored.config
        assert folder is not None
        encoder = config["encoder"]
        rows, columns = map(int, encoder["grid"])
        self.name, self.grid = encoder["name"], (rows, columns)
        self.geometry = Geometry.from_dict(encoder["geometry"])
        self.preprocessing = Preprocessing.from_dict(config["preprocessing"])
        self.precision = str(config[EXPORTED]["precision"])
        self.device: Any = "cpu"
        if precision not in ("auto", self.precision):
            raise ConfigError(
                f"precision is {precision!r}, but {folder} was exported in {self.precision!r}; set "
                "precision to 'auto', or use the model folder that was exported"
            )
        providers = _providers(device, folder)
        self.encoder = _session(folder / ENCODER_GRAPH, providers)
        self.decoder = _session(folder / DECODER_GRAPH, providers)
        self.inputs = {one.name for one in self.decoder.get_inputs()}
        self.outputs = [one.name for one in self.decoder.get_outputs()]
        stems = 0 if stored.reading is None else len(stored.reading.stems)
        if not self._fits(len(stored.vocabulary), stems):
            raise ModelError(
                f"the graphs of {folder} do not match its {CONFIG}; export the model again"
            )

    def _fits(self, words: int, stems: int) -> bool:
        """Return whether the graphs have the inputs and outputs that the config requires."""
        photos, made = self.encoder.get_inputs()[0], self.encoder.get_outputs()
        last = {one.name: one.shape[-1] for one in (*made, *self.decoder.get_outputs())}
        size, regions = self.preprocessing.image_size, self.grid[0] * self.grid[1]
        sizes = {"log_probs": words, "alphas": regions} | dict.fromkeys(
            READ if stems else (), stems
        )
        needed = {*sizes, "gate", *(NEXT + name for name in STATE if name in self.inputs)}
        return (
            (photos.name, photos.shape[1:]) == ("pixels", [size, size, 3])
            and self.inputs <= {"tokens", *(one.name for one in made)}
            and needed <= last.keys()
            and all(last[name] == n for name, n in sizes.items() if isinstance(last[name], int))
        )

    def running(self) -> AbstractContextManager[object]:
        """Return a context manager that does nothing, because ONNX Runtime needs none."""
        return nullcontext()

    def encode(self, pixels: NDArray[np.uint8]) -> Arrays:
        """Encode the pixels of photos, (B, H, W, 3), and return the graph's outputs by name."""
        names = [one.name for one in self.encoder.get_outputs()]
        found = _run(self.encoder, names, {"pixels": pixels})
        _require_numbers(found[SUMMARY])
        return found

    def memory(self, grids: Arrays) -> Arrays:
        """Return the outputs of ``encode`` unchanged, as they contain the decoder's inputs."""
        return grids

    def read(self, grids: Arrays) -> Reading | None:
        """Return log-odds that photos show each word (the reading), or None without a reading.

        ``grids`` contains the outputs of ``encode``. The reading has log-odds for whole photos,
        (B, S), and for each region, (B, L, S). Not every model is trained to compute it.
        """
        return Reading(*(grids[name] for name in READ)) if READING in grids else None

    def summary(self, memory: Arrays) -> NDArray[np.float32]:
        """Return the mean of each photo's region features, as the decoder uses them, (B, D)."""
        return memory[SUMMARY]

    def stepper(self, memory: Arrays, start: int) -> OnnxStepper:
        """Return a stepper, which runs the decoder word by word from the token id ``start``."""
        return OnnxStepper(self, memory, start)

    def score(self, memory: Arrays, tokens: NDArray[np.int64]) -> CaptionScores:
        """Return the decoder's results at every word of given captions, one word after another.

        ``tokens`` contains the ids of the start token, words and padding, (B, R, T).
        """
        stepper = OnnxStepper(self, memory, 0)
        stepper.state = {n: part.repeat(tokens.shape[1], 1) for n, part in stepper.state.items()}
        steps = [stepper.step(tokens[:, :, t]) for t in range(tokens.shape[2])]
        log_probs, alphas, gates = (np.stack(parts, axis=2) for parts in zip(*steps, strict=True))
        return CaptionScores(log_probs, alphas, gates)


class OnnxStepper:
    """A stepper that runs ``decoder.onnx`` over the beams of a batch of photos."""

    xp = NUMPY
    device: Any = "cpu"
    end_token = END

    def __init__(self, engine: OnnxEngine, memory: Arrays, start_token: int) -> None:
        """Start with one beam per photo. The memory comes from ``OnnxEngine.encode``."""
        self.engine, self.start_token = engine, start_token
        self.state = {name: memory[name] for name in STATE if name in memory}  # (B, K, N) each
        self.memory = {
            name: part for name, part in memory.items() if name in engine.inputs - {*STATE}
        }

    @property
    def batch_size(self) -> int:
        """The number of photos that are not finished yet."""
        return len(self.state["hidden"])

    def step(self, tokens: NDArray[np.int64]) -> Advance:
        """Pass the last word of each beam, (B, K), to the decoder, and score the next word."""
        found = _run(self.engine.decoder, self.engine.outputs, self.inputs(tokens))
        _require_numbers(found["log_probs"][..., -1])  # if one value of a softmax is NaN, all are
        self.state = {name: found[NEXT + name] for name in self.state}
        return Advance(found["log_probs"], found["alphas"], found["gate"])

    def inputs(self, tokens: NDArray[np.int64]) -> Arrays:
        """Return all inputs of the decoder's graph for a step with these tokens, (B, K)."""
        given = {"tokens": tokens, **self.state, **self.memory}
        return {name: np.ascontiguousarray(given[name]) for name in self.engine.inputs}

    def advance(self, tokens: NDArray[np.int64]) -> Advance:
        """Pass the last word of every beam, (B, K), to the decoder, and score the next word.

        Tokens that a decoder never generates, such as padding, get -inf.
        """
        advance = self.step(tokens)
        advance.log_probs[..., list(NEVER_GENERATED)] = -np.inf
        return advance

    def reorder(self, parents: NDArray[np.int64]) -> None:
        """Let beam k of photo b continue beam ``parents[b, k]`` of the last step."""
        photos = np.arange(len(parents))[:, None]
        self.state = {name: part[photos, parents] for name, part in self.state.items()}

    def keep(self, rows: NDArray[np.int64]) -> None:
        """Drop all photos except those with these indices in the batch."""
        self.state = {name: part[rows] for name, part in self.state.items()}
        self.memory = {name: part[rows] for name, part in self.memory.items()}


def _run(session: Any, names: list[str], given: Arrays) -> Arrays:
    try:
        return dict(zip(names, session.run(names, given), strict=True))
    except Exception as error:  # ONNX Runtime's errors have no common base class
        raise ModelError(
            f"ONNX Runtime cannot run the model's graph ({first_line(error):.120}); export the "
            "model again, or use the model folder that it was exported from"
        ) from error


def _require_numbers(values: NDArray[Any]) -> None:
    if np.isnan(values).any():
        raise ModelError(
            "the model's results are NaN, so its weights are damaged; export the model again"
        )


def _providers(device: str, folder: Path) -> list[str]:
    """Return the ONNX Runtime execution providers for a device, the preferred provider first.

    Operations that the first provider does not support run on the next provider.
    """
    gpu, cpu = "CUDAExecutionProvider", "CPUExecutionProvider"
    has_gpu = gpu in onnxruntime.get_available_providers()
    if device == "cpu" or (device == "auto" and not has_gpu):
        return [cpu]
    if device in ("auto", "cuda") and has_gpu:
        return [gpu, cpu]
    raise ConfigError(
        f"device {device!r} is not available for the exported model {folder}; use 'auto' or 'cpu'"
        + ("" if has_gpu else " (a GPU needs pip install onnxruntime-gpu)")
    )


def _session(path: Path, providers: list[str]) -> Any:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors only
    # Let waiting threads sleep, because spinning doubles the processor time.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    threads = os.environ.get("OMP_NUM_THREADS", "")
    if threads.isdecimal():  # torch uses the same variable
        options.intra_op_num_threads = int(threads)
    try:
        return onnxruntime.InferenceSession(path, options, providers=providers)
    except Exception as error:  # ONNX Runtime's errors have no common base class
        reason = first_line(error)
        raise ModelError(f"cannot load {path} ({reason:.120}); export the model again") from error
