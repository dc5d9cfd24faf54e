"""Writes a model as two ONNX graphs; ``captioner.inference.onnx_engine`` runs them."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from captioner.errors import ConfigError, first_line
from captioner.inference.onnx_engine import NEXT, STATE, SUMMARY
from captioner.model.attention import Memory
from captioner.model.captioner import CaptionModel
from captioner.model.decoder import State
from captioner.model.efficientnet_lite import fold_norms

OPSET = 18
"""ONNX operator set: the first that torch's exporter writes; onnxruntime has read it since 1.14,
onnxruntime-web too."""

MEMORY = ("values", "keys")
EXAMPLES = 2
"""Photos and beams of the example inputs; 1 would be taken as a constant."""


class EncoderGraph(nn.Module):
    """Pixels (B, H, W, 3) to the initial state, the memory and the summary."""

    def __init__(self, model: CaptionModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixels: Tensor) -> dict[str, Tensor]:
        """All that the decoder may need, and the summary, by name."""
        decoder = self.model.decoder
        memory = decoder.memory(self.model.encode(pixels))
        state = decoder.start(memory)
        given = zip((*STATE, *MEMORY), (*state, memory.values, memory.keys), strict=True)
        parts = {name: part for name, part in given if part is not None}
        return parts | {SUMMARY: memory.summary.squeeze(1)}


class DecoderGraph(nn.Module):
    """One step: ``Decoder.step`` and ``Decoder.readout``."""

    def __init__(self, model: CaptionModel) -> None:
        super().__init__()
        self.decoder = model.decoder

    def forward(self, tokens: Tensor, **given: Tensor) -> dict[str, Tensor]:
        """Results by name, from the tokens (B, K), the state and the memory."""
        decoder = self.decoder
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


@torch.no_grad()
def write_graphs(model: CaptionModel, attention: str, encoder: Path, decoder: Path) -> None:
    """Write both graphs of a model in eval mode, in float32; its batch norms are folded in place.

    ConfigError: the encoder or the attention has an operation that ONNX cannot express.
    """
    fold_norms(model.encoder)
    size = model.preprocessing.image_size
    pixels = torch.zeros(EXAMPLES, size, size, 3, dtype=torch.uint8)
    graph = EncoderGraph(model)
    given = graph(pixels)
    tokens = torch.zeros(EXAMPLES, EXAMPLES + 1, dtype=torch.long)
    inputs = {"tokens": tokens}
    for name, part in given.items():
        if name == SUMMARY:
            continue
        beams = EXAMPLES + 1 if name in STATE else part.shape[1]
        inputs[name] = part.expand(-1, beams, *part.shape[2:]).clone()
    decoder_graph = DecoderGraph(model)
    read = _write(decoder_graph, inputs, decoder, f"the decoder with attention {attention}")
    # Of the memory, the encoder's graph computes only what the decoder's graph reads.
    outputs = [name for name in given if name in read or name in (*STATE, SUMMARY)]
    _write(graph, {"pixels": pixels}, encoder, f"the encoder {model.encoder.name}", outputs)


def _write(
    module: nn.Module,
    inputs: Mapping[str, Tensor],
    path: Path,
    what: str,
    outputs: list[str] | None = None,
) -> set[str]:
    """Export a module and return the names of the inputs that its graph reads."""
    import onnx

    batch, beam = torch.export.Dim("batch"), torch.export.Dim("beam")
    shapes: dict[str, Any] = {
        name: {0: batch, 1: beam} if name == "tokens" or name in STATE else {0: batch}
        for name in inputs
    }
    named = _Named(module.eval(), list(inputs), outputs)
    try:
        with quiet():
            program = torch.onnx.export(
                named,
                tuple(inputs.values()),
                dynamo=True,
                dynamic_shapes=(tuple(shapes.values()),),
                input_names=list(inputs),
                output_names=outputs or list(module(**inputs)),
                opset_version=OPSET,
                verbose=False,
            )
    except Exception as error:  # the exporter's errors have no common class
        raise ConfigError(
            f"{what} cannot be exported to ONNX ({first_line(error):.160})"
        ) from error
    assert program is not None
    graph = program.model_proto
    read = {name for node in graph.graph.node for name in node.input}
    for unused in [one for one in graph.graph.input if one.name not in read]:
        graph.graph.input.remove(unused)
    onnx.checker.check_model(graph, full_check=True)
    onnx.save(graph, path)
    return read


class _Named(nn.Module):
    """A module whose inputs and outputs by name are given by position, as the exporter needs."""

    def __init__(self, module: nn.Module, inputs: list[str], outputs: list[str] | None) -> None:
        super().__init__()
        self.module, self.inputs, self.outputs = module, inputs, outputs

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        results = self.module(**dict(zip(self.inputs, tensors, strict=True)))
        return tuple(results[name] for name in self.outputs or results)


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
