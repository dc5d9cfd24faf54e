"""Quantization of the graphs of an exported folder to 8 bits.

Weights become int8, with one scale per output channel. Activations become uint8. Their ranges are
measured while the float32 graphs caption calibration photos (static quantization), so results
depend neither on the batch nor on the processor. The embedding also becomes int8. Three parts stay
float32: products with a vector (v in additive attention), softmax and layer norms, and the sums
after the last products of the reading. In 8 bits, the log-odds of the reading would have steps of
0.1.

Processors with AVX2 but without VNNI (``vpmaddubsw``) add the products of two neighbouring inputs
in 16 bits. The sum overflows if both weights are large and have the same sign. Scales are therefore
chosen so that such pairs add up to at most 128: 255 * 128 < 2**15. The kernels of depthwise
convolutions multiply in 32 bits, so these weights use the full range.
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
"""Largest absolute value of a quantized weight."""
PAIR = 128
"""Largest absolute value of the sum of two neighbouring quantized weights with equal signs."""

_Array = NDArray[Any]


def quantize_graphs(folder: Path, pixels: Sequence[NDArray[np.uint8]]) -> None:
    """Replace the float32 graphs of an exported folder with 8-bit graphs.

    ``pixels`` are the calibration photos, (H, W, 3) each, from ``Preprocessing.pixels``.
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
    """Yield the decoder's inputs at each word of each photo's greedy captions, in every style."""
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
    """Plan the quantization of a graph: the nodes that stay float32, and the scales of weights.

    Returns:
        The names of the nodes that stay float32: products of two inputs (attention and values),
        products with a vector, and the sums after the last products of the reading. The second
        value contains the scale of each output channel, by the name of the weight, for convolutions
        and other products.
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
        # Neighbours are adjacent inputs of a product, or adjacent channels at one kernel position.
        rows = np.moveaxis(weight, 1, -1) if convolution else weight.T
        rows = rows.reshape(len(rows), -1)
        depthwise = convolution and weight.shape[1] == 1
        scale = channel_scales(rows, paired=not depthwise)
        if convolution and len(node.input) > 2:
            # If all weights of a channel are 0, the scale only has to represent the int32 bias.
            scale = np.where(rows.any(axis=1), scale, abs(held[node.input[2]]) / 1e6 + 1e-9)
        axis = 0 if convolution else 1
        scales[node.input[1]] = [
            {"axis": axis, "scale": np.float32(one), "zero_point": 0} for one in scale
        ]
    return excluded, scales


def _behind_products(graph: Any, outputs: Sequence[str]) -> list[str]:
    """Return the names of the nodes between these outputs and the last products before them.

    Outputs that the graph does not have are ignored.
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
    """Return the smallest scale of each output channel that keeps its int8 weights within limits.

    The quantized weights are the weights divided by the scale. They are at most ``LARGEST`` (127).

    Args:
        weights: The weights of C channels, (C, K).
        paired: Also limit the sum of two neighbouring weights of equal sign to ``PAIR`` (128).

    Returns:
        The scales, (C,).
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
    while (
        too_large := sums(np.rint(pairs / scale[:, None, None])) > PAIR
    ).any():  # rounding can push a sum above the limit
        scale[too_large] *= 1.002
    return scale
