"""8-bit graphs: what is stored in 8 bits, and how far the results are from float32's."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from toy_captioner import add_reading, random_model

from captioner.caption_types import CropBox
from captioner.inference.engine import CaptionScores, Ensemble, Prepared
from captioner.inference.export import export, quiet
from captioner.inference.folder import load_model, save_model
from captioner.inference.names import DECODER_GRAPH, ENCODER_GRAPH
from captioner.inference.onnx_engine import OnnxEngine
from captioner.inference.quantize import channel_scales, quantize_graphs
from captioner.inference.reading import Reading
from captioner.options import DecoderConfig
from captioner.text.vocabulary import START

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
    words = tuple(f"w{number}" for number in range(40))
    config = DecoderConfig(embed_dim=24, hidden_dim=32, attention_dim=20, dropout=0.0)
    stored = random_model(1, config, words, factor=1, max_length=5)
    add_reading(stored, *words[:20])
    save_model(folder / "model", stored)
    export(folder / "model", folder / "float32")
    shutil.copytree(folder / "float32", folder / "int8")
    with quiet():
        quantize_graphs(folder / "int8", photos(0, 16))
    return folder / "float32", folder / "int8"


def score(folder: Path, shown: list[np.ndarray]) -> CaptionScores:
    """Of the same caption for every photo."""
    ensemble = Ensemble([OnnxEngine(load_model(folder), "cpu", "auto")])
    memories = ensemble.encode([Prepared((one,), CropBox()) for one in shown])
    return ensemble.score(memories, [[[5, 9, 30, 12]]] * len(shown), START)


def read(folder: Path, shown: list[np.ndarray]) -> Reading:
    ensemble = Ensemble([OnnxEngine(load_model(folder), "cpu", "auto")])
    return ensemble.read(ensemble.encode([Prepared((one,), CropBox()) for one in shown]))


def test_results_are_near_those_of_float32(folders) -> None:
    one, other = (score(folder, photos(1, 6)) for folder in folders)

    spread = one.log_probs.std()
    assert 0 < np.abs(one.log_probs - other.log_probs).mean() < spread / 10
    assert np.abs(one.alphas - other.alphas).max() < 0.05
    np.testing.assert_allclose(other.alphas.sum(axis=-1), 1, atol=1e-5)


def test_the_reading_is_near_that_of_float32(folders) -> None:
    one, other = (read(folder, photos(1, 6)) for folder in folders)

    for ours, theirs in zip(one, other, strict=True):
        assert 0 < np.abs(ours - theirs).mean() < ours.std() / 20
    # The last sums are not rounded to 256 steps: the odds of a photo are those of its regions.
    np.testing.assert_allclose(
        np.exp(other.words), np.exp(other.regions).mean(axis=1), rtol=1e-3, atol=1e-6
    )


def test_the_decoder_is_a_third_of_the_size(folders) -> None:
    graphs = [onnx.load(folder / DECODER_GRAPH).graph for folder in folders]
    weights = [sum(one.ByteSize() for one in graph.initializer) for graph in graphs]

    assert weights[1] < weights[0] / 3


def test_a_photo_does_not_depend_on_its_batch(folders) -> None:
    together = score(folders[1], photos(1, 6))

    for row, photo in enumerate(photos(1, 6)):
        alone = score(folders[1], [photo])
        np.testing.assert_array_equal(alone.log_probs[0], together.log_probs[row])


@pytest.mark.parametrize("name", [ENCODER_GRAPH, DECODER_GRAPH])
def test_sums_of_neighbouring_products_fit_16_bits(folders, name) -> None:
    graph = onnx.load(folders[1] / name).graph
    held = {one.name: numpy_helper.to_array(one) for one in graph.initializer}
    stored = {
        node.output[0]: held[node.input[0]].astype(int)
        for node in graph.node
        if node.op_type == "DequantizeLinear" and node.input[0] in held
    }
    checked = 0
    for node in graph.node:
        if node.op_type in ("Conv", "MatMul") and node.input[1] in stored:
            weight = stored[node.input[1]]
            rows = np.moveaxis(weight, 1, -1) if node.op_type == "Conv" else weight.T
            flat = rows.reshape(len(rows), -1)
            pairs = np.pad(flat, ((0, 0), (0, flat.shape[1] % 2))).reshape(len(rows), -1, 2)
            for signed in (pairs, -pairs):
                assert 255 * signed.clip(min=0).sum(axis=-1).max() < 2**15
            checked += 1
    assert checked >= 3


def test_scales_are_the_smallest_that_the_limits_allow() -> None:
    rows = np.array([[0.5, 1.0, -1.0, 1.0], [1.0, 1.0, 0.0, 0.0], [0.2, -0.7, 0.0, 0.0]])

    assert channel_scales(rows, paired=False) == pytest.approx([1 / 127, 1 / 127, 0.7 / 127])
    found = channel_scales(rows, paired=True)
    assert found[:2] == pytest.approx([1.5 / 128, 2 / 128], rel=0.02)
    assert found[2] == pytest.approx(0.7 / 127)
