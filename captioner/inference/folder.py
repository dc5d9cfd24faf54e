"""Model folders: find, read and write them.

    config.json                     architecture, preprocessing, vocabulary, region geometry, search
                                    defaults, training data and scores; if the model has a reading,
                                    its words, see ``reading``
    model.safetensors               weights as float16; training keeps its own float32 state
    tokenizer.json                  sub-word tokenizer, data of the `tokenizers` library; optional
    document_frequencies.json.gz    n-gram document frequencies of the training captions, to compute
                                    CIDEr-D of a few captions; optional
    confidence.safetensors          see ``confidence``; optional
    grammar.safetensors             see ``search.grammar``; optional
    README.md                       see ``card``; optional

    encoder.onnx, decoder.onnx      the network as graphs that run without torch, see
                                    ``onnx_engine``; optional

A folder has weights, graphs, or both. With graphs its config has one more entry, ``exported``.
Nothing is pickled, and folders are written atomically. torch is imported when weights are read: not
before they are needed if there are graphs too.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from captioner.errors import CaptionerError, ConfigError, ModelError
from captioner.extras import require_extra
from captioner.files import FREQUENCIES, atomic_folder
from captioner.geometry import Geometry
from captioner.hardware import has_gpu
from captioner.inference import hub
from captioner.model.preprocessing import Preprocessing
from captioner.option_fields import build_options, option_fields
from captioner.options import DecoderConfig, SearchOptions
from captioner.text.vocabulary import SPECIAL_NAMES, Subwords, Vocabulary

if TYPE_CHECKING:  # the network is imported with torch
    from captioner.inference.confidence import Calibrator
    from captioner.inference.reading import ReadingWords
    from captioner.model.captioner import CaptionModel
    from captioner.search.grammar import Grammar

FORMAT_VERSION = 1
CONFIG = hub.CONFIG
WEIGHTS = "model.safetensors"
TOKENIZER = "tokenizer.json"
CONFIDENCE = "confidence.safetensors"
GRAMMAR = "grammar.safetensors"
CARD = "README.md"
ENCODER_GRAPH, DECODER_GRAPH = GRAPHS = ("encoder.onnx", "decoder.onnx")
MODEL_FILES = (CONFIG, WEIGHTS, *GRAPHS, TOKENIZER, FREQUENCIES, CONFIDENCE, GRAMMAR, CARD)
"""Everything that a model folder holds. Nothing else is read from it, downloaded or pushed."""
EXPORTED = "exported"
"""Entry of the config of a folder with graphs: opset, precision, special tokens and source, the
digest of the weights that were exported."""
REMOVED_SEARCH = ("guidance",)
"""Search options of earlier versions, which model folders still contain. They are ignored."""
BEST = "best"
RUN_CONFIG = "config.yaml"
"""In a run folder: the folder of its best model, and its settings."""

SHIPPED = "shipped"
"""Name of the model that is included, the default."""
SHIPPED_MODEL = Path(__file__).parents[1] / "pretrained"


@dataclass
class StoredModel:
    """The contents of a model folder."""

    network: CaptionModel | None
    """In float32 and eval mode, on the CPU; None: not read yet, or only exported."""
    decoder: DecoderConfig
    vocabulary: Vocabulary
    search: SearchOptions = field(default_factory=SearchOptions)
    """The model's default search options."""
    info: dict[str, Any] = field(default_factory=dict)
    """Training data and scores, for people to read."""
    frequencies: bytes | None = None
    """Contents of the document frequency file, see ``captioner.evaluation``; or None."""
    calibrator: Calibrator | None = None
    """Estimates the confidence of captions; None: the model was not calibrated."""
    reading: ReadingWords | None = None
    """The words that the network's reading of a photo has rows for; None: it has no reading."""
    grammar: Grammar | None = None
    """Where captions may end, and which words agree; None: only the decoder knows."""
    folder: Path | None = None
    """The folder that it was read from; None: a new model."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """The folder's config, as it was read."""

    @property
    def has_graphs(self) -> bool:
        """Whether its folder has the exported network."""
        return EXPORTED in self.config

    @property
    def has_weights(self) -> bool:
        """Whether there is more than graphs."""
        if self.network is not None or self.folder is None:
            return True
        return (self.folder / WEIGHTS).is_file()

    def require_weights(self, use: str = "this") -> None:
        """Raise ConfigError if there are graphs only, or torch is not installed."""
        if not self.has_weights:
            raise ConfigError(
                f"{self.folder} is exported; {use} needs the model folder that it was exported from"
            )
        if self.network is None:
            require_extra("torch", use)

    @property
    def model(self) -> CaptionModel:
        """The network; ConfigError: see `require_weights`; ModelError: its weights are damaged."""
        self.require_weights()
        if self.network is None:
            from captioner.inference.weights import read_network

            assert self.folder is not None
            with config_errors(self.folder):
                self.network = read_network(self, self.folder / WEIGHTS)
        return self.network


# --- find ----------------------------------------------------------------------------------------


def find_model(folder: str | Path, revision: str | None = None, **hub_options: Any) -> Path:
    """The model folder itself, or the folder of the best model if ``folder`` is a run folder.

    ``shipped`` is the model that is included in the package, unless there is such a folder.
    ``hf:user/name@revision`` is a model of the Hugging Face hub; it is downloaded by ``hub.fetch``.

    Raises:
        ConfigError: A name of the hub is invalid, or a revision is given for a folder.
        ModelError: The run has no best model yet, or the model cannot be downloaded.
    """
    if hub.is_hub_name(folder):
        return hub.fetch(hub.parse(folder, revision), MODEL_FILES, **hub_options)
    if revision is not None:
        raise ConfigError(
            f"{folder} has no revisions, but revision is {revision!r}; only models of the hub "
            "(hf:user/name) have them"
        )
    path = Path(folder)
    if not path.exists() and str(folder) == SHIPPED:
        return SHIPPED_MODEL
    if (path / CONFIG).exists():
        return path
    best = path / BEST
    if best.is_dir():
        return best
    if (path / RUN_CONFIG).is_file():
        raise ModelError(
            f"the run folder {path} has no model yet; the first validation of captioner train "
            f"saves one in {path / BEST}"
        )
    return path


# --- read ----------------------------------------------------------------------------------------


def load_model(folder: str | Path, revision: str | None = None, **hub_options: Any) -> StoredModel:
    """Read the model folder that `find_model` finds.

    Raises:
        ModelError: A file is missing, damaged or not from captioner, or the folder was written by
            a newer version.
        ConfigError: torch is needed and not installed.
    """
    from captioner.inference.confidence import read_calibrator
    from captioner.inference.grammar_file import read_grammar
    from captioner.inference.reading import ReadingWords

    path = find_model(folder, revision, **hub_options)
    config, counted = read_config(path), path / FREQUENCIES
    with config_errors(path):  # also what is read later: an engine, a site or info relies on it
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
            _search_of(config),
            dict(config.get("info", {})),
            counted.read_bytes() if counted.is_file() else None,
            read_calibrator(path),
            ReadingWords.from_config(config),
            read_grammar(path, len(config["vocabulary"]) + len(SPECIAL_NAMES)),
            path,
            config,
        )
    if not stored.has_graphs:
        stored.require_weights(f"the model {path}, which is not exported,")
        assert stored.model
    return stored


def read_config(folder: str | Path) -> dict[str, Any]:
    """Read the config of a model folder, or of the best model of a run folder.

    Raises:
        ModelError: A file is missing, damaged or not from captioner, or the folder was written by
            a newer version.
    """
    path = find_model(folder)
    if not path.is_dir():
        kind = "is a file" if path.exists() else "does not exist"
        raise ModelError(
            f"the model folder {path} {kind}; give a folder with {CONFIG} and {WEIGHTS}, or "
            "hf:user/name for a model of the Hugging Face hub"
        )
    _require(path, CONFIG)
    try:
        config = json.loads((path / CONFIG).read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError) as error:
        raise ModelError(
            f"cannot read {path / CONFIG} ({error}); copy the whole folder again"
        ) from error
    version = config.get("format_version") if isinstance(config, dict) else None
    if not isinstance(version, int):
        raise ModelError(f"{path / CONFIG} is not a captioner model config: no format_version")
    if version != FORMAT_VERSION:
        raise ModelError(
            f"{path} was written by a newer captioner (format {version}, supported: "
            f"{FORMAT_VERSION}); update captioner"
        )
    _require(path, *(GRAPHS if EXPORTED in config else (WEIGHTS,)))
    return dict(config)


def _require(path: Path, *names: str) -> None:
    for name in names:
        if not (path / name).is_file():
            raise ModelError(f"the model folder {path} has no {name}; copy the whole folder again")


def runs_graphs(stored: StoredModel, device: str, precision: str) -> bool:
    """Whether a model runs as graphs: if it has no weights, and by default on a CPU.

    Any other choice of device or precision than ``auto`` is one of torch.
    """
    if not (stored.has_graphs and stored.has_weights):
        return stored.has_graphs
    return precision == "auto" and (device == "cpu" or (device == "auto" and not has_gpu()))


def read_search(folder: str | Path) -> tuple[SearchOptions, Vocabulary]:
    """Read a model's default search options and its vocabulary; for errors see `read_config`."""
    path = find_model(folder)
    config = read_config(path)
    with config_errors(path):
        return _search_of(config), read_vocabulary(path, config)


def read_settings(folder: str | Path) -> dict[str, Any]:
    """What training that starts from a model inherits, as settings of ``TrainConfig``."""
    path = find_model(folder)
    config = read_config(path)
    with config_errors(path):
        decoder = dataclasses.asdict(build_options(DecoderConfig, config["decoder"]))
        del decoder["dropout"]  # a setting of the run
        tokenizer = config.get("tokenizer", "words")
        # The truth of words is that of the initial model; the new one is not calibrated.
        search = dataclasses.replace(_search_of(config), certainty=0.0)
        return {"search": search, "decoder": decoder, "data": {"tokenizer": tokenizer}}


def _search_of(config: dict[str, Any]) -> SearchOptions:
    """The model's default search; ConfigError: it would hardly end."""
    given = {name: value for name, value in config["search"].items() if name not in REMOVED_SEARCH}
    search = SearchOptions(**given)
    for name, option in option_fields(SearchOptions).items():
        limit = option.untrusted and option.untrusted.model
        if limit and getattr(search, name) > limit:
            raise ConfigError(f"search.{name} is {getattr(search, name)}; at most {limit}")
    return search


def read_vocabulary(folder: Path, config: dict[str, Any]) -> Vocabulary:
    """The vocabulary of a model folder; ModelError: its sub-word tokenizer cannot be used."""
    words, styles = config["vocabulary"], config.get("styles", ())
    "".join(words).encode()  # raises an error for half of a surrogate pair
    if config.get("tokenizer", "words") == "words":
        return Vocabulary(words, styles)
    path = folder / TOKENIZER
    try:
        subwords = Subwords(path.read_text(encoding="utf-8"))
        pieces = subwords.pieces
    except (OSError, ValueError, TypeError, ModelError) as error:
        raise ModelError(f"cannot read {path} ({error}); copy the whole folder again") from error
    if pieces != tuple(words):
        raise ModelError(f"{path} does not match {CONFIG}; copy both files from the same model")
    return Vocabulary(words, styles, subwords)


@contextmanager
def config_errors(folder: Path) -> Iterator[None]:
    """Raise ModelError if the config lacks an entry that the block reads, or has a wrong one."""
    try:
        yield
    except ModelError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, CaptionerError) as error:
        reason = f"lacks {error}" if isinstance(error, KeyError) else str(error)
        raise ModelError(f"{folder / CONFIG} is not a captioner model config: {reason}") from error


def fingerprint(folder: str | Path) -> str:
    """A short hash of a model folder's config, tokenizer, weights and confidence."""
    path = find_model(folder)
    read_config(path)  # checks that the files are there
    digest = hashlib.sha256()
    for name in (CONFIG, TOKENIZER, *GRAPHS, WEIGHTS, CONFIDENCE, GRAMMAR):
        if (path / name).exists():  # else optional
            digest.update((path / name).read_bytes())
    return digest.hexdigest()[:12]


def fingerprints(folders: Sequence[str | Path]) -> list[str]:
    """Of models, or of the shipped one."""
    return [fingerprint(folder) for folder in folders or [SHIPPED_MODEL]]


# --- write ---------------------------------------------------------------------------------------


def save_model(folder: str | Path, stored: StoredModel) -> None:
    """Write a model folder; an existing one is replaced once the new one is complete.

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
            "geometry": model.geometry.as_dict(),
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
            f"cannot save {folder} ({error.strerror}); its previous contents are unchanged"
        ) from error


def write_config(folder: Path, config: dict[str, Any]) -> None:
    """Write the config into a new model folder."""
    text = json.dumps(config, indent=1, ensure_ascii=False) + "\n"
    (folder / CONFIG).write_text(text, encoding="utf-8")
