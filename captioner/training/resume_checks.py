"""What a resumed run must have as it was, so that its checkpoint still means what it says."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from captioner.config import TrainConfig
from captioner.data.shards import read_manifest
from captioner.errors import CheckpointError
from captioner.training.setup import Setup


def resume_settings(config: TrainConfig, setup: Setup, processes: int) -> dict[str, Any]:
    """Data and settings, by the names that people give them.

    They decide which photos and captions a step holds and what is learned of them. Others may
    change, and then the run goes on in another way: more epochs, another learning rate.
    """
    data = config.data
    found: dict[str, Any] = {
        "photos": len(setup.train),
        "batch_size": config.training.batch_size,
        "training.seed": config.training.seed,
        "training.objective": config.training.objective,
        "data.max_captions": data.max_captions,
        "data.max_words": data.max_words,
        "data.horizontal_flip": data.horizontal_flip,
        "data.min_crop": data.min_crop,
        "data.color_jitter": data.color_jitter,
        "data.bucket_batches": data.bucket_batches,
        "training captions": _fingerprint(setup),
        "shards": "none",
    }
    if data.shards:  # they are dealt out by processes and workers
        found |= {"data.workers": data.workers, "processes": processes}
        found["shards"] = read_manifest(data.shards).digest
    return found


def check_resume(checkpoint: Path, held: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Make sure that a checkpoint is of this data and these settings.

    Args:
        checkpoint: Its file, for the error.
        held: What the run that saved it had.
        given: What this run has.

    Raises:
        CheckpointError: Something differs.
    """
    for name, new in given.items():
        if held.get(name) != new:
            raise CheckpointError(
                f"{checkpoint} was trained with {name} {held.get(name)}, now it is "
                f"{new}; give the run's own data and settings, or another --run-folder"
            )


def _fingerprint(setup: Setup) -> str:
    """Of the training captions, and of the words' numbers: other captions number them otherwise."""
    digest = hashlib.sha256(" ".join(setup.stored.vocabulary.words).encode())
    for photo in setup.train:
        digest.update(f"{photo.image.image_id} {photo.tokens}".encode())
    return digest.hexdigest()[:12]
