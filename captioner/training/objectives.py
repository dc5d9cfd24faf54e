"""Training objectives: what a batch is trained on, and the losses of that.

    reference captions   cross-entropy of the words
    sampled captions     rewards: self-critical training

With either, ``training.reading`` also trains the model's reading of the photos.

Notation: B photos, R captions (or samples) per photo, T steps, S stems.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from captioner.data.batches import Batch, EncodedImage, pad_captions
from captioner.evaluation.reward import CaptionReward
from captioner.hardware import upload
from captioner.inference.stored_model import StoredModel
from captioner.inference.torch_engine import DecoderStepper
from captioner.model.attention import Memory
from captioner.model.captioner import CaptionModel
from captioner.model.decoder import Decoder
from captioner.model.hard_attention import HardLosses
from captioner.model.losses import Losses, caption_losses, score_words, with_attention_losses
from captioner.model.reading import reading_loss
from captioner.options import SearchOptions, SelfCriticalConfig, TrainConfig
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

Loss = Callable[[Decoder, Memory], Losses]


@dataclass(frozen=True)
class Task:
    """Photos, and the loss of captions of theirs.

    Not a tuple: DistributedDataParallel moves the tensors in tuples to the GPU, and reading them
    back would make every step wait.
    """

    images: Tensor
    """Pixels or features, on the device."""
    loss: Loss
    """Sums over the captions."""
    words: int
    """Target words, end tokens included."""
    stems: tuple[Tensor, Tensor] | None = None
    """From ``StemsOfPhotos.of_photos``, to train the reading; None: it is not trained."""

    def losses(self, model: CaptionModel) -> Losses:
        """The losses of a model, summed over the captions."""
        features = model.to_features(self.images)
        losses = self.loss(model.decoder, model.decoder.memory(features))
        if self.stems is None:
            return losses
        assert model.reading is not None
        counts, captions = (upload(part, features.device) for part in self.stems)
        read = reading_loss(model.reading(features).words, counts, captions)
        return losses._replace(reading=read)


def build_objective(
    config: TrainConfig,
    photos: Sequence[EncodedImage],
    initial: StoredModel,
) -> ReferenceCaptions | SelfCritical:
    """Build ``training.objective`` for a run that starts from the initial model."""
    training, vocabulary = config.training, initial.vocabulary
    stems = None
    if training.reading:
        assert initial.reading is not None
        stems = StemsOfPhotos(photos, initial.reading.stems)
    if training.objective == "self_critical":
        return SelfCritical(config.self_critical, photos, vocabulary, training.seed, stems=stems)
    return ReferenceCaptions(training.label_smoothing, stems)


@torch.no_grad()
def seen(model: CaptionModel, images: Tensor) -> tuple[Tensor, Tensor]:
    """Features without gradient, and what to train on: the features if the encoder is frozen."""
    features = model.to_features(images)
    finetuned = any(parameter.requires_grad for parameter in model.encoder.parameters())
    return features, images if finetuned else features


# --- Reference captions --------------------------------------------------------------------------


@dataclass
class ReferenceCaptions:
    """Cross-entropy of the reference captions."""

    label_smoothing: float = 0.0
    stems: StemsOfPhotos | None = None
    """What the reading learns too."""

    def task(self, model: CaptionModel, batch: Batch, images: Tensor, step: int) -> Task:
        """The task of a batch, whose ``images`` are on the device of the model."""
        del model, step  # nothing is sampled
        loss = partial(caption_losses, tokens=batch.tokens, label_smoothing=self.label_smoothing)
        return Task(images, loss, batch.words, _stems_of(batch, self.stems))

    def sums(self) -> dict[str, float]:
        """None: there are no samples."""
        return {}

    def signature(self) -> str:
        """Empty: there are no rewards."""
        return ""


def _stems_of(batch: Batch, stems: StemsOfPhotos | None) -> tuple[Tensor, Tensor] | None:
    """What the reading learns of the photos of a batch; nothing of those without captions."""
    if stems is None:
        return None
    real = (batch.tokens[:, 0, 0] != PAD).tolist()
    ids = zip(batch.image_ids, real, strict=True)
    return stems.of_photos([image_id if known else None for image_id, known in ids])


# --- Sampled captions ----------------------------------------------------------------------------


def policy_gradient_loss(
    decoder: Decoder, memory: Memory, tokens: Tensor, advantages: Callable[[], Tensor]
) -> Losses:
    """Surrogate loss for captions sampled from the model: its gradient is the policy gradient.

        - sum over captions of advantage * log p(caption)

    It replaces ``Losses.cross_entropy``. As in sampling, dropout is off and tokens that are never
    generated have probability 0; attention still trains in the decoder's mode. ``tokens`` are the
    sampled captions, (B, R, T + 1), as for ``caption_losses``; ``advantages`` returns those of the
    captions, (B, R), on the CPU, once the forward pass has been queued, so that a GPU runs it while
    the rewards are computed.
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


def _weighted_sum(
    first: Loss, second: Loss, weight: float, decoder: Decoder, memory: Memory
) -> Losses:
    """Two losses of the same photos, which are encoded once."""
    one, other = first(decoder, memory), second(decoder, memory)
    hard = None
    if one.hard is not None and other.hard is not None:
        pairs = zip(one.hard, other.hard, strict=True)
        hard = HardLosses(*(mine + weight * added for mine, added in pairs))
    return Losses(
        one.cross_entropy + weight * other.cross_entropy,
        one.attention_penalty + weight * other.attention_penalty,
        hard,
    )


class SelfCritical:
    """Sampled captions, rewarded by the metric that captions are evaluated with.

    The model samples captions of every photo. Each is scored against the references, and its
    advantage over a baseline of the same photo weights the gradient of its log-probability:

        gradient = - sum over samples of (r - b) d log p(sample)

    Source: Rennie et al. 2017 (arXiv:1612.00563), equation 9 with the greedy caption's reward as
    a baseline; the mean of the other samples in its place, Luo 2020 (arXiv:2003.09971).
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
        *,
        stems: StemsOfPhotos | None = None,
    ) -> None:
        """Prepare the references of the training photos; ``seed`` is that of the sampling.

        The reading learns ``stems`` too.
        """
        self.config, self.seed, self.stems = config, seed, stems
        references: dict[str, dict[int, list[list[str]]]] = {}
        for photo in photos:
            captions = [caption_tokens(caption) for caption in photo.image.captions]
            references.setdefault(photo.image.style, {})[photo.image.image_id] = captions
        self.reward = CaptionReward(
            references,
            vocabulary,
            cider=config.cider,
            bleu=config.bleu,
            rare_words=config.rare_words,
        )
        self._endings = frozenset(vocabulary.whole_words(BAD_ENDINGS))
        self._sums: defaultdict[str, float] = defaultdict(float)

    def task(self, model: CaptionModel, batch: Batch, images: Tensor, step: int) -> Task:
        """The task of a batch; a photo's samples are a function of seed, step and photo."""
        real = (batch.tokens[:, 0, 0] != PAD).nonzero().squeeze(1)  # the others have no captions
        if not len(real):
            nothing = partial(
                policy_gradient_loss,
                tokens=batch.tokens[:, :1],
                advantages=lambda: torch.zeros(len(images), 1),
            )
            return Task(images, nothing, 0, _stems_of(batch, self.stems))
        images, image_ids = images[upload(real, images.device)], [batch.image_ids[i] for i in real]
        features, images = seen(model, images)
        starts = batch.tokens[real, 0, 0]
        samples = self._sample(model, features, image_ids, starts, step)
        captions = [one.tokens for of_photo in samples for one in of_photo]
        self._sums["samples"] += len(captions)
        self._sums["bad_endings"] += sum(ws[-1] in self._endings for ws in captions if ws)
        tokens = pad_captions(
            [
                [[*one.tokens, END] if one.ended else one.tokens for one in of_photo]
                for of_photo in samples
            ],
            starts.tolist(),
        )
        words = int((tokens[..., 1:] != PAD).sum())
        advantages = partial(self._advantages, image_ids, samples)
        loss = partial(policy_gradient_loss, tokens=tokens, advantages=advantages)
        if self.config.cross_entropy:
            share = self.config.cross_entropy * words / max(1, batch.words)
            references = partial(caption_losses, tokens=batch.tokens[real])
            loss = partial(_weighted_sum, loss, references, share)
        stems = None if self.stems is None else self.stems.of_photos(image_ids)
        return Task(images, loss, words, stems)

    def _sample(
        self,
        model: CaptionModel,
        features: Tensor,
        image_ids: Sequence[int],
        starts: Tensor,
        step: int,
    ) -> list[list[Hypothesis]]:
        """Sample captions of each photo."""
        config, training = self.config, model.training
        model.eval()
        with torch.no_grad():
            memory = model.decoder.memory(features)
        drawing = SearchOptions(
            beam_size=1,
            max_length=config.max_length,
            temperature=1.0,
            num_captions=config.samples,
            seed=self.seed * 1_000_003 + step,
        )
        seeds = [image_id % 2**32 for image_id in image_ids]
        starts = upload(starts, features.device)
        drawn = search(DecoderStepper(model.decoder, memory, starts), drawing, seeds=seeds)
        model.train(training)
        return drawn

    def _advantages(self, image_ids: Sequence[int], samples: list[list[Hypothesis]]) -> Tensor:
        """Return the rewards of the samples less the mean of the photo's others, (B, R)."""
        words = [[one.tokens for one in of_photo] for of_photo in samples]
        ended = [[one.ended for one in of_photo] for of_photo in samples]
        rewards = self.reward(image_ids, words, ended)
        total = rewards.sum(axis=1, keepdims=True)
        baselines = (total - rewards) / (rewards.shape[1] - 1)
        self._sums["reward"] += float(rewards.sum())
        self._sums["baseline"] += float(baselines.sum())
        return torch.from_numpy(rewards - baselines).float()

    def sums(self) -> dict[str, float]:
        """Those ``state.EPOCH_SUMS`` that are about samples, since the last call."""
        sums, self._sums = dict(self._sums), defaultdict(float)
        return sums

    def signature(self) -> str:
        """Settings that make rewards of two runs comparable."""
        config = self.config
        extra = f"|cross_entropy:{config.cross_entropy}" if config.cross_entropy else ""
        return f"{self.reward.signature()}|baseline:leave_one_out|samples:{config.samples}{extra}"
