"""Self-critical training: rewards of sampled captions.

Notation: B photos, R samples per photo.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from captioner.data.batches import Batch, EncodedImage, pad_captions
from captioner.evaluation.reward import CaptionReward
from captioner.hardware import upload
from captioner.inference.stepper import DecoderStepper
from captioner.model.captioner import CaptionModel
from captioner.options import SearchOptions, SelfCriticalConfig
from captioner.search.search import Hypothesis, search
from captioner.text.tokenizer import caption_tokens
from captioner.text.vocabulary import BAD_ENDINGS, END, PAD, Vocabulary
from captioner.training.distillation import Teacher
from captioner.training.objectives import Task, seen
from captioner.training.sums import REWARD_SUMS


class _Sampled(NamedTuple):
    captions: list[list[Hypothesis]]
    greedy: list[Hypothesis] | None


class SelfCritical:
    """Sampled captions, rewarded by the metric that captions are evaluated with.

    The model samples captions of every photo. Each is scored against the references, and its
    advantage over a baseline of the same photo weights the gradient of its log-probability:

        gradient = - sum over samples of (r - b) d log p(sample)

    Source: Rennie et al. 2017 (arXiv:1612.00563), equation 9 with the greedy caption's reward as
    the baseline; the mean of the other samples as the baseline, Luo 2020 (arXiv:2003.09971).
    Deviation: dropout is off, so that the gradient is that of the model that was sampled from, and
    tokens that are never generated (padding, start, unknown) are excluded from both. The sum is
    divided by the number of sampled words, as cross-entropy is, and ``training.attention_penalty``
    is added.
    """

    def __init__(
        self,
        config: SelfCriticalConfig,
        photos: Sequence[EncodedImage],
        vocabulary: Vocabulary,
        seed: int,
        teacher: Teacher | None = None,
    ) -> None:
        """Prepare the references of the training photos; ``seed`` is that of the sampling.

        A teacher's probabilities replace the words as targets of the cross-entropy.
        """
        self.config, self.seed, self.teacher = config, seed, teacher
        self.reward = CaptionReward(
            {
                photo.image.image_id: [caption_tokens(caption) for caption in photo.image.captions]
                for photo in photos
            },
            vocabulary,
            cider=config.cider,
            bleu=config.bleu,
            count_end=config.count_end,
        )
        self._endings = frozenset(vocabulary.whole_words(BAD_ENDINGS))
        self._thread = ThreadPoolExecutor(1)
        self._sums = dict.fromkeys(REWARD_SUMS, 0.0)

    def tasks(self, model: CaptionModel, batch: Batch, images: Tensor, step: int) -> list[Task]:
        """See ``Objective``; a photo's samples are a function of seed, step and photo."""
        real = (batch.tokens[:, 0, 0] != PAD).nonzero().squeeze(1)  # the others have no captions
        if not len(real):
            nothing = torch.zeros(len(images), 1)
            return [Task(images, batch.tokens[:, :1], 0, advantages=lambda: nothing)]
        images, image_ids = images[upload(real, images.device)], [batch.image_ids[i] for i in real]
        features, images = seen(model, images)
        starts = batch.tokens[real, 0, 0]
        sampled = self._sample(model, features, image_ids, starts, step)
        samples = [[one.tokens for one in of_photo] for of_photo in sampled.captions]
        ended = [[one.ended for one in of_photo] for of_photo in sampled.captions]
        tokens = pad_captions(
            [
                [[*one.tokens, END] if one.ended else one.tokens for one in of_photo]
                for of_photo in sampled.captions
            ],
            starts.tolist(),
        )
        judged = self._thread.submit(self._rewards, image_ids, samples, ended, sampled.greedy)
        self._sums["samples"] += sum(map(len, samples))
        self._sums["bad_endings"] += sum(
            bool(words) and words[-1] in self._endings for of_photo in samples for words in of_photo
        )
        words = int((tokens[..., 1:] != PAD).sum())
        tasks = [Task(images, tokens, words, advantages=lambda: self._advantages(judged))]
        if self.config.cross_entropy:
            share = self.config.cross_entropy * words / max(1, batch.words)
            tokens = batch.tokens[real]
            targets = None
            if self.teacher is not None:
                targets = self.teacher.targets(images, tokens, image_ids)
            tasks.append(Task(images, tokens, 0, targets=targets, scale=share))
        return tasks

    def _sample(
        self,
        model: CaptionModel,
        features: Tensor,
        image_ids: Sequence[int],
        starts: Tensor,
        step: int,
    ) -> _Sampled:
        config, training = self.config, model.training
        model.eval()
        with torch.no_grad():
            memory = model.decoder.memory(features)
        greedy_search = SearchOptions(beam_size=1, max_length=config.max_length)
        drawing = greedy_search.changed(
            temperature=1.0, num_captions=config.samples, seed=self.seed * 1_000_003 + step
        )
        seeds = [image_id % 2**32 for image_id in image_ids]
        starts = upload(starts, features.device)
        drawn = search(DecoderStepper(model.decoder, memory, starts), drawing, seeds=seeds)
        greedy = None
        if config.baseline == "greedy":
            best = search(DecoderStepper(model.decoder, memory, starts), greedy_search)
            greedy = [of_photo[0] for of_photo in best]
        model.train(training)
        return _Sampled(drawn, greedy)

    def _rewards(
        self,
        image_ids: Sequence[int],
        samples: Sequence[Sequence[Sequence[int]]],
        ended: Sequence[Sequence[bool]],
        greedy: Sequence[Hypothesis] | None,
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Rewards and baselines, (B, R) each; runs in a thread beside the device."""
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
        sums, self._sums = self._sums, dict.fromkeys(REWARD_SUMS, 0.0)
        return sums

    def signature(self) -> str:
        """See ``Objective``."""
        config = self.config
        extra = f"|cross_entropy:{config.cross_entropy}" if config.cross_entropy else ""
        extra += "|distilled" if self.teacher else ""
        return (
            f"{self.reward.signature()}|baseline:{config.baseline}|samples:{config.samples}{extra}"
        )
