"""Training objectives: the loss of a model on a batch.

    loss, words = objective(model, batch)

    ReferenceCaptions   cross-entropy of the reference captions
    SelfCritical        rewards for captions that the model has sampled

The loss is a sum over words. The training loop divides it by the number of words in all parts of
the batch and in all processes, because an objective does not know this number.

Both objectives can also train the reading network, which predicts the content words of a photo (see
``model.reading``). ``training.reading`` is the weight of its loss.

Notation: B photos, R captions (or samples) per photo, T steps, L regions, D feature size.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from captioner.data.batches import Batch, pad_captions
from captioner.data.example import Example
from captioner.evaluation.reward import CaptionReward
from captioner.hardware import upload
from captioner.inference.stored_model import StoredModel
from captioner.inference.torch_engine import DecoderStepper
from captioner.model.attention import Memory
from captioner.model.caption_model import CaptionModel
from captioner.model.decoder import Decoder
from captioner.model.losses import Losses, caption_losses, score_words, with_attention_losses
from captioner.model.reading import reading_loss
from captioner.options import SearchOptions, SelfCriticalConfig, TrainConfig, TrainingConfig
from captioner.search.search import Hypothesis, search
from captioner.text.tokenizer import caption_tokens
from captioner.text.vocabulary import (
    BAD_ENDINGS,
    END,
    NEVER_GENERATED,
    PAD,
    Vocabulary,
)
from captioner.training.reading import StemsOfPhotos


def build_objective(
    config: TrainConfig, photos: Sequence[Example], initial: StoredModel
) -> Objective:
    """Build the objective that ``training.objective`` names.

    Args:
        config: The config of the run.
        photos: The training photos with their captions.
        initial: The model before the first step. Its vocabulary and stems are used.
    """
    stems = None
    if config.training.reading:
        assert initial.reading is not None
        stems = StemsOfPhotos(photos, initial.reading.stems)
    if config.training.objective == "self_critical":
        return SelfCritical(
            config.training, config.self_critical, photos, initial.vocabulary, stems=stems
        )
    return ReferenceCaptions(config.training, stems=stems)


class Objective:
    """Base class for objectives: the loss of a batch, and the sums that a run reports."""

    def __init__(self, training: TrainingConfig, *, stems: StemsOfPhotos | None = None) -> None:
        """Create the objective.

        Args:
            training: The settings of the run, with the weights of the losses.
            stems: The content words of each photo's captions, which the reading network learns to
                predict, or None if the run does not train this network.
        """
        self.training, self.stems = training, stems
        self._sums: defaultdict[str, Any] = defaultdict(float)

    def __call__(self, model: CaptionModel, batch: Batch) -> tuple[Tensor, int]:
        """Return the loss, summed over the words of a batch, and the number of words.

        End tokens count as words. The batch is on the CPU. The loss is a scalar on the model's
        device.
        """
        raise NotImplementedError

    def sums(self) -> dict[str, float | Tensor]:
        """Return the sums over all batches since the last call, such as the loss, by name.

        The loss stays a tensor on the device, because converting it would make every step wait.
        """
        sums, self._sums = dict(self._sums), defaultdict(float)
        return sums

    def signature(self) -> str:
        """Return a description of how rewards are computed, or an empty string without rewards.

        Rewards of two runs can be compared if the descriptions are equal.
        """
        return ""

    def _weighted(
        self, model: CaptionModel, features: Tensor, losses: Losses, image_ids: Sequence[int | None]
    ) -> Tensor:
        """Return the weighted sum of all losses, and add up the cross-entropy for ``sums``.

        The loss of the reading network, which predicts a photo's content words, is included if the
        network is trained.

        Args:
            model: The model.
            features: Features of the photos, (B, L, D).
            losses: The losses of the captions.
            image_ids: The B image ids. None marks a photo that could not be read.
        """
        if self.stems is not None:
            assert model.reading is not None
            counts, captions = (
                upload(part, features.device) for part in self.stems.of_photos(image_ids)
            )
            read = reading_loss(model.reading(features).words, counts, captions)
            losses = losses._replace(reading=read)
        self._sums["loss"] += losses.cross_entropy.detach().double()
        return losses.total(self.training)


def encode(model: CaptionModel, batch: Batch) -> Tensor:
    """Return the features of a batch's photos, (B, L, D), on the model's device."""
    device = next(model.parameters()).device
    return model.to_features(upload(batch.images, device))


# --- Reference captions --------------------------------------------------------------------------


class ReferenceCaptions(Objective):
    """Cross-entropy of the reference captions."""

    def __call__(self, model: CaptionModel, batch: Batch) -> tuple[Tensor, int]:
        """Return the summed loss and the number of words in the reference captions."""
        features = encode(model, batch)
        memory = model.decoder.memory(features)
        smoothing = self.training.label_smoothing
        losses = caption_losses(model.decoder, memory, batch.tokens, smoothing)
        captioned = (batch.tokens[:, 0, 0] != PAD).tolist()
        ids = [n if known else None for n, known in zip(batch.image_ids, captioned, strict=True)]
        self._sums["words"] += batch.words
        return self._weighted(model, features, losses, ids), batch.words


# --- Sampled captions ----------------------------------------------------------------------------


def policy_gradient_loss(
    decoder: Decoder, memory: Memory, tokens: Tensor, advantages: Callable[[], Tensor]
) -> Losses:
    """Compute a loss for sampled captions, with the policy gradient as its gradient.

        - sum over captions of advantage * log p(caption)

    The advantage is a caption's reward minus its baseline. The loss takes the place of
    ``Losses.cross_entropy`` in the result. As in sampling, dropout of the words is off, and tokens
    that are never generated have probability 0. The attention stays in training mode if the decoder
    is in training mode.

    Args:
        decoder: The decoder that sampled the captions.
        memory: The result of ``Decoder.memory`` for the photos, (B, ...).
        tokens: The sampled captions, (B, R, T + 1), in the format of ``caption_losses``.
        advantages: Function that returns the advantages of the captions, (B, R), on the CPU. It is
            called after the forward pass has been queued, so that a GPU computes the forward pass
            while the CPU computes the rewards.
    """
    training = decoder.dropout.training
    decoder.dropout.eval()
    scored = score_words(decoder, memory, tokens)
    decoder.dropout.train(training)
    never = upload(torch.tensor(NEVER_GENERATED), scored.logits.device)
    nats = nn.functional.cross_entropy(
        scored.logits.index_fill(1, never, torch.finfo(scored.logits.dtype).min),
        scored.targets,
        reduction="none",
    )
    weighted = nats * scored.of_rows(advantages())
    return with_attention_losses(decoder, scored, weighted.sum())


class SelfCritical(Objective):
    """Objective that rewards sampled captions by the metrics that evaluate captions.

    The model samples captions for every photo. Each caption has a reward r, its score against the
    references. The baseline b is the mean reward of the photo's other samples. The difference of
    reward and baseline weights the gradient of the caption's log-probability:

        gradient = - sum over samples of (r - b) d log p(sample)

    Here d stands for the derivative with respect to the weights.

    Source: Rennie et al. 2017 (arXiv:1612.00563), equation 9, where the baseline is the reward of
    the greedy caption. The mean of the other samples is from Luo 2020 (arXiv:2003.09971).
    Deviation: Dropout is off, so that the gradient belongs to the model that was sampled from.
    Tokens that are never generated (padding, start, unknown) are excluded from sampling and loss.
    The sum is divided by the number of sampled words, as for cross-entropy.
    ``training.attention_penalty`` is added.
    """

    def __init__(
        self,
        training: TrainingConfig,
        config: SelfCriticalConfig,
        photos: Sequence[Example],
        vocabulary: Vocabulary,
        *,
        stems: StemsOfPhotos | None = None,
    ) -> None:
        """Prepare the references of the training photos."""
        super().__init__(training, stems=stems)
        self.config = config
        references: dict[str, dict[int, list[list[str]]]] = {}
        for photo in photos:
            captions = [caption_tokens(caption) for caption in photo.captions]
            references.setdefault(photo.style, {})[photo.image_id] = captions
        self.reward = CaptionReward(
            references,
            vocabulary,
            cider=config.cider,
            bleu=config.bleu,
            rare_words=config.rare_words,
        )
        self._endings = frozenset(vocabulary.whole_words(BAD_ENDINGS))

    def __call__(self, model: CaptionModel, batch: Batch) -> tuple[Tensor, int]:
        """Sample captions, and return the loss with their policy gradient and the number of words.

        For the same weights, the samples of a photo depend only on the seed, the step and the
        photo.
        """
        captioned = (batch.tokens[:, 0, 0] != PAD).nonzero().squeeze(1)  # other rows are fillers
        if not len(captioned):  # gradients of 0 for the weights that other processes train
            return self._nothing(model, batch)
        ids = [batch.image_ids[row] for row in captioned.tolist()]
        references = batch.tokens[captioned]
        if len(captioned) < len(batch.images):
            batch = replace(batch, images=batch.images[captioned])
        features = encode(model, batch)
        samples = self.sample(model.decoder, features, ids, references[:, 0, 0], batch.step)
        tokens = padded(samples, references[:, 0, 0])
        words = int((tokens[..., 1:] != PAD).sum())
        memory = model.decoder.memory(features)
        losses = policy_gradient_loss(
            model.decoder, memory, tokens, lambda: self.advantages(ids, samples)
        )
        if self.config.cross_entropy:
            weight = self.config.cross_entropy * words / max(1, batch.words)
            others = caption_losses(model.decoder, memory, references)
            losses = Losses(
                losses.cross_entropy + weight * others.cross_entropy,
                losses.attention_penalty + weight * others.attention_penalty,
            )
        self._sums["words"] += words
        return self._weighted(model, features, losses, ids), words

    def _nothing(self, model: CaptionModel, batch: Batch) -> tuple[Tensor, int]:
        """Return a loss of 0 and 0 words, for a batch in which no photo has captions.

        The loss depends on the weights, because DistributedDataParallel needs a gradient of every
        weight from every process.
        """
        features = encode(model, batch)
        memory, empty = model.decoder.memory(features), batch.tokens[:, :1]
        losses = policy_gradient_loss(
            model.decoder, memory, empty, lambda: torch.zeros(len(empty), 1)
        )
        return self._weighted(model, features, losses, [None] * len(empty)), 0

    @torch.no_grad()
    def sample(
        self,
        decoder: Decoder,
        features: Tensor,
        image_ids: Sequence[int],
        starts: Tensor,
        step: int,
    ) -> list[list[Hypothesis]]:
        """Sample captions without dropout, ``self_critical.samples`` per photo.

        Args:
            decoder: The decoder.
            features: Features of the photos, (B, L, D).
            image_ids: The B image ids, which seed the samples.
            starts: The start token of each photo, (B,).
            step: The optimizer step, which also seeds the samples.
        """
        options = SearchOptions(
            beam_size=1,
            max_length=self.config.max_length,
            temperature=1.0,
            num_captions=self.config.samples,
            seed=self.training.seed * 1_000_003 + step,
        )
        training = decoder.training
        decoder.eval()
        starts = upload(starts, features.device)
        stepper = DecoderStepper(decoder, decoder.memory(features), starts)
        samples = search(stepper, options, seeds=[image_id % 2**32 for image_id in image_ids])
        decoder.train(training)
        # Autocast caches the weights that it has converted. It converted them without gradients, so
        # the next training pass would not train them.
        torch.clear_autocast_cache()
        captions = [one.tokens for of_photo in samples for one in of_photo]
        self._sums["samples"] += len(captions)
        self._sums["bad_endings"] += sum(ws[-1] in self._endings for ws in captions if ws)
        return samples

    def advantages(self, image_ids: Sequence[int], samples: list[list[Hypothesis]]) -> Tensor:
        """Return each sample's reward minus the mean reward of the photo's other samples.

        The result has the shape (B, R), for R samples of each of B photos.
        """
        words = [[one.tokens for one in of_photo] for of_photo in samples]
        ended = [[one.ended for one in of_photo] for of_photo in samples]
        rewards = self.reward(image_ids, words, ended)
        total = rewards.sum(axis=1, keepdims=True)
        baselines = (total - rewards) / (rewards.shape[1] - 1)
        self._sums["reward"] += float(rewards.sum())
        self._sums["baseline"] += float(baselines.sum())
        return torch.from_numpy(rewards - baselines).float()

    def signature(self) -> str:
        """Return one line of text that describes how the rewards are computed."""
        config = self.config
        extra = f"|cross_entropy:{config.cross_entropy}" if config.cross_entropy else ""
        return f"{self.reward.signature()}|baseline:leave_one_out|samples:{config.samples}{extra}"


def padded(samples: Sequence[Sequence[Hypothesis]], starts: Tensor) -> Tensor:
    """Return sampled captions as padded tokens, (B, R, T + 1).

    Each row begins with the photo's start token from ``starts``, (B,). Only captions that ended by
    themselves have an end token.
    """
    captions = [
        [[*one.tokens, END] if one.ended else one.tokens for one in of_photo]
        for of_photo in samples
    ]
    return pad_captions(captions, starts.tolist())
