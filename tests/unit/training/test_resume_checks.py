"""Which settings must match when resuming; every setting must be listed here."""

from __future__ import annotations

import copy
import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from captioner.data.coco import CaptionedImage
from captioner.errors import CheckpointError
from captioner.options import TrainConfig
from captioner.training.resume_checks import check_resume, resume_settings
from captioner.training.trackers import flatten

MUST_MATCH = {
    # The model and its input.
    "init_from",
    *(
        f"encoder.{name}"
        for name in (
            "name", "weights", "image_size", "resize", "mean", "std", "finetune_from",
            "freeze_depthwise",
        )
    ),
    *(
        f"decoder.{name}"
        for name in (
            "embed_dim", "hidden_dim", "attention_dim", "dropout", "attention", "query",
            "selection", "heads", "projection_dim", "order", "input_feeding", "layer_norm",
        )
    ),
    # Captions, vocabulary, augmentation, and which photos a step contains.
    *(
        f"data.{name}"
        for name in (
            "styles", "val_styles", "repeats", "min_captions", "max_captions", "max_words",
            "tokenizer", "vocabulary_threshold", "vocabulary_size", "extend_vocabulary",
            "horizontal_flip", "min_crop", "color_jitter",
            "bucket_batches",
        )
    ),
    "training.batch_size",
    "training.seed",
    # Objective, schedule and saved models.
    "training.objective",
    "training.ema_decay",
    *(
        f"self_critical.{name}"
        for name in (
            "samples", "baseline", "cider", "bleu", "cross_entropy", "count_end", "max_length",
        )
    ),
    "distillation.models",
    "distillation.guidance",
    "distillation.rare_words",
    # Validations are compared with earlier ones.
    "training.select",
    "training.limit_val",
    *(
        f"search.{name}"
        for name in (
            "beam_size", "num_captions", "min_length", "max_length", "length_penalty",
            "temperature", "top_k", "top_p", "seed", "beam_groups", "diversity", "block_ngrams",
            "forced_words", "banned_words", "style", "guard_endings", "block_repeats",
            "guidance", "candidates",
            "rare_words",
        )
    ),
}  # fmt: skip

MAY_CHANGE = {
    # How a step is computed.
    "encoder.recompute",
    # Files may be moved; their captions must match.
    "run_folder",
    *(
        f"data.{name}"
        for name in (
            "train_annotations", "val_annotations", "images", "karpathy_split", "features",
            "workers",
        )
    ),
    *(
        f"training.{name}"
        for name in (
            "epochs", "lr", "encoder_lr", "weight_decay", "warmup_steps", "schedule",
            "plateau_patience", "clip_norm", "patience", "label_smoothing", "scheduled_sampling",
            "photo_words", "attention_penalty", "hard_reward", "hard_entropy", "micro_batch",
            "precision", "compile", "log_every", "save_every", "sample_images", "keep_best",
            "trackers",
        )
    ),
}  # fmt: skip

SHARDS = {"data.shards"}
"""Compared by content, see ``test_runs_from_shards_resume_exactly``."""


def settings_of(config: TrainConfig, **changes: Any) -> dict[str, Any]:
    vocabulary = SimpleNamespace(words=("a", "dog"))
    setup = SimpleNamespace(
        config=config,
        train=[],
        val=changes.get("val", []),
        stored=SimpleNamespace(vocabulary=vocabulary, model=torch.nn.Linear(1, 1)),
        teachers=(),
    )
    return resume_settings(setup, 1)  # type: ignore[arg-type]


def saved(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings after a round trip through a checkpoint's JSON."""
    loaded: dict[str, Any] = json.loads(json.dumps(settings))
    return loaded


def changed(name: str) -> TrainConfig:
    """The default config with another value for one setting, valid or not."""
    config = copy.deepcopy(TrainConfig())
    *sections, field = name.split(".")
    owner = getattr(config, sections[0]) if sections else config
    object.__setattr__(owner, field, "changed")
    return config


def test_every_setting_either_must_match_or_may_change():
    assert not MUST_MATCH & MAY_CHANGE
    every = set(flatten(dataclasses.asdict(TrainConfig())))
    assert every == MUST_MATCH | MAY_CHANGE | SHARDS


@pytest.mark.parametrize("name", sorted(MUST_MATCH))
def test_a_setting_that_must_match_is_refused_by_name(name: str):
    held = saved(settings_of(TrainConfig()))
    check_resume(Path("state"), held, settings_of(TrainConfig()))
    with pytest.raises(CheckpointError, match=f"was trained with {name} .*, but now it is changed"):
        check_resume(Path("state"), held, settings_of(changed(name)))


@pytest.mark.parametrize("name", sorted(MAY_CHANGE))
def test_a_setting_that_may_change_is_accepted(name: str):
    held = saved(settings_of(TrainConfig()))
    check_resume(Path("state"), held, settings_of(changed(name)))


def test_all_differences_are_named_in_one_line():
    config = TrainConfig()
    config.decoder.attention, config.encoder.image_size = "scaled_dot", 256
    with pytest.raises(CheckpointError) as caught:
        check_resume(Path("state"), saved(settings_of(TrainConfig())), settings_of(config))
    assert str(caught.value) == (
        "state was trained with encoder.image_size null, but now it is 256; with decoder.attention "
        "additive, but now it is scaled_dot; use the settings and data of that run, or another "
        "--run-folder"
    )


def test_other_validation_captions_are_refused():
    def settings(caption: str) -> dict[str, Any]:
        return settings_of(TrainConfig(), val=[CaptionedImage(1, Path("a.jpg"), (caption,))])

    with pytest.raises(CheckpointError, match=r"validation captions \w+, but now it is \w+"):
        check_resume(Path("state"), saved(settings("a dog")), settings("a cat"))


def test_old_checkpoints_are_compared_by_the_settings_they_have():
    """They store few settings, another name for the batch size, and selected models by CIDEr."""
    held = {"photos": 0, "batch_size": 32, "training.seed": 0, "shards": "none"}
    check_resume(Path("state"), held, settings_of(TrainConfig()))
    for name, message in (
        ("training.batch_size", "training.batch_size 32, but"),
        ("training.seed", "training.seed 0, but"),
        ("training.select", "training.select CIDEr, but"),
    ):
        with pytest.raises(CheckpointError, match=message):
            check_resume(Path("state"), held, settings_of(changed(name)))
    check_resume(Path("state"), held, settings_of(changed("decoder.attention")))
