"""What a resumed run must have in common with the run that saved its checkpoint.

Every setting must match unless it is in ``MAY_CHANGE``: a new one is refused until somebody decides
that it can change within a run.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from captioner.data.shards import read_manifest
from captioner.errors import CheckpointError
from captioner.model.captioner import CaptionModel
from captioner.training.build import Setup
from captioner.training.trackers import flatten

MAY_CHANGE = frozenset(
    {
        # Where files are. What is in them must match: see ``resume_settings``.
        "run_folder",
        "data.train_annotations",
        "data.val_annotations",
        "data.karpathy_split",
        "data.images",
        "data.features",
        "data.shards",
        # How long and how fast the model learns.
        "training.epochs",
        "training.lr",
        "training.encoder_lr",
        "training.weight_decay",
        "training.warmup_steps",
        "training.schedule",
        "training.plateau_patience",
        "training.clip_norm",
        "training.patience",
        # Terms of the loss.
        "training.label_smoothing",
        "training.scheduled_sampling",
        "training.photo_words",
        "training.attention_penalty",
        "training.hard_reward",
        "training.hard_entropy",
        # How steps are computed, and what is written beside the model.
        "data.workers",
        "encoder.recompute",
        "training.micro_batch",
        "training.precision",
        "training.compile",
        "training.log_every",
        "training.save_every",
        "training.sample_images",
        "training.keep_best",
        "training.trackers",
    }
)
"""Settings that may differ when resuming."""

_EARLIER = {"training.batch_size": "batch_size"}
"""Names in checkpoints of earlier releases, which hold fewer settings."""

_EARLIER_VALUES = {"training.select": "CIDEr"}
"""Settings that earlier releases did not have, with what they did."""


def resume_settings(setup: Setup, processes: int) -> dict[str, Any]:
    """What must match when resuming: settings by name, and fingerprints of the data."""
    config = setup.config
    every = flatten(dataclasses.asdict(config))
    settings = {name: value for name, value in every.items() if name not in MAY_CHANGE}
    settings |= {
        "photos": len(setup.train),
        "training captions": _fingerprint(
            setup.stored.vocabulary.words,
            (f"{photo.image.image_id} {photo.tokens}" for photo in setup.train),
        ),
        "validation captions": _fingerprint(
            (), (f"{image.image_id} {image.captions}" for image in setup.val)
        ),
        "shards": "none",
    }
    if config.distillation.active:  # the folders may hold other weights by now
        settings["teachers"] = _weights(setup.teachers or [setup.stored.model])
    if config.data.shards:  # they are distributed over processes and workers
        settings |= {"data.workers": config.data.workers, "processes": processes}
        settings["shards"] = read_manifest(config.data.shards).digest
    return settings


def _weights(models: Iterable[CaptionModel]) -> str:
    """Hash of the weights of models."""
    digest = hashlib.sha256()
    for model in models:
        for tensor in model.state_dict().values():
            flat = tensor.detach().cpu().contiguous().reshape(-1)
            digest.update(flat.view(torch.uint8).numpy().data)
    return digest.hexdigest()[:12]


def _fingerprint(words: Iterable[str], photos: Iterable[str]) -> str:
    """Hash of captions and of the vocabulary, which decides the token ids."""
    digest = hashlib.sha256(" ".join(words).encode())
    for photo in photos:
        digest.update(photo.encode())
    return digest.hexdigest()[:12]


def check_resume(checkpoint: Path, held: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Compare the ``resume_settings`` of the run that saved a checkpoint with those of this run.

    A setting that the checkpoint does not hold, because an earlier release saved it, is not
    compared.

    Raises:
        CheckpointError: They differ.
    """
    renamed = {name: held[old] for name, old in _EARLIER.items() if old in held}
    held = {**_EARLIER_VALUES, **renamed, **held}
    different = [
        f"{name} {_text(held[name])}, but now it is {_text(new)}"
        for name, new in given.items()
        if name in held and held[name] != new
    ]
    if different:
        raise CheckpointError(
            f"{checkpoint} was trained with {'; with '.join(different)}; use the settings and data "
            "of that run, or another --run-folder"
        )


def _text(value: Any) -> str:
    """A value as in a YAML file."""
    return value if isinstance(value, str) else json.dumps(value)
