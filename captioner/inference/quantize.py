"""Makes the graphs of an exported folder 8-bit.

Weights are int8 with a scale for each output channel, activations uint8 in ranges seen while the
float32 graphs caption calibration photos (static quantization): results depend neither on the
batch nor on the processor. The embedding is int8 too; products with a vector (v in additive
attention), softmax and layer norms stay float32. So do the sums behind the last products of the
reading: in 8 bits, log-odds would have steps of 0.1.

Processors with AVX2 and no VNNI (``vpmaddubsw``) add the products of two neighbouring inputs in 16
bits, which overflow if both weights are large and of the same sign. Scales are therefore chosen so
that such pairs add up to at most 128: 255 * 128 < 2**15. The depthwise convolutions, whose
kernels multiply in 32 bits, use the full range.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from captioner.inference.folder import load_model
from captioner.inference.names import DECODER_GRAPH, ENCODER_GRAPH
from captioner.inference.onnx_engine import READ, OnnxEngine, OnnxStepper

QUANTIZED = {ENCODER_GRAPH: ["Conv", "Clip", "Add", "MatMul"], DECODER_GRAPH: ["MatMul", "Gather"]}
"""Operators that are quantized in each graph."""
LARGEST = 127
PAIR = 128
"""Largest absolute value of a weight, and of the sum of two neighbours of the same sign."""

_Array = NDArray[Any]


def quantize_graphs(folder: Path, pixels: Sequence[NDArray[np.uint8]]) -> None:
    """Replace the float32 graphs of an exported folder by 8-bit ones.

    Calibration photos are (H, W, 3) each, from ``Preprocessing.pixels``.
    """
    feeds = {
        ENCODER_GRAPH: ({"pixels": photo[None]} for photo in pixels),
        DECODER_GRAPH: _decoder_inputs(folder, pixels),
    }
    with tempfile.TemporaryDirectory() as temporary:
        for name, inputs in feeds.items():
            _quantize(folder / name, Path(temporary) / name, inputs)
        for name in feeds:
            (folder / name).write_bytes((Path(temporary) / name).read_bytes())


def _quantize(source: Path, target: Path, inputs: Iterator[dict[str, NDArray[Any]]]) -> None:
    import onnx
    from onnxruntime.quantization import CalibrationMethod, QuantFormat, QuantType, quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process

    prepared = target.with_suffix(".prepared.onnx")
    quant_pre_process(source, prepared, skip_symbolic_shape=True)  # folds constants
    excluded, scales = _plan(onnx.load(prepared).graph)
    quantize_static(
        prepared,
        target,
        SimpleNamespace(get_next=lambda: next(inputs, None)),
        quant_format=QuantFormat.QDQ,
        op_types_to_quantize=QUANTIZED[source.name],
        nodes_to_exclude=excluded,
        per_channel=True,
        activation_type=QuantType.QUInt8,
        weight_type=QuantType.QInt8,
        calibrate_method=CalibrationMethod.MinMax,
        extra_options={
            "TensorQuantOverrides": scales,
            "OpTypesToExcludeOutputQuantization": ["MatMul"],
        },
    )


def _decoder_inputs(
    folder: Path, pixels: Sequence[NDArray[np.uint8]]
) -> Iterator[dict[str, NDArray[Any]]]:
    """The decoder's inputs at every word of the photos' greedy captions, in every style."""
    stored = load_model(folder)
    engine = OnnxEngine(stored, "cpu", "auto")
    vocabulary = stored.vocabulary
    for photo in pixels:
        memory = engine.encode(photo[None])
        for style in vocabulary.styles or ("",):
            stepper = OnnxStepper(engine, memory, vocabulary.start(style))
            tokens = np.array([[stepper.start_token]])
            for _ in range(stored.search.max_length):
                yield stepper.inputs(tokens)
                tokens = stepper.advance(tokens).log_probs.argmax(-1)
                if tokens.item() == stepper.end_token:
                    break


def _plan(graph: Any) -> tuple[list[str], dict[str, list[dict[str, Any]]]]:
    """What stays float32, and the scale of each output channel of the weights, for the quantizer.

    The names of the products of two inputs (attention and values), of those with a vector, and of
    the sums behind the last products of the reading; and by weight, of the convolutions and the
    other products.
    """
    from onnx import numpy_helper

    held = {one.name: numpy_helper.to_array(one) for one in graph.initializer}
    excluded, scales = _behind_products(graph, READ), {}
    for node in graph.node:
        if node.op_type not in ("Conv", "MatMul"):
            continue
        weight, convolution = held.get(node.input[1]), node.op_type == "Conv"
        if weight is None or weight.ndim < 2:
            excluded.append(node.name)
            continue
        # Neighbours are inputs of a product, or channels of a convolution at one position.
        rows = np.moveaxis(weight, 1, -1) if convolution else weight.T
        rows = rows.reshape(len(rows), -1)
        depthwise = convolution and weight.shape[1] == 1
        scale = channel_scales(rows, paired=not depthwise)
        if convolution and len(node.input) > 2:
            # A channel without weights is its bias, an int32 at the scale of the weights.
            scale = np.where(rows.any(axis=1), scale, abs(held[node.input[2]]) / 1e6 + 1e-9)
        axis = 0 if convolution else 1
        scales[node.input[1]] = [
            {"axis": axis, "scale": np.float32(one), "zero_point": 0} for one in scale
        ]
    return excluded, scales


def _behind_products(graph: Any, outputs: Sequence[str]) -> list[str]:
    """The names of the nodes between these outputs, if the graph has them, and the last products.

    They are found from the outputs backwards.
    """
    makers = {name: node for node in graph.node for name in node.output}
    found, reached = [], [makers[name] for name in outputs if name in makers]
    while reached:
        node = reached.pop()
        if node.op_type not in ("MatMul", "Gemm") and node.name not in found:
            found.append(node.name)
            reached += [makers[name] for name in node.input if name in makers]
    return found


def channel_scales(weights: _Array, *, paired: bool) -> _Array:
    """The smallest scale of each output channel's weights, (C, K) to (C,), that the limits allow.

    ``paired`` limits the sums of inputs that are side by side, too.
    """
    largest = np.abs(weights).max(axis=1)
    scale: _Array = np.maximum(largest, 1e-12) / LARGEST
    if not paired:
        return scale
    pairs = np.pad(weights, ((0, 0), (0, weights.shape[1] % 2))).reshape(len(weights), -1, 2)

    def sums(pairs: _Array) -> _Array:
        positive, negative = pairs.clip(min=0), -pairs.clip(max=0)
        return np.asarray(np.maximum(positive.sum(-1).max(-1), negative.sum(-1).max(-1)))

    scale = np.maximum(scale, sums(pairs) / PAIR)
    while (too_large := sums(np.rint(pairs / scale[:, None, None])) > PAIR).any():  # rounded up
        scale[too_large] *= 1.002
    return scale
