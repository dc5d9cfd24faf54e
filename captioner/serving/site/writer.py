"""Write an exported model as a static site that captions photos in the browser.

The site shows the same page as ``captioner serve``, but a worker in the browser runs the model,
with onnxruntime-web. The site consists of these files:

    index.html       the page, with the scripts and styles that it shares with the served page
    code/            the worker: photos, search, truth and confidence, in JavaScript (web/*.js)
    runtime/         onnxruntime-web
    model/           config.json, with all facts about the model that the worker needs; the graphs
    sw.js            the service worker: offline use, isolation, security headers
    manifest.json    makes the site installable
    icons/

Graphs and WebAssembly are stored compressed, because many hosts do not compress them.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from captioner.caption_types import (
    BRACKETS,
    CLITICS,
    CONJUNCTIONS,
    DOUBTFUL,
    DOUBTFUL_TRUTH,
    END_NAME,
)
from captioner.drawing.pages import asset, policy, with_policy
from captioner.errors import ConfigError
from captioner.files import atomic_folder
from captioner.inference.confidence import FEATURES, Calibrator, no_confidence
from captioner.inference.engine import ATTENTION_METHODS
from captioner.inference.folder import load_model
from captioner.inference.names import CONFIG, DECODER_GRAPH, ENCODER_GRAPH, EXPORTED
from captioner.inference.reading import MIN_PROBABILITY, ReadingWords, has_keywords
from captioner.inference.stored_model import StoredModel
from captioner.options import Role, SearchOptions
from captioner.schema import changed, marked
from captioner.search import worth
from captioner.search.grammar import Grammar
from captioner.search.words import (
    NEUTRAL_WORDS,
    WIDE_WORDS,
    encode_search_words,
    people_tokens,
)
from captioner.serving.page import caption_page
from captioner.text.vocabulary import BLANK, SPACE, SPECIAL_NAMES, Vocabulary, is_content_word

MAX_BEAM = 10  # maximum beam size and number of captions on the page

_WEB = Path(__file__).parent / "web"
_WORKER = (
    *("worker", "model", "photo", "resize", "search", "worth", "reading", "captions"),
    "confidence",
)
# Files of onnxruntime-web: its API, and its WebAssembly.
_RUNTIMES = {
    "cpu": ("ort.wasm.min", "ort-wasm-simd-threaded"),
    "gpu": ("ort.webgpu.min", "ort-wasm-simd-threaded.asyncify"),
}
_COMPRESSED = ".gzip"
_PREPROCESSING = ("image_size", "resize", "channel_order")
_WORTH = (
    *("WEIGHT", "WHOLE_WEIGHT", "WHOLE_CERTAINTY", "PLAUSIBLE", "PENALTY"),
    *("LEAST_WORTH", "ENOUGH", "TOO_SHORT", "ENDING_GAIN", "SURE_ENDING", "WIDE_SHARE"),
)
"""Names of constants in ``search.worth`` that the page's search uses."""
_OF_FEATURES = ("weights", "mean", "scale", "lowest", "highest")
"""Names of fields of ``Calibrator`` that have one number per feature."""


class Site(NamedTuple):
    """The size of a site: the number of files, and the megabytes that visitors download.

    ``first_load`` is downloaded on the first visit, and ``gpu`` when the visitor chooses the GPU.
    Both assume a host that compresses text files.
    """

    files: int
    first_load: float
    gpu: float


def write_site(folder: str | Path, output: str | Path, runtime: Mapping[str, bytes]) -> Site:
    """Write a static site for an exported model folder.

    An existing output folder is replaced when the new folder is complete.

    Args:
        folder: The exported folder.
        output: The folder to write.
        runtime: Files of onnxruntime-web by name, from ``runtime_files``.
    """
    model = load_model(folder)
    assert model.folder is not None
    config = site_config(model)
    graphs = [ENCODER_GRAPH, DECODER_GRAPH]
    text = json.dumps(config, ensure_ascii=False, separators=(",", ":"))
    files = {f"model/{CONFIG}": text.encode()}
    for name in graphs:
        files[f"model/{name}{_COMPRESSED}"] = _compressed((model.folder / name).read_bytes())
    names = {}
    for kind, (api, wasm) in _RUNTIMES.items():
        # Named .js, because some hosts do not know the type of .mjs, and browsers run a script only
        # if its type is right.
        script, loader = f"runtime/{api}.js", f"runtime/{wasm}.js"
        binary = f"runtime/{wasm}.wasm{_COMPRESSED}"
        names[kind] = {"api": script, "loader": loader, "binary": binary}
        files |= {script: runtime[f"{api}.mjs"], loader: runtime[f"{wasm}.mjs"]}
        files[binary] = _compressed(runtime[f"{wasm}.wasm"])
    files |= {f"icons/{path.name}": path.read_bytes() for path in (_WEB / "icons").glob("*.png")}
    files |= {f"code/{name}.js": asset(_WEB / f"{name}.js").encode() for name in _WORKER}
    files["manifest.json"] = asset(_WEB / "manifest.json").encode()
    device = {
        "runtimes": names,
        "files": {name: f"model/{name}{_COMPRESSED}" for name in graphs}
        | {CONFIG: f"model/{CONFIG}"},
        "sizes": {name: len(content) for name, content in files.items()},
    }
    page = caption_page(
        model,
        ATTENTION_METHODS,
        intro=asset(_WEB / "intro.html").rstrip(),
        files=[_WEB / "device.js", _WEB / "site.css"],
        fields=[
            *(["words"] if model.vocabulary.subwords is None else []),
            *(["keywords"] if has_keywords(model.reading) else []),
        ],
        data={"device": device, "maxBeam": MAX_BEAM},
        head=asset(_WEB / "head.html").splitlines(),
    )
    # The policy allows only the page's own files, and no requests to other hosts.
    rules = policy(page, connect="'self'", scripts="'self' 'wasm-unsafe-eval'", images="'self'")
    rules += "; worker-src 'self' blob:; manifest-src 'self'"
    files["index.html"] = with_policy(page, rules).encode()
    files["sw.js"] = _service_worker(files, f"{rules}; frame-ancestors 'none'")
    with atomic_folder(output) as new:
        for name, content in files.items():
            (new / name).parent.mkdir(exist_ok=True)
            (new / name).write_bytes(content)
    gpu = _transferred({name: files[name] for name in names["gpu"].values()})
    return Site(len(files), _transferred(files) - gpu, gpu)


def check_search(model: StoredModel) -> None:
    """Check that the page's search supports a model's search defaults.

    Raises:
        ConfigError: A default is not supported.
    """
    options = model.search
    if options.certainty and not (_has_truth(model) and model.grammar is not None):
        raise ConfigError(
            f"the model's config.json sets certainty to {options.certainty}, but the model cannot "
            "judge whether its words are true; set certainty to 0 in a copy of the model, or run "
            "scripts/fit_reading.py and captioner calibrate"
        )
    for name in changed(options):
        if name in marked(SearchOptions, Role.NOT_IN_BROWSER):
            raise ConfigError(
                f"the model's config.json sets {name} to {getattr(options, name)!r}, but the "
                f"page does not support {name}; export a copy of the model without {name} in "
                "config.json"
            )


def site_config(model: StoredModel) -> dict[str, Any]:
    """Return all facts about a model that the page's JavaScript needs."""

    def some(source: Any, *names: str) -> dict[str, Any]:
        return {name: getattr(source, name) for name in names}

    check_search(model)
    vocabulary, config, calibrator = model.vocabulary, model.config, model.calibrator
    words = encode_search_words(model.search, vocabulary)
    pieces = vocabulary.subwords is not None
    truth = calibrator.truth if calibrator and _has_truth(model) else None
    return {
        "grid": config["encoder"]["grid"],
        "geometry": config["encoder"]["geometry"],
        "preprocessing": {name: config["preprocessing"][name] for name in _PREPROCESSING},
        "search": {
            name: value
            for name, value in vars(model.search).items()
            if name not in marked(SearchOptions, Role.NOT_IN_BROWSER)
        },
        "words": {
            **some(words, "banned", "bad_endings", "repeatable", "rarity"),
            # The page may switch ``neutral`` on.
            "people": None if pieces else people_tokens(vocabulary)._asdict(),
        },
        "tokens": config[EXPORTED]["tokens"],
        "text": {
            "clitics": sorted(CLITICS),
            "brackets": BRACKETS,
            "space": SPACE if pieces else "",
            "blank": BLANK,
            "end_name": END_NAME,
            "conjunctions": CONJUNCTIONS,
            "function_words": _function_words(vocabulary),
        },
        "doubtful_below": DOUBTFUL,
        "doubtful_truth": DOUBTFUL_TRUTH,
        "reading": _reading(model.reading, vocabulary),
        "truth": truth and asdict(truth),
        "worth": truth and worth_config(model.grammar, worth.wide_words(vocabulary, WIDE_WORDS)),
        "confidence": _confidence(model),
        "familiarity": _familiarity(calibrator),
        "vocabulary": vocabulary.words,
    }


def worth_config(grammar: Grammar | None, wide: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Return the constants and tables of ``search.worth`` that the page's search uses.

    The worth of a word decides whether the search adds it to a caption.
    """
    constants = {name.lower(): getattr(worth, name) for name in _WORTH}
    counted = grammar and {
        "endings": _short(grammar.endings),
        "not_ending": grammar.not_ending.tolist(),
        "not_following": grammar.not_following.tolist(),
        "not_third": grammar.not_third.tolist(),
    }
    return {**constants, "wide": wide, "grammar": counted}


def reading_rows(rows: NDArray[np.int64], stems: int) -> list[int]:
    """Return, for each token, its index in the page's table of truth.

    Truth is the probability that a word is true of the photo. The table has one entry per
    word stem, then one entry for all unknown words and one for all function words.
    """
    unknown = np.where(rows == worth.UNKNOWN_WORD, stems, rows)
    found: list[int] = np.where(rows == worth.FUNCTION_WORD, stems + 1, unknown).tolist()
    return found


def _has_truth(model: StoredModel) -> bool:
    calibrator = model.calibrator
    return model.reading is not None and calibrator is not None and calibrator.truth is not None


def _reading(reading: ReadingWords | None, vocabulary: Vocabulary) -> dict[str, Any] | None:
    if reading is None:
        return None
    row = {stem: number for number, stem in enumerate(reading.stems)}
    return {
        "rows": reading_rows(reading.token_rows(vocabulary), len(reading.stems)),
        "keyword_rows": [
            (
                word,
                NEUTRAL_WORDS.get(word, word),
                [[row[stem] for stem in phrase] for phrase in phrases],
            )
            for word, phrases in reading.keywords.items()
        ],
        "least_probability": MIN_PROBABILITY,
    }


def _function_words(vocabulary: Vocabulary) -> list[int]:
    tokens = range(len(SPECIAL_NAMES), len(vocabulary))
    words = vocabulary.shown(tokens)
    return [token for token, word in zip(tokens, words, strict=True) if not is_content_word(word)]


def _confidence(model: StoredModel) -> dict[str, Any] | None:
    """Return the numbers that compute the confidence, or None if the page does not show it."""
    calibrator = model.calibrator
    if calibrator is None:
        return None
    # The user may change these options on the page. The page then decides whether to show the
    # confidence.
    fitted = {name: calibrator.search[name] for name in ("beam_size", "certainty")}
    options = replace(model.search, num_captions=1, **fitted)
    if no_confidence(calibrator, options, model.vocabulary.styles) is not None:
        return None
    numbers = zip(*(getattr(calibrator, name).tolist() for name in _OF_FEATURES), strict=True)
    return {
        "features": {
            feature: dict(zip(_OF_FEATURES, own, strict=True))
            for feature, own in zip(FEATURES, numbers, strict=True)
        },
        "intercepts": calibrator.intercepts,
        "search": fitted,
    }


def _familiarity(calibrator: Calibrator | None) -> dict[str, Any] | None:
    if calibrator is None or calibrator.kinds is None:
        return None
    return {"kinds": _short(calibrator.kinds), "familiar": calibrator.familiar}


def _short(values: NDArray[np.float32]) -> list[float]:
    """Return 32-bit numbers in their shortest decimal form."""
    return [float(str(value)) for value in values.astype(np.float32)]


def _service_worker(files: Mapping[str, bytes], rules: str) -> bytes:
    digests = {
        name: base64.b64encode(hashlib.sha256(content).digest()).decode()
        for name, content in sorted(files.items())
    }
    small = [name for name in digests if not name.startswith(("model/", "runtime/"))]
    code = asset(_WEB / "sw.js")
    for name, value in {"digests": digests, "page": small, "policy": rules}.items():
        code = code.replace(f"@@{name}@@", json.dumps(value, indent=1))
    return code.encode()


def _compressed(content: bytes) -> bytes:
    return gzip.compress(content, 9, mtime=0)


def _transferred(files: Mapping[str, bytes]) -> float:
    """Return the megabytes that a host sends if it compresses text files."""
    sent = (
        content if name.endswith((_COMPRESSED, ".png")) else _compressed(content)
        for name, content in files.items()
    )
    return sum(map(len, sent)) / 1e6
