"""Before a run: settings that cannot work well with its data, and a dry run of a few steps."""

from __future__ import annotations

import math
import statistics
import time
from datetime import timedelta
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from captioner.files import require_space
from captioner.memory import memory_errors, peak_memory
from captioner.messages import counted
from captioner.text.vocabulary import END, UNKNOWN
from captioner.training.optim import warmup_steps
from captioner.training.run import RunFolder
from captioner.training.setup import SMALLER, Setup
from captioner.training.validation import decode

if TYPE_CHECKING:  # it imports this module
    from captioner.training.loop import Trainer

FEW_VALIDATION_PHOTOS = 20
"""With fewer, captions score higher or lower by chance."""

MAX_SHARE = 0.2
"""Largest share of training words outside the vocabulary, and of captions that are truncated."""

STEPS = 4
"""Steps that a dry run times, after one warm-up step."""

PHOTOS = 32
"""Validation photos that a dry run captions."""


def setting_warnings(setup: Setup, total_steps: int) -> list[str]:
    """One line for each setting that does not suit the data or the length of the run."""
    config, training, val = setup.config, setup.config.training, setup.validated
    warmup, epoch = warmup_steps(training, total_steps), total_steps / training.epochs
    trained = {photo.path for photo in setup.train}
    shared = [image.path.name for image in val if image.path in trained]
    captions = [caption for photo in setup.train for caption in photo.tokens]
    words = [token for caption in captions for token in caption if token != END]
    unknown = words.count(UNKNOWN) / max(1, len(words))
    truncated = sum(END not in caption for caption in captions) / len(captions)
    longer = sum(len(words) > config.search.max_length for words in captions) / len(captions)
    lacking, lower = f"the vocabulary of {config.init_from} lacks", ""
    if config.init_from is None:
        threshold = config.data.vocabulary_threshold
        lacking, lower = f"data.vocabulary_threshold {threshold} leaves out", "; lower it"
    by_loss = training.select == "loss"
    steadier = "" if by_loss else ", or give training.select loss, which is steadier"
    single = len(val) == 1 and training.select == "CIDEr"
    problems = {
        f"training.warmup_steps is {training.warmup_steps}, but it is at most a fifth of the run "
        f"({total_steps} steps in total); {warmup} will be used": warmup < training.warmup_steps,
        f"training.batch_size {training.batch_size} is above the number of training photos, "
        f"{len(setup.train)}, so that an epoch is a single step; give a smaller batch size":
            len(setup.train) < training.batch_size,
        f"training.patience {training.patience} can end the run within the warm-up of {warmup} "
        f"steps ({epoch:.0f} steps per epoch); give a larger patience, or 0 for none":
            0 < training.patience * epoch < warmup,
        "training.select loss compares with the reference captions, but the run learns from "
        "rewards, which raises that loss; use CIDEr or BLEU-4":
            by_loss and training.objective == "self_critical",
        f"{len(shared)} of {len(val)} validation photos are trained on too (first: "
        f"{''.join(shared[:1])}), so their scores say nothing about other photos; validate on "
        "others": shared,
        "the CIDEr of a single validation photo is always 0; validate on more photos, or give "
        "training.select loss": single,
        f"scores of only {len(val)} validation photos depend on chance; validate on "
        f"{FEW_VALIDATION_PHOTOS} or more{steadier}":
            not single and len(val) < FEW_VALIDATION_PHOTOS,
        f"{lacking} {unknown:.0%} of the words in the training captions "
        f"({len(setup.stored.vocabulary.words)} words are left){lower}": unknown > MAX_SHARE,
        f"data.max_words {config.data.max_words} truncates {truncated:.0%} of the training "
        "captions; raise data.max_words": truncated > MAX_SHARE,
        f"search.max_length {config.search.max_length} is too short for {longer:.0%} of the "
        "training captions; raise search.max_length": longer > MAX_SHARE,
    }  # fmt: skip
    return [problem for problem, found in problems.items() if found]


# --- Dry run --------------------------------------------------------------------------------------


@memory_errors(SMALLER)
def dry_run(setup: Setup, folder: Path) -> str:
    """Take a few steps and caption a few photos; weights change, but nothing is written.

    Returns estimates of time, memory and disk space, and the ``setting_warnings``. Raises whatever
    would stop the run at its start, and DataError if there is not enough disk space.
    """
    from captioner.training.loop import Trainer

    config = setup.config
    trainer = Trainer(setup, RunFolder(folder, config))
    disk = disk_needed(trainer)
    free = require_space(folder, disk)
    step, epochs = _time_step(trainer), config.training.epochs
    some, captioner = setup.validated[:PHOTOS], trainer.captioner(setup.stored)
    started = time.monotonic()
    decode(captioner, some, config.search, setup.cache)
    each = (time.monotonic() - started) / len(some)
    validation = each * math.ceil(len(setup.validated) / trainer.world)
    validations = epochs + (config.init_from is not None)
    steps = trainer.total_steps
    lines = [
        f"{counted(steps, 'step')} ({steps / epochs:.0f} per epoch), {step:.2f} s per step, "
        f"{_duration(steps / epochs * step)} per epoch, {_duration(validation)} per validation",
        f"total time: {_duration(steps * step + validations * validation)}",
        f"memory: {peak_memory(trainer.device) / 1e9:.1f} GB; checkpoints and models: "
        f"{disk / 1e9:.2f} GB ({free / 1e9:.0f} GB free)",
    ]
    return "\n".join(lines + [f"warning: {line}" for line in setting_warnings(setup, steps)])


def _time_step(trainer: Trainer) -> float:
    """Median seconds of a few steps, data loading included."""
    trainer.model.train()
    times, started = [], time.monotonic()
    for batch in islice(trainer.source.batches(0, 0), 1 + STEPS):
        trainer.step(batch)
        if trainer.device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.monotonic() - started)
        started = time.monotonic()
    trainer.collect()  # fail now if the loss is NaN
    return statistics.median(times[1:] or times)


def disk_needed(trainer: Trainer) -> int:
    """Bytes of two checkpoints (one is being replaced by the other) and of the models."""
    state = trainer.state
    weights = sum(int(tensor.nbytes) for tensor in state.model.state_dict().values())
    groups = state.optimizer.param_groups
    moments = 2 * sum(int(p.nbytes) for group in groups for p in group["params"])
    copies = 1 if state.average is None else 2
    models = 2  # the best one, and the one that is being written, in half precision
    return 2 * (copies * weights + moments) + models * weights // 2


def _duration(seconds: float) -> timedelta:
    return timedelta(seconds=round(seconds))
