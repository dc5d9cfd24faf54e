"""Warnings about settings that do not suit a run's data. They are printed before the run starts."""

from __future__ import annotations

from captioner.text.vocabulary import END, UNKNOWN
from captioner.training.optim import warmup_steps
from captioner.training.setup import Setup

FEW_VALIDATION_PHOTOS = 20
"""Number of validation photos below which a warning says that the scores depend on chance."""

MAX_SHARE = 0.2
"""Largest share of unknown words, or of captions that are too long, without a warning."""


def setting_warnings(setup: Setup, total_steps: int) -> list[str]:
    """Return one warning for each setting that does not suit the data or the length of the run.

    ``total_steps`` is the number of optimizer steps of the whole run.
    """
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
    if not config.data.extend_vocabulary:
        lower = "; set data.extend_vocabulary to true"
    if config.init_from is None:
        threshold = config.data.vocabulary_threshold
        lacking, lower = (
            f"data.vocabulary_threshold {threshold} leaves out",
            "; lower data.vocabulary_threshold",
        )
    by_loss = training.select == "loss"
    steadier = "" if by_loss else ", or set training.select to loss, which is steadier"
    single = len(val) == 1 and training.select == "CIDEr"
    problems = {
        f"training.warmup_steps is {training.warmup_steps}, but a warm-up is at most a fifth of "
        f"the run ({total_steps} steps in total); {warmup} will be used":
            warmup < training.warmup_steps,
        f"training.batch_size {training.batch_size} exceeds the number of training photos, "
        f"{len(setup.train)}, so an epoch is a single step; set a smaller batch size":
            len(setup.train) < training.batch_size,
        f"training.patience {training.patience} can end the run within the warm-up of {warmup} "
        f"steps ({epoch:.0f} steps per epoch); set a larger patience, or 0 to never stop early":
            0 < training.patience * epoch < warmup,
        "training.select loss compares with the reference captions, but the run learns from "
        "rewards, and this raises the loss; use CIDEr or BLEU-4":
            by_loss and training.objective == "self_critical",
        f"{len(shared)} of {len(val)} validation photos are also training photos (first: "
        f"{''.join(shared[:1])}), so their scores say nothing about other photos; validate on "
        "other photos": shared,
        "the CIDEr of a single validation photo is always 0; validate on more photos, or set "
        "training.select to loss": single,
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
