"""Reading and writing of model folders.

    config.json                     architecture, preprocessing, vocabulary, region geometry, search
                                    defaults, training data, scores and (optional) the words of the
                                    reading, see ``reading``
    model.safetensors               weights as float16; training keeps its own float32 state
    tokenizer.json                  sub-word tokenizer, data of the `tokenizers` library; optional
    document_frequencies.json.gz    n-gram document frequencies of the training captions, to compute
                                    CIDEr-D of a few captions; optional
    confidence.safetensors          see ``confidence``; optional
    grammar.safetensors             see ``search.grammar``; optional
    README.md                       see ``card``; optional

    encoder.onnx, decoder.onnx      the network as graphs that run without torch, see
                                    ``onnx_engine``; optional

A folder has weights, graphs, or both. The config of a folder with graphs has the additional entry
``exported``. Nothing is pickled, and folders are written atomically. torch is imported only when
weights are read. If the folder also has graphs, the weights are read on first use.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

from captioner.errors import ModelError
from captioner.files import atomic_folder
from captioner.geometry import Geometry
from captioner.inference.config_file import (
    FORMAT_VERSION,
    config_errors,
    read_config,
    read_vocabulary,
    search_of,
    write_config,
)
from captioner.inference.find_model import find_model
from captioner.inference.names import (
    CONFIDENCE,
    CONFIG,
    EXPORTED,
    FREQUENCIES,
    GRAMMAR,
    GRAPHS,
    SHIPPED_MODEL,
    TOKENIZER,
    WEIGHTS,
)
from captioner.inference.stored_model import StoredModel
from captioner.model.preprocessing import Preprocessing
from captioner.options import DecoderConfig
from captioner.schema import build_options
from captioner.text.vocabulary import SPECIAL_NAMES


def load_model(folder: str | Path, revision: str | None = None, **hub_options: Any) -> StoredModel:
    """Read a model folder into memory.

    ``folder`` is a model folder, a run folder, ``shipped`` (the model in the package) or the name
    of a model on the Hugging Face hub, with an optional ``revision``.

    Raises:
        ModelError: A file is missing, damaged or not from captioner, or a newer version wrote the
            folder.
        ConfigError: The model needs torch, but torch is not installed.
    """
    from captioner.inference.confidence import read_calibrator
    from captioner.inference.grammar_file import read_grammar
    from captioner.inference.reading import ReadingWords

    path = find_model(folder, revision, **hub_options)
    config, counted = read_config(path), path / FREQUENCIES
    with config_errors(path):  # checks entries of engines, sites and info too
        Preprocessing.from_dict(config["preprocessing"])
        _, geometry = itemgetter("name", "geometry")(config["encoder"])
        Geometry.from_dict(geometry)
        _, _ = map(int, config["encoder"]["grid"])
        if EXPORTED in config:
            itemgetter("opset", "precision", "tokens")(config[EXPORTED])
        stored = StoredModel(
            None,
            build_options(DecoderConfig, config["decoder"]),
            read_vocabulary(path, config),
            search_of(config),
            dict(config.get("info", {})),
            counted.read_bytes() if counted.is_file() else None,
            read_calibrator(path),
            ReadingWords.from_config(config),
            read_grammar(path, len(config["vocabulary"]) + len(SPECIAL_NAMES)),
            path,
            config,
        )
    if not stored.has_graphs:
        stored.require_weights(f"the model {path}, which has no exported graphs,")
        assert stored.model
    return stored


def fingerprint(folder: str | Path) -> str:
    """Return a short hash of a model folder's config, tokenizer, weights and confidence."""
    path = find_model(folder)
    read_config(path)  # raises an error if a required file is missing
    digest = hashlib.sha256()
    for name in (CONFIG, TOKENIZER, *GRAPHS, WEIGHTS, CONFIDENCE, GRAMMAR):
        if (path / name).exists():  # the other files are optional
            digest.update((path / name).read_bytes())
    return digest.hexdigest()[:12]


def fingerprints(folders: Sequence[str | Path]) -> list[str]:
    """Return the fingerprints of model folders (default: only the model in the package)."""
    return [fingerprint(folder) for folder in folders or [SHIPPED_MODEL]]


def save_model(folder: str | Path, stored: StoredModel) -> None:
    """Write a model folder. An existing folder is replaced once the new folder is complete.

    Raises:
        ConfigError: The model has no weights, or torch is not installed.
        ModelError: The folder cannot be written (disk full, no permission).
    """
    from captioner.inference.grammar_file import grammar_bytes
    from captioner.inference.reading import READING
    from captioner.inference.weights import required_packages, to_bytes

    model, vocabulary = stored.model, stored.vocabulary
    config: dict[str, Any] = {
        "format_version": FORMAT_VERSION,
        "encoder": {
            "name": model.encoder.name,
            "grid": model.grid,
            "geometry": model.geometry.to_dict(),
        },
        "decoder": dataclasses.asdict(stored.decoder),
        "preprocessing": dataclasses.asdict(model.preprocessing),
        "search": dataclasses.asdict(stored.search),
        "info": stored.info,
        **required_packages(model, stored.decoder),
        "styles": vocabulary.styles,
        "vocabulary": vocabulary.words,
    }
    if model.reading is not None:
        assert stored.reading is not None
        config[READING] = stored.reading.as_config(model.reading.hidden)
    subwords, calibrator = vocabulary.subwords, stored.calibrator
    files = {
        FREQUENCIES: stored.frequencies,
        TOKENIZER: None if subwords is None else subwords.data.encode(),
        CONFIDENCE: None if calibrator is None else calibrator.to_bytes(),
        GRAMMAR: None if stored.grammar is None else grammar_bytes(stored.grammar),
    }
    if stored.has_graphs:
        assert stored.folder is not None
        config[EXPORTED] = stored.config[EXPORTED]
        files |= {name: (stored.folder / name).read_bytes() for name in GRAPHS}
    if subwords is not None:
        config["tokenizer"] = vocabulary.tokenizer
    try:
        with atomic_folder(folder) as new:
            (new / WEIGHTS).write_bytes(to_bytes(model))
            write_config(new, config)
            for name, content in files.items():
                if content is not None:
                    (new / name).write_bytes(content)
    except OSError as error:
        raise ModelError(
            f"cannot save {folder} ({error.strerror}), so its contents are unchanged; check your "
            "permissions and the free disk space"
        ) from error
