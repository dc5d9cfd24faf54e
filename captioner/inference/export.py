"""Export of a model as two ONNX graphs for ``onnx_engine``, with a check of their results."""

from __future__ import annotations

import contextlib
import hashlib
import io
import logging
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from captioner.caption_types import CropBox
from captioner.data.images import open_image
from captioner.errors import ConfigError, ModelError
from captioner.files import atomic_folder
from captioner.inference.captioner import Captioner
from captioner.inference.config_file import write_config
from captioner.inference.engine import Ensemble, Prepared
from captioner.inference.find_model import find_model
from captioner.inference.folder import load_model
from captioner.inference.names import (
    CARD,
    CONFIDENCE,
    DECODER_GRAPH,
    ENCODER_GRAPH,
    EXPORTED,
    FREQUENCIES,
    GRAMMAR,
    TOKENIZER,
    WEIGHTS,
)
from captioner.inference.onnx_engine import NEXT, READ, STATE, SUMMARY, OnnxEngine
from captioner.inference.quantize import quantize_graphs
from captioner.inference.stored_model import StoredModel
from captioner.inference.torch_engine import TorchEngine
from captioner.messages import first_line
from captioner.model.attention import Memory
from captioner.model.caption_model import CaptionModel
from captioner.model.decoder import Decoder, State
from captioner.model.efficientnet_lite import fold_norms
from captioner.text.vocabulary import END, NEVER_GENERATED, SPECIAL_NAMES, START

OPSET = 18
"""Version of the ONNX operator set. It is the lowest version that torch's exporter writes. ONNX
Runtime has supported it since 1.14, and onnxruntime-web supports it too."""

MEMORY = ("values", "keys")
EXAMPLES = 2
"""Number of photos in the example inputs. The number of beams is larger by 1. If one of the numbers
were 1, the exporter would turn it into a constant."""
TOLERANCE = 1e-4
"""Largest allowed difference of a log-probability between torch and ONNX Runtime, in nats."""

COMPARED = 100
"""Number of calibration photos for which 8-bit and float32 captions are compared."""


class Exported(NamedTuple):
    """The result of an export."""

    sizes: dict[str, float]
    """Size of each file in megabytes, by name."""
    difference: float
    """Largest difference between the results of the float32 graphs and of torch."""
    equal: tuple[int, int] | None
    """Number of calibration photos that get the same caption in 8 bits and in float32, and number
    of compared photos. None for a float32 export."""


def export(
    folder: str | Path,
    output: str | Path,
    calibration: Sequence[str | Path] = (),
    *,
    weights: bool = False,
) -> Exported:
    """Export a model folder, and check the result against the model.

    Args:
        folder: Model or run folder.
        output: Folder to write. An existing folder is replaced when the new one is complete. It may
            be ``folder`` itself.
        calibration: Photos for quantizing the model to 8 bits. Without photos, the graphs stay in
            float32.
        weights: Keep the model folder's weights and card next to the graphs.

    Raises:
        ModelError: The model cannot be loaded, or the graphs compute different results.
        ConfigError: The model has an operation that ONNX cannot express.
        ImageError: A calibration photo cannot be read.
    """
    path = find_model(folder)
    stored = load_model(path)
    resize = stored.model.preprocessing.pixels
    config = _exported_config(path, stored)
    photos = [Prepared((resize(open_image(photo)),), CropBox()) for photo in calibration]
    with atomic_folder(output) as new:
        attention = stored.decoder.attention
        write_graphs(stored.model, attention, new / ENCODER_GRAPH, new / DECODER_GRAPH)
        write_config(new, config)
        kept = (WEIGHTS, CARD) if weights else ()
        for name in (TOKENIZER, FREQUENCIES, CONFIDENCE, GRAMMAR, *kept):
            if (path / name).is_file():
                shutil.copyfile(path / name, new / name)
        difference = largest_difference(stored.model, new)
        if not difference <= TOLERANCE:
            raise ModelError(
                f"the exported graphs of {path} differ from the model by {difference:.2g} in the "
                f"log-probability of a word (allowed: {TOLERANCE:g}), so nothing was written; "
                "update torch and onnx, or use the model without exporting it"
            )
        equal = _quantize(new, config, photos) if photos else None
        sizes = {one.name: one.stat().st_size / 1e6 for one in sorted(new.iterdir())}
    return Exported(sizes, difference, equal)


def _quantize(folder: Path, config: dict[str, Any], photos: Sequence[Prepared]) -> tuple[int, int]:
    """Quantize an exported folder to 8 bits, and compare its captions with float32.

    Returns:
        The number of compared photos with equal captions, and the number of compared photos.
    """
    model = Captioner(load_model(folder), device="cpu")
    compared = photos[:COMPARED]
    options = model.options(num_captions=1)
    expected = model.caption_batch(compared, options)
    with quiet():
        quantize_graphs(folder, [photo.pixels[0] for photo in photos])
    write_config(folder, config | {EXPORTED: config[EXPORTED] | {"precision": "int8"}})
    found = Captioner(load_model(folder), device="cpu").caption_batch(compared, options)
    pairs = zip(expected, found, strict=True)
    return sum(one[0].text == other[0].text for one, other in pairs), len(compared)


def _exported_config(folder: Path, stored: StoredModel) -> dict[str, Any]:
    """Return the config of a model folder, to which the entry for the graphs is added."""
    vocabulary = stored.vocabulary
    tokens = {  # for programs without captioner's source, such as a web page
        "start": vocabulary.start(),
        "end": END,
        "never_generated": NEVER_GENERATED,
        "first_word": len(SPECIAL_NAMES),
        "styles": {style: vocabulary.start(style) for style in vocabulary.styles},
    }
    source = digest(folder / WEIGHTS)
    exported = {"opset": OPSET, "precision": "fp32", "tokens": tokens, "source": source}
    return {EXPORTED: exported} | {n: v for n, v in stored.config.items() if n != EXPORTED}


def digest(path: Path) -> str:
    """Return a short hash of a weights file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:12]


def largest_difference(model: CaptionModel, folder: Path) -> float:
    """Return the largest difference between the results of torch and the results of the graphs.

    The photos are random. Log-probabilities, attention weights and log-odds are compared. Several
    random words are passed one after another, so that errors in the state add up. For log-odds
    above 1, the relative difference is used.
    """
    engines = (TorchEngine(model, "cpu", "fp32"), OnnxEngine(load_model(folder), "cpu", "auto"))
    rng = np.random.default_rng(0)
    size = model.preprocessing.image_size
    pixels = rng.integers(256, size=(3, size, size, 3), dtype=np.uint8)
    photos = [Prepared((one,), CropBox()) for one in pixels]
    words = rng.integers(END + 1, model.decoder.word_output.out_features, size=(3, 2, 8))
    results = []
    for engine in engines:
        ensemble = Ensemble([engine])
        grids = ensemble.encode(photos)
        scores = ensemble.score(ensemble.memories(grids), words.tolist(), START)
        results.append([scores.log_probs, scores.alphas, *(ensemble.read(grids) or ())])
    pairs = [*zip(*results, strict=True)]
    differences = [np.abs(own - exported) for own, exported in pairs[:2]]
    differences += [np.abs(own - exported) / np.abs(own).clip(min=1) for own, exported in pairs[2:]]
    return float(np.max([part.max() for part in differences]))


# --- graphs ---------------------------------------------------------------------------------------


def encode(model: CaptionModel, pixels: Tensor) -> dict[str, Tensor]:
    """Encode photos (B, H, W, 3), and return the outputs of the encoder's graph by name."""
    features = model.encode(pixels)
    memory = model.decoder.memory(features)
    state = model.decoder.start(memory)
    given = zip((*STATE, *MEMORY), (*state, memory.values, memory.keys), strict=True)
    parts = {name: part for name, part in given if part is not None}
    parts |= {SUMMARY: memory.summary.squeeze(1)}
    if model.reading is not None:
        parts |= zip(READ, model.reading(features), strict=True)
    return parts


def decode(decoder: Decoder, tokens: Tensor, **given: Tensor) -> dict[str, Tensor]:
    """Run the decoder for one word, and return the results of the decoder's graph by name.

    Args:
        decoder: The decoder.
        tokens: The last word of K beams for each photo, (B, K).
        **given: The decoder's state and its inputs for the photos (memory), by name.
    """
    state = State(given["hidden"], given["cell"], given.get("fed"))
    # The decoder needs the summary only for the initial state. The encoder's graph computes it.
    memory = Memory(given["values"], given["keys"], given["hidden"], None)
    embedded, word_inputs = decoder.words(tokens)
    step = decoder.step(word_inputs, state, memory)
    logits = decoder.readout(embedded, *step.outputs)
    results = {
        "log_probs": logits.log_softmax(dim=-1),
        "alphas": step.alphas,
        "gate": step.beta.squeeze(-1),
    }
    states = zip(STATE, step.state, strict=True)
    return results | {NEXT + name: part for name, part in states if part is not None}


class Graph(nn.Module):
    """A module with tensors as positional arguments and results, as the exporter requires."""

    def __init__(
        self, function: Callable[..., dict[str, Tensor]], module: nn.Module, inputs: list[str]
    ) -> None:
        super().__init__()
        self.function, self.module, self.inputs = function, module.eval(), inputs
        self.outputs: list[str] = []

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Return the results with the names in ``outputs``."""
        results = self.function(self.module, **dict(zip(self.inputs, tensors, strict=True)))
        return tuple(results[name] for name in self.outputs)


@torch.no_grad()
def write_graphs(model: CaptionModel, attention: str, encoder: Path, decoder: Path) -> None:
    """Write both graphs of a model in float32.

    The model is switched to eval mode, and its batch norms are folded in place.

    Raises:
        ConfigError: The encoder or the attention has an operation that ONNX cannot express.
    """
    fold_norms(model.encoder)
    size = model.preprocessing.image_size
    pixels = torch.zeros(EXAMPLES, size, size, 3, dtype=torch.uint8)
    given = encode(model, pixels)
    tokens = torch.zeros(EXAMPLES, EXAMPLES + 1, dtype=torch.long)
    inputs = {"tokens": tokens}
    for name, part in given.items():
        if name in (SUMMARY, *READ):
            continue
        beams = EXAMPLES + 1 if name in STATE else part.shape[1]
        inputs[name] = part.expand(-1, beams, *part.shape[2:]).clone()
    graph = Graph(decode, model.decoder, list(inputs))
    graph.outputs = list(decode(model.decoder, **inputs))
    read = _write(graph, inputs, decoder, f"the decoder with attention {attention}")
    graph = Graph(encode, model, ["pixels"])
    # Keep only the parts of the memory that the decoder's graph reads.
    graph.outputs = [name for name in given if name in {*read, *STATE, SUMMARY, *READ}]
    _write(graph, {"pixels": pixels}, encoder, f"the encoder {model.encoder.name}")


def _write(graph: Graph, inputs: Mapping[str, Tensor], path: Path, what: str) -> set[str]:
    """Export a graph, and return the names of the inputs that its nodes use."""
    import onnx

    batch, beam = torch.export.Dim("batch"), torch.export.Dim("beam")
    shapes: dict[str, Any] = {
        name: {0: batch, 1: beam} if name == "tokens" or name in STATE else {0: batch}
        for name in inputs
    }
    try:
        with quiet():
            program = torch.onnx.export(
                graph,
                tuple(inputs.values()),
                dynamo=True,
                dynamic_shapes=(tuple(shapes.values()),),
                input_names=list(inputs),
                output_names=graph.outputs,
                opset_version=OPSET,
                verbose=False,
            )
    except Exception as error:  # the exporter's errors have no common class
        raise ConfigError(
            f"{what} cannot be exported to ONNX ({first_line(error):.160}); use the model with "
            "PyTorch, without exporting it"
        ) from error
    assert program is not None
    model = program.model_proto
    read = {name for node in model.graph.node for name in node.input}
    for unused in [one for one in model.graph.input if one.name not in read]:
        model.graph.input.remove(unused)
    onnx.checker.check_model(model, full_check=True)
    onnx.save(model, path)
    return read


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence the progress messages and warnings of torch's exporter and of the quantizer."""
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)
