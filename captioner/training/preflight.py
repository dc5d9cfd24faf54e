"""Warnings before a run starts: settings that are valid, but cannot work well with these data."""

from __future__ import annotations

from collections.abc import Iterator

from captioner.text.vocabulary import END, UNKNOWN
from captioner.training.build import Setup
from captioner.training.optim import warmup_steps

FEW_VALIDATION_PHOTOS = 20
"""With fewer, captions score higher or lower by chance."""

MAX_UNKNOWN = 0.2
"""Largest share of training words outside the vocabulary."""

MAX_TRUNCATED = 0.2
"""Largest share of training captions that are truncated."""


def setting_warnings(setup: Setup, total_steps: int) -> list[str]:
    """One line for each setting that does not suit the data or the length of the run.

    Args:
        setup: The run.
        total_steps: Its length in steps.
    """
    return [*_schedule(setup, total_steps), *_validation(setup), *_captions(setup)]


def _schedule(setup: Setup, total_steps: int) -> Iterator[str]:
    config, photos = setup.config.training, len(setup.train)
    warmup = warmup_steps(config, total_steps)
    if warmup < config.warmup_steps:
        yield (
            f"training.warmup_steps is {config.warmup_steps}, but it is at most a fifth of the run "
            f"({total_steps} steps in total); {warmup} will be used"
        )
    if photos < config.batch_size:
        yield (
            f"training.batch_size is {config.batch_size}, but there are only {photos} training "
            "photos, so that an epoch is a single step; give a smaller batch size"
        )
    epoch = total_steps / config.epochs
    if 0 < config.patience * epoch < warmup:
        yield (
            f"training.patience {config.patience} can end the run within the warm-up of {warmup} "
            f"steps ({epoch:.0f} steps per epoch); give a larger patience, or 0 for none"
        )
    if config.select == "loss" and config.objective == "self_critical":
        yield (
            "training.select loss prefers models without self_critical training, which raises the "
            "loss; use CIDEr or BLEU-4"
        )
    elif config.select == "loss" and setup.config.distillation.active:
        yield (
            "training.select loss compares with the reference captions, but distillation learns "
            "from a model; use CIDEr or BLEU-4"
        )


def _validation(setup: Setup) -> Iterator[str]:
    select, photos = setup.config.training.select, len(setup.validated)
    if photos == 1 and select == "CIDEr":
        yield (
            "the CIDEr of a single validation photo is always 0; validate on more photos, or give "
            "training.select loss"
        )
    elif photos < FEW_VALIDATION_PHOTOS:
        hint = "" if select == "loss" else ", or give training.select loss, which is steadier"
        yield (
            f"scores of only {photos} validation photos depend on chance; validate on "
            f"{FEW_VALIDATION_PHOTOS} or more{hint}"
        )


def _captions(setup: Setup) -> Iterator[str]:
    config, vocabulary = setup.config, setup.stored.vocabulary
    captions = [caption for photo in setup.train for caption in photo.tokens]
    words = sum(token != END for caption in captions for token in caption)
    unknown = sum(token == UNKNOWN for caption in captions for token in caption)
    if unknown > MAX_UNKNOWN * words:
        source = (
            f"data.vocabulary_threshold {config.data.vocabulary_threshold} leaves out"
            if config.init_from is None
            else f"the vocabulary of {config.init_from} lacks"
        )
        hint = "; lower it" if config.init_from is None else ""
        yield (
            f"{source} {unknown / words:.0%} of the words in the training captions "
            f"({len(vocabulary.words)} words are left){hint}"
        )
    truncated = sum(END not in caption for caption in captions)
    if truncated > MAX_TRUNCATED * len(captions):
        yield (
            f"data.max_words {config.data.max_words} truncates {truncated / len(captions):.0%} of "
            "the training captions; raise it"
        )
