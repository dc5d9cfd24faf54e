"""Writes an exported folder and compares it with the model it was made from."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from captioner.caption import CropBox
from captioner.data.images import open_image
from captioner.errors import ModelError
from captioner.files import FREQUENCIES, atomic_folder
from captioner.inference.captioner import Captioner
from captioner.inference.engine import Ensemble, Prepared
from captioner.inference.export.graphs import OPSET, write_graphs
from captioner.inference.export.quantize import quantize_graphs
from captioner.inference.folder import (
    CARD,
    CONFIDENCE,
    DECODER_GRAPH,
    ENCODER_GRAPH,
    EXPORTED,
    KEYWORDS,
    TOKENIZER,
    WEIGHTS,
    StoredModel,
    find_model,
    load_model,
    read_config,
    write_config,
)
from captioner.inference.onnx_engine import OnnxEngine
from captioner.inference.torch_engine import TorchEngine
from captioner.model.captioner import CaptionModel
from captioner.text.vocabulary import END, NEVER_GENERATED, SPECIAL_NAMES, START

TOLERANCE = 1e-4
"""Largest difference of a log-probability (nats) between torch and ONNX Runtime."""

COMPARED = 100
"""Calibration photos whose captions are compared with float32's."""


class Exported(NamedTuple):
    """What was written."""

    sizes: dict[str, float]
    """Megabytes by file name."""
    difference: float
    """Largest difference of a log-probability or attention weight to torch, in float32."""
    equal: tuple[int, int] | None
    """8-bit: of how many calibration photos the caption is that of float32; None: float32."""


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
        output: Folder to write, or to replace once the new one is complete; may be the same.
        calibration: Photos to quantize the model to 8 bits with; none: float32.
        weights: Keep the model folder's weights and card beside the graphs.

    Raises:
        ModelError: The model cannot be loaded, or the graphs compute something else.
        ConfigError: The model has an operation that ONNX cannot express.
        ImageError: A calibration photo cannot be read.
    """
    path = find_model(folder)
    stored = load_model(path)
    config = _exported_config(path, stored)
    resize = stored.model.preprocessing.pixels
    photos = [Prepared((resize(open_image(photo)),), CropBox()) for photo in calibration]
    with atomic_folder(output) as new:
        attention = stored.decoder.attention
        write_graphs(stored.model, attention, new / ENCODER_GRAPH, new / DECODER_GRAPH)
        write_config(new, config)
        kept = (WEIGHTS, CARD) if weights else ()
        for name in (TOKENIZER, FREQUENCIES, CONFIDENCE, KEYWORDS, *kept):
            if (path / name).is_file():
                shutil.copyfile(path / name, new / name)
        difference = largest_difference(stored.model, new)
        if not difference <= TOLERANCE:
            raise ModelError(
                f"the exported graphs of {path} differ from the model by {difference:.2g} in the "
                f"log-probability of a word (allowed: {TOLERANCE:g}); nothing was written"
            )
        equal = _quantize(new, config, photos) if photos else None
        sizes = {one.name: one.stat().st_size / 1e6 for one in sorted(new.iterdir())}
    return Exported(sizes, difference, equal)


def _quantize(folder: Path, config: dict[str, Any], photos: Sequence[Prepared]) -> tuple[int, int]:
    """Make an exported folder 8-bit; see ``Exported.equal``."""
    model = Captioner(load_model(folder), device="cpu")
    compared = photos[:COMPARED]
    options = model.options(num_captions=1)
    expected = model.caption_batch(compared, options)
    quantize_graphs(folder, [photo.pixels[0] for photo in photos])
    write_config(folder, config | {EXPORTED: config[EXPORTED] | {"precision": "int8"}})
    found = Captioner(load_model(folder), device="cpu").caption_batch(compared, options)
    pairs = zip(expected, found, strict=True)
    return sum(one[0].text == other[0].text for one, other in pairs), len(compared)


def _exported_config(folder: Path, stored: StoredModel) -> dict[str, Any]:
    """The config of a model folder, unknown entries included, with what the graphs need."""
    model, vocabulary, config = stored.model, stored.vocabulary, read_config(folder)
    config.pop(EXPORTED, None)
    config["encoder"] |= {"grid": model.grid, "geometry": model.geometry.as_dict()}
    tokens = {  # for programs without captioner's source, such as a web page
        "start": vocabulary.start(),
        "end": END,
        "never_generated": NEVER_GENERATED,
        "first_word": len(SPECIAL_NAMES),
        "styles": {style: vocabulary.start(style) for style in vocabulary.styles},
    }
    source = digest(folder / WEIGHTS)
    exported = {"opset": OPSET, "precision": "fp32", "tokens": tokens, "source": source}
    return {EXPORTED: exported, **config}


def digest(path: Path) -> str:
    """A short hash of a weights file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:12]


def largest_difference(model: CaptionModel, folder: Path) -> float:
    """Largest difference of a log-probability or of an attention weight, on random photos.

    Random words are fed, so that a difference in the state would add up.
    """
    graphs = load_model(folder).graphs
    assert graphs is not None
    engines = (TorchEngine(model, "cpu", "fp32"), OnnxEngine(graphs, "cpu", "auto"))
    rng = np.random.default_rng(0)
    size = model.preprocessing.image_size
    pixels = rng.integers(256, size=(3, size, size, 3), dtype=np.uint8)
    photos = [Prepared((one,), CropBox()) for one in pixels]
    words = rng.integers(END, model.decoder.word_output.out_features, size=(3, 2, 8))
    scores = []
    for engine in engines:
        ensemble = Ensemble([engine])
        memories = ensemble.memories(ensemble.encode(photos))
        scores.append(ensemble.score(memories, words.tolist(), START))
    one, other = scores
    pairs = (one.log_probs, other.log_probs), (one.alphas, other.alphas)
    return float(np.max([np.abs(own - exported).max() for own, exported in pairs]))
