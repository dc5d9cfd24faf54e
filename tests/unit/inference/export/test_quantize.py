"""8-bit graphs: what is stored in 8 bits, and how far the results are from float32's."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto

from captioner.caption import CropBox
from captioner.inference.engine import CaptionScores, Ensemble, Prepared
from captioner.inference.export.folder import export
from captioner.inference.export.quantize import quantize_graphs
from captioner.inference.folder import (
    DECODER_GRAPH,
    ENCODER_GRAPH,
    StoredModel,
    load_model,
    save_model,
)
from captioner.inference.onnx_engine import OnnxEngine
from captioner.model.captioner import CaptionModel
from captioner.model.encoder import Encoder
from captioner.model.preprocessing import Preprocessing
from captioner.options import DecoderConfig, SearchOptions
from captioner.text.vocabulary import START, Vocabulary

pytestmark = pytest.mark.slow  # one export and one quantization


def photos(seed: int, count: int) -> list[np.ndarray]:
    """Smooth random colours, as noise would leave every range empty."""
    rng = np.random.default_rng(seed)
    small = rng.integers(256, size=(count, 4, 4, 3), dtype=np.uint8)
    return list(small.repeat(16, axis=1).repeat(16, axis=2))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The same model exported in float32 and in 8 bits."""
    folder = tmp_path_factory.mktemp("quantized")
    torch.manual_seed(1)
    vocabulary = Vocabulary([f"w{number}" for number in range(40)])
    config = DecoderConfig(embed_dim=24, hidden_dim=32, attention_dim=20, dropout=0.0)
    encoder, preprocessing = Encoder("timm/test_resnet"), Preprocessing(image_size=64)
    model = CaptionModel(encoder, config, preprocessing, len(vocabulary)).eval()
    stored = StoredModel(model, config, vocabulary, SearchOptions(beam_size=2, max_length=5))
    save_model(folder / "model", stored)
    export(folder / "model", folder / "float32")
    shutil.copytree(folder / "float32", folder / "int8")
    quantize_graphs(folder / "int8", photos(0, 16))
    return folder / "float32", folder / "int8"


def score(folder: Path) -> CaptionScores:
    ensemble = Ensemble([OnnxEngine(load_model(folder).graphs, "cpu", "auto")])
    memories = ensemble.encode([Prepared((one,), CropBox()) for one in photos(1, 6)])
    return ensemble.score(memories, [[[5, 9, 30, 12]]] * 6, START)


@pytest.mark.skipif(
    "vnni" not in Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else True,
    reason="without VNNI, ONNX Runtime's 8-bit products saturate",
)
def test_results_are_near_those_of_float32(folders) -> None:
    one, other = (score(folder) for folder in folders)

    spread = one.log_probs.std()
    assert 0 < np.abs(one.log_probs - other.log_probs).mean() < spread / 10
    assert np.abs(one.alphas - other.alphas).max() < 0.05
    np.testing.assert_allclose(other.alphas.sum(axis=-1), 1, atol=1e-5)


def test_every_convolution_has_a_scale_per_channel(folders) -> None:
    graph = onnx.load(folders[1] / ENCODER_GRAPH).graph
    held = {one.name: one for one in graph.initializer}
    sources = {name: node for node in graph.node for name in node.output}
    convolutions = [node for node in graph.node if node.op_type == "Conv"]

    assert convolutions
    for node in convolutions:
        weight, scale, _ = (held[name] for name in sources[node.input[1]].input)
        assert weight.data_type == TensorProto.INT8
        assert list(scale.dims) == [weight.dims[0]]


def test_the_decoder_is_a_third_of_the_size(folders) -> None:
    graphs = [onnx.load(folder / DECODER_GRAPH).graph for folder in folders]
    weights = [sum(one.ByteSize() for one in graph.initializer) for graph in graphs]

    assert weights[1] < weights[0] / 3
    kinds = {node.op_type for node in graphs[1].node}
    assert {"MatMulInteger", "DynamicQuantizeLinear"} <= kinds
