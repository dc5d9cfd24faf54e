"""One-line errors for names that do not exist, with the name that the user probably meant.

People guess names that other libraries use, such as ``num_beams`` for ``beam_size``. A comparison
of spellings would not find these, so the tables in this module translate them. Each table maps a
guessed name to the name in captioner, or to advice if captioner has no such name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, ClassVar

from captioner.errors import ConfigError
from captioner.messages import either
from captioner.schema import similar

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


def unknown_option(name: str, known: Iterable[str], usual: Mapping[str, str]) -> ConfigError:
    """Return the error for an unknown option. For the arguments see `hint_for`."""
    hint = hint_for(name, known, usual).replace("it has ", "use one of ")
    return ConfigError(f"unknown option {name}; {hint}")
