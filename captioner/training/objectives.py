"""What a step learns: true captions, or the model's own, rewarded by the metric.

Notation: B photos, R captions (or samples) a photo, T steps.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from captioner.config import SearchOptions, SelfCriticalConfig, TrainConfig
from captioner.data.batches import Batch, EncodedImage, pad_captions
from captioner.decoding.search import Hypothesis, search
from captioner.decoding.stepper import DecoderStepper
from captioner.evaluation.reward import CaptionReward
from captioner.models.captioner import CaptionModel
from captioner.models.losses import Advantages, scheduled_inputs
from captioner.tokenizer import tokenize
from captioner.vocabulary import BAD_ENDINGS, END, PAD, Vocabulary

DRAWN = ("reward", "baseline", "samples", "bad_endings", "waited")
"""What is summed over an epoch of drawn captions: their rewards, their baselines, how many there
were, how many ended badly, seconds that their rewards were waited for."""

SUMS = ("loss", "words", "gradient_norm", *DRAWN)
"""All that is summed over an epoch: cross-entropy (nats), words, lengths of the gradients."""


@dataclass(frozen=True)
class Task:
    """Some photos and what is to be learned of them.

    No tuple: where several processes train on GPUs, torch takes tuples apart and moves their
    tensors to the device, where these would be waited for.
    """

    images: Tensor
    """Pixels or features, on the device."""
    tokens: Tensor
    """(B, R, T + 1), on the CPU."""
    words: int
    """To be learned, the end tokens included."""
    inputs: Tensor | None = None
    """See ``caption_losses``."""
    advantages: Advantages | None = None
    """See ``policy_gradient_loss``; None: ``caption_losses``."""
    scale: float = 1.0
    """Factor of its loss; other than 1: it is learned beside another task, and not counted."""


class Objective(Protocol):
    """Makes tasks of batches."""

    def tasks(self, model: CaptionModel, batch: Batch, images: Tensor, step: int) -> list[Task]:
        """What is to be learned of a batch.

        Args:
            model: Put back in its mode afterwards.
            batch: Photos with their true captions.
            images: The batch's, on the model's device.
            step: Number of the step.
        """

    def sums(self) -> dict[str, float]:
        """What has come together since the last call, by the names of ``DRAWN``; or nothing."""

    def signature(self) -> str:
        """What must agree for the rewards of two runs to be compared; empty: there are none."""


class TrueCaptions:
    """Cross-entropy of the true captions, with some of the words told being the model's own."""

    def __init__(self, share: float, steps: int) -> None:
        """Learn true captions.

        Args:
            share: Of the words told that are the model's own at the end of the run.
            steps: Of the whole run, over which the share rises from 0.
        """
        self.share, self.steps = share, steps

    def tasks(self, model: CaptionModel, batch: Batch, images: Tensor, step: int) -> list[Task]:
        """See ``Objective``."""
        inputs = None
        if self.share:
            features, images = _seen(model, images)
            with torch.no_grad():
                memory = model.decoder.memory(features)
            share = self.share * step / max(1, self.steps)
            inputs = scheduled_inputs(model.decoder, memory, batch.tokens, share)
        return [Task(images, batch.tokens, batch.words, inputs)]

    def sums(self) -> dict[str, float]:
        """See ``Objective``."""
        return {}

    def signature(self) -> str:
        """See ``Objective``."""
        return ""


class SelfCritical:
    """The model's own captions, rewarded by the metric that they will be judged by.

    Of every photo the model draws some captions. Each is scored against the true ones, and what it
    is better or worse than a baseline of the same photo weighs the gradient of its log-probability:

        gradient = - sum over samples of (r - b) d log p(sample)

    Source: Rennie et al. 2017 (arXiv:1612.00563), equation 9 with the greedy caption's reward as
    the baseline; the mean of the other samples in its place, Luo 2020 (arXiv:2003.09971).
    Deviation: dropout is off, so that captions are drawn from the very model that their gradient is
    taken of; what a caption never holds (padding, start, unknown) is no choice in either. The sum
    is divided by the samples' words, as cross-entropy is, and ``training.attention_penalty`` is
    added as there.
    """

    def __init__(
        self,
        config: SelfCriticalConfig,
        photos: Sequence[EncodedImage],
        vocabulary: Vocabulary,
        seed: int,
    ) -> None:
        """Prepare the references.

        Args:
            config: Samples, baseline, weights of the reward.
            photos: The training photos.
            vocabulary: The model's.
            seed: Of the draws.
        """
        self.config, self.seed = config, seed
        self.reward = CaptionReward(
            {
                photo.image.image_id: [tokenize(caption) for caption in photo.image.captions]
                for photo in photos
            },
            vocabulary,
            cider=config.cider,
            bleu=config.bleu,
            count_end=config.count_end,
        )
        known = [word for word in vocabulary.words if word in BAD_ENDINGS]
        self._asking = frozenset(vocabulary.encode(known))
        self._thread = ThreadPoolExecutor(1)
        self._sums = dict.fromkeys(DRAWN, 0.0)

    def tasks(self, model: CaptionModel, batch: Batch, images: Tensor, step: int) -> list[Task]:
        """See ``Objective``; a photo's draws are a function of seed, step and photo."""
        real = (batch.tokens[:, 0, 0] != PAD).nonzero().squeeze(1)  # the others only fill a place
        if not len(real):
            nothing = torch.zeros(len(images), 1)
            return [Task(images, batch.tokens[:, :1], 0, advantages=lambda: nothing)]
        images, image_ids = images[real.to(images.device)], [batch.image_ids[i] for i in real]
        features, images = _seen(model, images)
        starts = batch.tokens[real, 0, 0]
        found = self._draw(model, features, image_ids, starts, step)
        samples = [[one.tokens for one in of_photo] for of_photo in found.drawn]
        ended = [[one.ended for one in of_photo] for of_photo in found.drawn]
        tokens = pad_captions(
            [
                [[*one.tokens, END] if one.ended else one.tokens for one in of_photo]
                for of_photo in found.drawn
            ],
            starts.tolist(),
        )
        judged = self._thread.submit(self._judge, image_ids, samples, ended, found.greedy)
        self._sums["samples"] += sum(map(len, samples))
        self._sums["bad_endings"] += sum(
            bool(words) and words[-1] in self._asking for of_photo in samples for words in of_photo
        )
        words = int((tokens[..., 1:] != PAD).sum())
        tasks = [Task(images, tokens, words, advantages=lambda: self._advantages(judged))]
        if self.config.cross_entropy:
            share = self.config.cross_entropy * words / max(1, batch.words)
            tasks.append(Task(images, batch.tokens[real], 0, scale=share))
        return tasks

    def _draw(
        self,
        model: CaptionModel,
        features: Tensor,
        image_ids: Sequence[int],
        starts: Tensor,
        step: int,
    ) -> _Found:
        config, training = self.config, model.training
        model.eval()
        with torch.no_grad():
            memory = model.decoder.memory(features)
        plain = SearchOptions(beam_size=1, max_length=config.max_length)
        drawing = plain.changed(
            temperature=1.0, num_captions=config.samples, seed=self.seed * 1_000_003 + step
        )
        seeds = [image_id % 2**32 for image_id in image_ids]
        starts = starts.to(features.device)
        drawn = search(DecoderStepper(model.decoder, memory, starts), drawing, seeds=seeds)
        greedy = None
        if config.baseline == "greedy":
            best = search(DecoderStepper(model.decoder, memory, starts), plain)
            greedy = [of_photo[0] for of_photo in best]
        model.train(training)
        return _Found(drawn, greedy)

    def _judge(
        self,
        image_ids: Sequence[int],
        samples: Sequence[Sequence[Sequence[int]]],
        ended: Sequence[Sequence[bool]],
        greedy: Sequence[Hypothesis] | None,
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Rewards and baselines, (B, R) each; runs in a thread."""
        rewards = self.reward(image_ids, samples, ended)
        if greedy is None:
            others = rewards.sum(axis=1, keepdims=True) - rewards
            return rewards, others / (rewards.shape[1] - 1)
        alone = self.reward(image_ids, [[g.tokens] for g in greedy], [[g.ended] for g in greedy])
        return rewards, np.broadcast_to(alone, rewards.shape)

    def _advantages(
        self, judged: Future[tuple[NDArray[np.float64], NDArray[np.float64]]]
    ) -> Tensor:
        """Advantages, (B, R)."""
        started = time.monotonic()
        rewards, baselines = judged.result()
        self._sums["waited"] += time.monotonic() - started
        self._sums["reward"] += float(rewards.sum())
        self._sums["baseline"] += float(baselines.sum())
        return torch.from_numpy(rewards - baselines).float()

    def sums(self) -> dict[str, float]:
        """See ``Objective``."""
        told, self._sums = self._sums, dict.fromkeys(DRAWN, 0.0)
        return told

    def signature(self) -> str:
        """See ``Objective``."""
        own = self.config
        beside = f"|cross_entropy:{own.cross_entropy}" if own.cross_entropy else ""
        return f"{self.reward.signature()}|baseline:{own.baseline}|samples:{own.samples}{beside}"


@torch.no_grad()
def _seen(model: CaptionModel, images: Tensor) -> tuple[Tensor, Tensor]:
    """Features without gradient, and what is learned from: these, if the encoder is frozen."""
    features = model.to_features(images)
    learning = any(parameter.requires_grad for parameter in model.encoder.parameters())
    return features, images if learning else features


class _Found(NamedTuple):
    drawn: list[list[Hypothesis]]
    greedy: list[Hypothesis] | None


def build_objective(
    config: TrainConfig, photos: Sequence[EncodedImage], vocabulary: Vocabulary, steps: int
) -> Objective:
    """What the config says.

    Args:
        config: The whole experiment.
        photos: The training photos.
        vocabulary: The model's.
        steps: Of the whole run.
    """
    if config.training.objective == "self_critical":
        return SelfCritical(config.self_critical, photos, vocabulary, config.training.seed)
    return TrueCaptions(config.training.scheduled_sampling, steps)
