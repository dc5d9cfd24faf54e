"""Writes a model as two ONNX graphs; ``captioner.inference.onnx_engine`` runs them."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from captioner.errors import ConfigError, first_line
from captioner.inference.onnx_engine import NEXT, STATE, SUMMARY
from captioner.model.attention import Memory
from captioner.model.captioner import CaptionModel
from captioner.model.decoder import Decoder, State
from captioner.model.efficientnet_lite import fold_norms

OPSET = 18
"""ONNX operator set: the first that torch's exporter writes; onnxruntime has read it since 1.14,
onnxruntime-web too."""

MEMORY = ("values", "keys")
EXAMPLES = 2
"""Photos and beams of the example inputs; 1 would be taken as a constant."""


def encode(model: CaptionModel, pixels: Tensor) -> dict[str, Tensor]:
    """From pixels (B, H, W, 3) the initial state, the memory and the summary, by name."""
    memory = model.decoder.memory(model.encode(pixels))
    state = model.decoder.start(memory)
    given = zip((*STATE, *MEMORY), (*state, memory.values, memory.keys), strict=True)
    parts = {name: part for name, part in given if part is not None}
    return parts | {SUMMARY: memory.summary.squeeze(1)}


def decode(decoder: Decoder, tokens: Tensor, **given: Tensor) -> dict[str, Tensor]:
    """One step, results by name, from the tokens (B, K), the state and the memory."""
    state = State(given["hidden"], given["cell"], given.get("fed"))
    # The summary only sets the initial state, which the encoder's graph computes.
    memory = Memory(given["values"], given["keys"], given["hidden"], None)
    embedded = decoder.embed(tokens)
    step = decoder.step(decoder.word_gates(embedded), state, memory)
    logits = decoder.readout(embedded, *step.outputs)
    results = {
        "log_probs": logits.log_softmax(dim=-1),
        "alphas": step.alphas,
        "gate": step.gate.squeeze(-1),
    }
    states = zip(STATE, step.state, strict=True)
    return results | {NEXT + name: part for name, part in states if part is not None}


class Graph(nn.Module):
    """A function of a module with inputs and outputs by position, as the exporter needs them."""

    def __init__(
        self, function: Callable[..., dict[str, Tensor]], module: nn.Module, inputs: list[str]
    ) -> None:
        super().__init__()
        self.function, self.module, self.inputs = function, module.eval(), inputs
        self.outputs: list[str] = []

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """The results that ``outputs`` names."""
        results = self.function(self.module, **dict(zip(self.inputs, tensors, strict=True)))
        return tuple(results[name] for name in self.outputs)


@torch.no_grad()
def write_graphs(model: CaptionModel, attention: str, encoder: Path, decoder: Path) -> None:
    """Write both graphs of a model in eval mode, in float32; its batch norms are folded in place.

    ConfigError: the encoder or the attention has an operation that ONNX cannot express.
    """
    fold_norms(model.encoder)
    size = model.preprocessing.image_size
    pixels = torch.zeros(EXAMPLES, size, size, 3, dtype=torch.uint8)
    given = encode(model, pixels)
    tokens = torch.zeros(EXAMPLES, EXAMPLES + 1, dtype=torch.long)
    inputs = {"tokens": tokens}
    for name, part in given.items():
        if name == SUMMARY:
            continue
        beams = EXAMPLES + 1 if name in STATE else part.shape[1]
        inputs[name] = part.expand(-1, beams, *part.shape[2:]).clone()
    graph = Graph(decode, model.decoder, list(inputs))
    graph.outputs = list(decode(model.decoder, **inputs))
    read = _write(graph, inputs, decoder, f"the decoder with attention {attention}")
    graph = Graph(encode, model, ["pixels"])
    # Of the memory, only what the decoder's graph reads.
    graph.outputs = [name for name in given if name in read or name in (*STATE, SUMMARY)]
    _write(graph, {"pixels": pixels}, encoder, f"the encoder {model.encoder.name}")


def _write(graph: Graph, inputs: Mapping[str, Tensor], path: Path, what: str) -> set[str]:
    """Export a graph and return the names of the inputs that it reads."""
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
            f"{what} cannot be exported to ONNX ({first_line(error):.160})"
        ) from error
    assert program is not None
    model = program.model_proto
    read = {name for node in model.graph.node for name in node.input}
    for unused in [one for one in model.graph.input if one.name not in read]:
        model.graph.input.remove(unused)
    onnx.checker.check_model(model, full_check=True)
    onnx.save(model, path)
    return read


@contextmanager
def quiet() -> Iterator[None]:
    """Without the exporters' progress and warnings, which speak to developers."""
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)
