"""Makes an exported folder's graphs 8-bit.

    encoder    weights of the convolutions in int8, one scale per output channel; activations in
               uint8, in ranges seen on calibration photos (static quantization)
    products   weights in int8, one scale per column; activations in uint8, in the range of each
               input (dynamic quantization): projections of the encoder, the whole decoder
    words      the embedding in int8

The decoder is not calibrated, since the ranges of its state depend on the words.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from captioner.inference.export.graphs import quiet
from captioner.inference.folder import DECODER_GRAPH, ENCODER_GRAPH

STATIC = ("Conv", "Clip", "Add")
"""Operators of the encoder that are quantized statically; the others stay float32."""


def quantize_graphs(folder: Path, pixels: Sequence[NDArray[np.uint8]]) -> None:
    """Replace the graphs of an exported folder by 8-bit ones.

    Args:
        folder: Exported folder in float32.
        pixels: Calibration photos, (H, W, 3) each, from ``Preprocessing.pixels``.
    """
    from onnxruntime.quantization import (
        CalibrationMethod,
        QuantFormat,
        QuantType,
        quantize_dynamic,
        quantize_static,
    )
    from onnxruntime.quantization.shape_inference import quant_pre_process

    encoder, decoder = folder / ENCODER_GRAPH, folder / DECODER_GRAPH
    with quiet(), tempfile.TemporaryDirectory() as temporary:
        prepared, static = Path(temporary) / "prepared.onnx", Path(temporary) / ENCODER_GRAPH
        quant_pre_process(encoder, prepared, skip_symbolic_shape=True)  # folds constants
        quantize_static(
            prepared,
            static,
            _Photos(pixels),
            quant_format=QuantFormat.QDQ,
            op_types_to_quantize=list(STATIC),
            per_channel=True,
            activation_type=QuantType.QUInt8,
            weight_type=QuantType.QInt8,
            calibrate_method=CalibrationMethod.MinMax,
        )
        dynamic: dict[str, Any] = {"per_channel": True, "weight_type": QuantType.QInt8}
        quantize_dynamic(static, encoder, op_types_to_quantize=["MatMul"], **dynamic)
        smaller = Path(temporary) / DECODER_GRAPH
        quantize_dynamic(
            decoder,
            smaller,
            op_types_to_quantize=["MatMul", "Gather"],
            nodes_to_exclude=_vector_products(decoder),
            **dynamic,
        )
        decoder.write_bytes(smaller.read_bytes())


def _vector_products(path: Path) -> list[str]:
    """Names of the products with a vector, such as v in additive attention: it has no columns."""
    import onnx

    graph = onnx.load(path).graph
    vectors = {one.name for one in graph.initializer if len(one.dims) < 2}
    products = (node for node in graph.node if node.op_type == "MatMul")
    return [node.name for node in products if vectors.intersection(node.input)]


class _Photos:
    """The calibration photos, one at a time, as ONNX Runtime reads them."""

    def __init__(self, pixels: Sequence[NDArray[np.uint8]]) -> None:
        self._remaining: Iterator[NDArray[np.uint8]] = iter(pixels)

    def get_next(self) -> dict[str, NDArray[np.uint8]] | None:
        one = next(self._remaining, None)
        return None if one is None else {"pixels": one[None]}
