"""Copies of a loaded model, in the same process or in other processes.

Sessions of ONNX Runtime cannot be pickled, and weights would be slow to send. A pickled model
therefore consists of the names of its folders, its device and its precision. Each process loads a
model only once, even if a process pool sends the model many times.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from captioner.errors import ConfigError, ModelError
from captioner.hardware import Precision
from captioner.inference.folder import load_model
from captioner.inference.grammar_file import grammar_bytes
from captioner.inference.names import MODEL_FILES
from captioner.inference.stored_model import StoredModel


class Portable:
    """A base class that makes loaded models copyable and picklable."""

    _opened: tuple[Sequence[StoredModel], str, Precision]
    """The arguments that created the object: models, device and precision."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the folders, the device and the precision.

        Raises:
            ConfigError: A model was never saved, or was changed in memory after it was read.
            ModelError: The folder of a model no longer exists.
        """
        models, device, precision = self._opened
        folders = tuple(map(_unchanged_folder, models))
        return _load, (type(self), folders, _times(folders), device, precision)

    def __copy__(self) -> Portable:
        """Return a shallow copy, which shares the networks."""
        new = object.__new__(type(self))
        vars(new).update(vars(self))
        return new

    def __deepcopy__(self, memo: dict[int, Any]) -> Portable:
        """Return a copy with its own network, including changes made in memory."""
        models, device, precision = self._opened
        kind: Any = type(self)
        copied: Portable = kind(*copy.deepcopy(models, memo), device=device, precision=precision)
        return copied


@lru_cache(maxsize=2)
def _load(
    kind: Any, folders: Sequence[Path], times: object, device: str, precision: Precision
) -> Any:
    """Load models as an instance of a class. Return the earlier instance if no file has changed."""
    del times
    return kind(*map(load_model, folders), device=device, precision=precision)


def _times(folders: Sequence[Path]) -> tuple[int, ...]:
    """Return the modification times of the models' files, in nanoseconds."""
    files = (folder / name for folder in folders for name in MODEL_FILES)
    return tuple(file.stat().st_mtime_ns for file in files if file.is_file())


def _unchanged_folder(model: StoredModel) -> Path:
    """Return the absolute path of a model's folder, if it still contains the same model."""
    advice = "save it with model.save(FOLDER), and pickle the result of captioner.load(FOLDER)"
    if model.folder is None:
        raise ConfigError(f"the model cannot be pickled, because it was never saved; {advice}")
    if not model.folder.is_dir():
        raise ModelError(
            f"the model cannot be pickled, because its folder {model.folder} no longer exists; "
            "restore the folder, or save the model with model.save(FOLDER) and load it again"
        )
    if not _same(model, load_model(model.folder)):
        raise ConfigError(
            "the model cannot be pickled, because it was changed after it was read from "
            f"{model.folder}; {advice}"
        )
    return model.folder.resolve()


def _same(one: StoredModel, other: StoredModel) -> bool:
    """Return whether two models are equal. Networks that were not read yet are not compared."""

    def parts(model: StoredModel) -> list[object]:
        return [
            model.decoder, model.vocabulary, model.search, model.info, model.frequencies,
            model.reading, model.calibrator and model.calibrator.to_bytes(),
            model.grammar and grammar_bytes(model.grammar),
        ]  # fmt: skip

    if parts(one) != parts(other):
        return False
    if one.network is None:
        return True
    ours, theirs = (model.model.state_dict() for model in (one, other))
    return ours.keys() == theirs.keys() and all(
        tensor.equal(theirs[name]) for name, tensor in ours.items()
    )
