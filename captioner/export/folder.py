"""Writes an exported folder and compares it with the model it was made from."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from captioner.caption import CropBox
from captioner.errors import ModelError
from captioner.export.graphs import OPSET, write_graphs
from captioner.files import FREQUENCIES, atomic_folder
from captioner.inference import Ensemble, Prepared
from captioner.model_config import (
    CONFIG,
    DECODER_GRAPH,
    ENCODER_GRAPH,
    EXPORTED,
    TOKENIZER,
    find_model,
    read_config,
)
from captioner.model_folder import load_model
from captioner.models.captioner import CaptionModel
from captioner.onnx_engine import OnnxEngine, read_exported
from captioner.torch_engine import TorchEngine
from captioner.vocabulary import END, NEVER_GENERATED, START

TOLERANCE = 1e-4
"""Largest difference of a log-probability (nats) between torch and ONNX Runtime."""

COPIED = (TOKENIZER, FREQUENCIES)


def export(folder: str | Path, output: str | Path) -> dict[str, float]:
    """Export a model folder, and check the result against the model.

    Args:
        folder: Model or run folder.
        output: Folder to write; an existing one is replaced once the new one is complete.

    Returns:
        Sizes in megabytes by file name, and the largest difference to torch.

    Raises:
        ModelError: The model cannot be loaded, or the graphs compute something else.
        ConfigError: The model has an operation that ONNX cannot express.
    """
    path = find_model(folder)
    stored = load_model(path)
    config = exported_config(read_config(path), stored.model)
    with atomic_folder(output) as new:
        attention = stored.decoder.attention
        write_graphs(stored.model, attention, new / ENCODER_GRAPH, new / DECODER_GRAPH)
        text = json.dumps(config, indent=1, ensure_ascii=False) + "\n"
        (new / CONFIG).write_text(text, encoding="utf-8")
        for name in COPIED:
            if (path / name).is_file():
                shutil.copyfile(path / name, new / name)
        difference = largest_difference(stored.model, new)
        if not difference <= TOLERANCE:
            raise ModelError(
                f"the exported graphs of {path} differ from the model by {difference:.2g} in the "
                f"log-probability of a word (allowed: {TOLERANCE:g}); nothing was written"
            )
        sizes = {one.name: one.stat().st_size / 1e6 for one in sorted(new.iterdir())}
    return {**sizes, "difference": difference}


def exported_config(config: Mapping[str, Any], model: CaptionModel) -> dict[str, Any]:
    """The config of a model folder, unknown entries included, with what the graphs need."""
    encoder = config["encoder"] | {"grid": model.grid, "geometry": model.geometry.as_dict()}
    exported = {
        "opset": OPSET,
        "precision": "fp32",
        # For programs without captioner's source, such as a web page.
        "tokens": {"start": START, "end": END, "never_generated": NEVER_GENERATED},
    }
    return {EXPORTED: exported, **config, "encoder": encoder}


def largest_difference(model: CaptionModel, folder: Path) -> float:
    """Largest difference of a log-probability or of an attention weight, on random photos.

    Random words are fed, so that a difference in the state would add up.
    """
    engines = TorchEngine(model, "cpu", "fp32"), OnnxEngine(read_exported(folder), "cpu", "auto")
    rng = np.random.default_rng(0)
    size = model.preprocessing.image_size
    pixels = rng.integers(256, size=(3, size, size, 3), dtype=np.uint8)
    photos = [Prepared((one,), CropBox()) for one in pixels]
    words = rng.integers(END, model.decoder.word_output.out_features, size=(3, 2, 8))
    scores = []
    for engine in engines:
        ensemble = Ensemble([engine])
        memories = ensemble.encode(photos)
        scores.append(ensemble.score(memories, words.tolist(), START))
    one, other = scores
    return max(_distance(one.log_probs, other.log_probs), _distance(one.alphas, other.alphas))


def _distance(one: NDArray[np.float32], other: NDArray[np.float32]) -> float:
    """Largest difference; not a number if either has such values."""
    return float(np.abs(one - other).max())
