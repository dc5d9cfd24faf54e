"""One-line errors for unknown names and wrong calls, with suggestions for the user.

People guess names that other libraries use, such as ``num_beams`` for ``beam_size``. A comparison
of spellings would not find these, so the tables in this module translate them. Each table maps a
guessed name to the name in captioner, or to advice if captioner has no such name.
"""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from captioner.errors import ConfigError
from captioner.messages import either

C = TypeVar("C", bound=Callable[..., Any])

_ON_LOAD = "pass it to captioner.load()"

SEARCH_OPTIONS: Mapping[str, str] = {
    **dict.fromkeys(("num_beams", "n_beams", "beams", "beam", "beam_width"), "beam_size"),
    **dict.fromkeys(("num_return_sequences", "n", "count", "k"), "num_captions"),
    **dict.fromkeys(("max_new_tokens", "max_tokens", "max_words"), "max_length"),
    **dict.fromkeys(("min_new_tokens", "min_tokens", "min_words"), "min_length"),
    **dict.fromkeys(("do_sample", "sample", "sampling"), "pass temperature=1 to sample"),
    "no_repeat_ngram_size": "block_ngrams",
    "repetition_penalty": "block_repeats",
    "num_beam_groups": "beam_groups",
    "diversity_penalty": "diversity",
    **dict.fromkeys(("bad_words", "bad_words_ids", "suppress_tokens"), "banned_words"),
    **dict.fromkeys(("force_words", "force_words_ids"), "forced_words"),
    **dict.fromkeys(("generator", "random_state", "random_seed"), "seed"),
    "tags": "keywords",
    **dict.fromkeys(("device", "precision", "dtype", "torch_dtype", "revision"), _ON_LOAD),
    "model": "call captioner.load(model).caption(photo)",
    **dict.fromkeys(("language", "lang"), "a model writes in the language that it was trained on"),
    **dict.fromkeys(
        ("prompt", "prefix", "question", "text"),
        "a model does not accept a prompt; to score your own text, use model.explain(photo, text)",
    ),
}
"""Search options in other libraries, mapped to captioner's option or to advice."""

LOAD_OPTIONS: Mapping[str, str] = {
    **dict.fromkeys(SEARCH_OPTIONS, "pass search options to model.caption()"),
    **dict.fromkeys(
        ("model", "name", "path", "folder", "checkpoint", "model_name"),
        "pass the model folder without a name: captioner.load(folder)",
    ),
    **dict.fromkeys(("gpu", "cuda", "use_gpu", "device_map"), 'pass device="cuda"'),
    **dict.fromkeys(("dtype", "torch_dtype", "quantize", "fp16", "half", "load_in_8bit"),
                    "precision"),
}  # fmt: skip
"""Loading options in other libraries, mapped to captioner's option or to advice."""

SETTINGS: Mapping[str, str] = {
    **dict.fromkeys(("learning_rate", "base_lr", "max_lr"), "lr"),
    **dict.fromkeys(("encoder_learning_rate", "backbone_lr"), "encoder_lr"),
    **dict.fromkeys(("num_train_epochs", "num_epochs", "n_epochs", "max_epochs"), "epochs"),
    **dict.fromkeys(("per_device_train_batch_size", "train_batch_size", "bs"), "batch_size"),
    **dict.fromkeys(("gradient_accumulation_steps", "accumulate_grad_batches"), "micro_batch"),
    **dict.fromkeys(("max_grad_norm", "gradient_clip_val", "grad_clip", "clip"), "clip_norm"),
    **dict.fromkeys(("early_stopping", "early_stopping_patience"), "patience"),
    **dict.fromkeys(("warmup", "num_warmup_steps", "warmup_ratio"), "warmup_steps"),
    **dict.fromkeys(("mixed_precision", "fp16", "bf16", "dtype", "amp"), "precision"),
    **dict.fromkeys(("random_seed", "random_state", "manual_seed"), "seed"),
    **dict.fromkeys(("report_to", "logger", "loggers"), "trackers"),
    **dict.fromkeys(("hidden_size", "decoder_dim", "rnn_size"), "hidden_dim"),
    **dict.fromkeys(("embedding_dim", "embedding_size", "embed_size"), "embed_dim"),
    **dict.fromkeys(("cell", "rnn", "rnn_type", "cell_type"), "order"),
    **dict.fromkeys(("backbone", "arch", "model_name"), "name"),
    **dict.fromkeys(("vocab_size", "num_words"), "vocabulary_size"),
    **dict.fromkeys(("min_freq", "min_word_freq", "word_count_threshold"), "vocabulary_threshold"),
    **dict.fromkeys(("output_dir", "save_dir", "checkpoint_dir", "log_dir"), "run_folder"),
    **dict.fromkeys(("loss", "criterion"), "objective"),
    "wd": "weight_decay",
    "logging_steps": "log_every",
    "save_steps": "save_every",
    "ema": "ema_decay",
}
"""Training settings in other libraries, mapped to captioner's settings without their section."""

FUNCTIONS: Mapping[str, str] = {
    **dict.fromkeys(
        ("caption_image", "caption_photo", "describe", "generate", "predict", "run", "infer"),
        "caption",
    ),
    **dict.fromkeys(
        ("load_model", "from_pretrained", "pipeline", "Model", "model", "CaptionModel"), "load"
    ),
    **dict.fromkeys(
        ("attend", "visualize", "plot", "draw", "show", "show_attention", "heatmap"), "overlay"
    ),
    **dict.fromkeys(("captions", "stream", "explain"), "call it on a model from captioner.load()"),
    **dict.fromkeys(("embed", "write", "save_caption", "sidecar", "write_xmp"), "write_caption"),
    **dict.fromkeys(("remove", "delete_caption"), "remove_caption"),
    "apply": "apply_captions",
    **dict.fromkeys(("alt", "alt_text", "alt_texts"), "suggest_alt"),
    "fit": "train",
    **dict.fromkeys(("score", "benchmark"), "evaluate"),
}
"""Functions and classes in other libraries, mapped to captioner's function or to advice."""


_TABLES = {"load": LOAD_OPTIONS, "SearchOptions": SEARCH_OPTIONS}
"""Names of functions and classes, mapped to the table for their arguments."""


class Hinting:
    """A base class that suggests the right name when an unknown attribute is accessed."""

    _hints: ClassVar[Mapping[str, str]] = {}
    """Names that people may guess, mapped to an attribute of the class or to advice."""

    if not TYPE_CHECKING:  # otherwise type checkers would accept every name

        def __getattr__(self, name: str) -> object:
            kind = type(self).__name__
            if name.startswith("_"):  # protocols such as copying ask for optional methods
                raise AttributeError(f"{kind!r} object has no attribute {name!r}")
            known = [one for one in dir(self) if not one.startswith("_")]
            hint = hint_for(name, known, self._hints)
            raise AttributeError(f"{kind} has no attribute {name!r}; {hint}")


def hint_for(name: str, known: Iterable[str], usual: Mapping[str, str]) -> str:
    """Return advice for a user who typed an unknown name, as the end of an error message.

    Args:
        name: The unknown name.
        known: The names that exist.
        usual: Names in other libraries, mapped to a known name or to advice.
    """
    known = sorted(known)
    meant = usual.get(name)
    if meant is not None and not meant.isidentifier():
        return meant
    close = [meant] if meant else similar(name, known)
    return f"did you mean {either(close)}?" if close else f"it has {', '.join(known)}"


def similar(typed: str, names: Iterable[str], usual: Mapping[str, str] | None = None) -> list[str]:
    """Return the names that a user may have meant by a typed name.

    These are the names with the same last part (after the last dot), or else with the last part
    that ``usual`` contains for the typed name, or else with a similar last part.
    """
    last = _last_part(typed)
    parts = {name: _last_part(name) for name in sorted(names)}
    for meant in (last, (usual or {}).get(last)):
        if found := [name for name, part in parts.items() if part == meant]:
            return found[:3]
    # The section is left out, because its letters would make unlike names similar. The dashes of an
    # option stay.
    ends = {name.rpartition(".")[2]: name for name in parts}
    close = difflib.get_close_matches(typed.rpartition(".")[2], ends, 1, 0.7)
    return [ends[end] for end in close]


def _last_part(name: str) -> str:
    """Return the part of a name after the last dot, as Python spells it."""
    return name.lstrip("-").rpartition(".")[2].replace("-", "_")


def unknown_option(name: str, known: Iterable[str], usual: Mapping[str, str]) -> ConfigError:
    """Return the error for an unknown option. For the arguments see `hint_for`."""
    hint = hint_for(name, known, usual).replace("it has ", "use one of ")
    return ConfigError(f"{name} is an unknown option; {hint}")


def hinted(public: C) -> C:
    """Decorate a public function or class, so that a wrong call raises a one-line `ConfigError`.

    Python reports missing, unknown and superfluous arguments by a TypeError that neither suggests
    the right name nor shows how to call the function. Signature and types stay unchanged. In a
    class, the decorator applies to the creation of instances and to the class's own public methods.
    """
    if not inspect.isclass(public):
        return _hinted(public, public.__name__)
    for name, member in [*vars(public).items()]:
        function = getattr(member, "__func__", member)  # of a static method or class method
        creates = name in ("__init__", "__new__")
        if inspect.isfunction(function) and (creates or name == "__call__" or name[0] != "_"):
            shown = public.__name__ if creates else function.__name__
            wrapped: Any = _hinted(function, shown, skip=1)
            setattr(public, name, wrapped if function is member else type(member)(wrapped))
    return public


def _hinted(function: C, name: str, skip: int = 0) -> C:
    """Wrap a function that messages call ``name``, without its first ``skip`` parameters."""

    @functools.wraps(function)
    def call(*given: Any, **named: Any) -> Any:
        try:
            return function(*given, **named)
        except TypeError:
            if (problem := _wrong_call(function, name, skip, given, named)) is None:
                raise  # the function's own error
        raise problem

    return call  # type: ignore[return-value]


def _wrong_call(
    function: Callable[..., Any],
    name: str,
    skip: int,
    given: Sequence[Any],
    named: Mapping[str, Any],
) -> ConfigError | None:
    """Return the error for arguments that a function does not accept, or None if it does."""
    signature = inspect.signature(function)
    parameters = [*signature.parameters.values()][skip:]
    variable = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    known = [one.name for one in parameters if one.kind not in variable]
    form = f"{name}({', '.join(map(_shown, parameters))})"
    try:
        bound = signature.bind_partial(*given, **named).arguments
    except TypeError as error:
        if "unexpected" in str(error):
            unknown = next(one for one in named if one not in known)
            hint = hint_for(unknown, known, _TABLES.get(name, {}))
            hint = f"use {form}" if hint.startswith("it has ") else hint
            return ConfigError(f"{unknown} is an unknown option; {hint}")
        return ConfigError(f"{name}() got {error}; use {form}")
    missing = [
        one.name
        for one in parameters
        if one.name in known and one.default is one.empty and one.name not in bound
    ]
    if not missing:
        return None
    return ConfigError(f"{name}() was called without {', '.join(missing)}; use {form}")


def _shown(parameter: inspect.Parameter) -> str:
    """Return how a call spells a parameter: ``photo``, ``labels=...`` or ``**options``."""
    if parameter.kind is parameter.KEYWORD_ONLY or parameter.default is not parameter.empty:
        return f"{parameter.name}=..."
    return str(parameter.replace(annotation=parameter.empty))  # with its asterisks
