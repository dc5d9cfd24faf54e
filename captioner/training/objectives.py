"""Training objectives: what a batch is trained on, and the losses of that.

    reference captions   cross-entropy of the words, or of a teacher's probabilities
    sampled captions     rewards, see ``self_critical``

Notation: B photos, R captions (or samples) per photo, T steps, C content words.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torchvision.models.detection import FasterRCNN_ResNet50_FPN_Weights

from captioner.data.batches import Batch, EncodedImage
from captioner.data.coco import CaptionedImage
from captioner.errors import ConfigError, DataError
from captioner.inference.folder import StoredModel
from captioner.model.captioner import CaptionModel
from captioner.model.losses import Losses, caption_losses
from captioner.model.photo_words import PhotoWords, photo_words_loss
from captioner.model.sampled_losses import Advantages, policy_gradient_loss, scheduled_inputs
from captioner.options import TrainConfig
from captioner.text.tokenizer import tokenize
from captioner.text.vocabulary import FUNCTION_WORDS, PAD, SPECIAL_NAMES, Vocabulary
from captioner.training.distillation import Teacher


@dataclass(frozen=True)
class Task:
    """Photos and the captions to train on.

    Not a tuple: DistributedDataParallel moves the tensors in tuples to the GPU, and reading them
    back would make every step wait.
    """

    images: Tensor
    """Pixels or features, on the device."""
    tokens: Tensor
    """(B, R, T + 1), on the CPU."""
    words: int
    """Target words, end tokens included; 0: an auxiliary loss, which is not reported."""
    inputs: Tensor | None = None
    """See ``caption_losses``."""
    targets: Tensor | None = None
    """See ``caption_losses``."""
    advantages: Advantages | None = None
    """See ``policy_gradient_loss``; None: ``caption_losses``."""
    photo_words: PhotoWords | None = None
    """See ``photo_words_loss``."""
    scale: float = 1.0
    """Factor of its loss."""

    def losses(self, model: CaptionModel, label_smoothing: float) -> Losses:
        """The losses of a model, summed over the captions."""
        decoder, tokens = model.decoder, self.tokens
        memory = decoder.memory(model.to_features(self.images))
        if self.advantages is not None:
            return policy_gradient_loss(decoder, memory, tokens, self.advantages)
        losses = caption_losses(
            decoder, memory, tokens, label_smoothing, inputs=self.inputs, targets=self.targets
        )
        if self.photo_words is None:
            return losses
        return losses._replace(photo_words=photo_words_loss(decoder, memory, self.photo_words))


class Objective(Protocol):
    """Turns batches into tasks."""

    def tasks(self, model: CaptionModel, batch: Batch, images: Tensor, step: int) -> list[Task]:
        """Tasks of a batch; their losses are added.

        Args:
            model: Its training mode is restored afterwards.
            batch: Photos with their reference captions.
            images: The batch's images or features, on the model's device.
            step: Number of the step.
        """

    def sums(self) -> dict[str, float]:
        """``REWARD_SUMS`` since the last call, by name; empty without rewards."""

    def signature(self) -> str:
        """Settings that make rewards of two runs comparable; empty without rewards."""


class ReferenceCaptions:
    """Cross-entropy of the reference captions, with scheduled sampling.

    Source: Bengio et al. 2015 (arXiv:1506.03099).
    """

    def __init__(
        self,
        share: float,
        steps: int,
        teacher: Teacher | None = None,
        words_of_photos: WordsOfPhotos | None = None,
    ) -> None:
        """Let the fraction of the model's own input words rise linearly from 0 to ``share``.

        A teacher's probabilities replace the words as targets. With ``words_of_photos``, photos
        also predict their words.
        """
        self.share, self.steps, self.teacher = share, steps, teacher
        self.words_of_photos = words_of_photos

    def tasks(self, model: CaptionModel, batch: Batch, images: Tensor, step: int) -> list[Task]:
        """See ``Objective``."""
        inputs = None
        if self.share:
            features, images = seen(model, images)
            with torch.no_grad():
                memory = model.decoder.memory(features)
            share = self.share * step / max(1, self.steps)
            inputs = scheduled_inputs(model.decoder, memory, batch.tokens, share)
        targets = None
        if self.teacher is not None:
            targets = self.teacher.targets(images, batch.tokens, batch.image_ids)
        words = self.words_of_photos
        photo_words = words.of_batch(batch.image_ids, batch.tokens) if words else None
        return [Task(images, batch.tokens, batch.words, inputs, targets, photo_words=photo_words)]

    def sums(self) -> dict[str, float]:
        """See ``Objective``."""
        return {}

    def signature(self) -> str:
        """See ``Objective``."""
        return ""


@torch.no_grad()
def seen(model: CaptionModel, images: Tensor) -> tuple[Tensor, Tensor]:
    """Features without gradient, and what to train on: the features if the encoder is frozen."""
    features = model.to_features(images)
    finetuned = any(parameter.requires_grad for parameter in model.encoder.parameters())
    return features, images if finetuned else features


NO_CATEGORY = ("__background__", "N/A")
"""Names of numbers that are not a COCO category."""


class WordsOfPhotos:
    """The content words of every photo: of its captions and of the names of its object classes."""

    def __init__(self, photos: Sequence[EncodedImage], vocabulary: Vocabulary) -> None:
        """Collect the words.

        Args:
            photos: The training photos.
            vocabulary: Of the trained model.

        Raises:
            ConfigError: The vocabulary is one of pieces.
            DataError: A photo has a class that COCO does not have.
        """
        if vocabulary.subwords is not None:
            raise ConfigError(
                "training.photo_words needs a model of whole words, but this one writes pieces of "
                "words (tokenizer bpe); give 0"
            )
        function_words = set(vocabulary.whole_words(FUNCTION_WORDS))
        numbers = range(len(SPECIAL_NAMES), len(vocabulary))
        content = [token for token in numbers if token not in function_words]
        self.tokens = torch.tensor(content)
        columns = {token: column for column, token in enumerate(content)}
        names = FasterRCNN_ResNet50_FPN_Weights.DEFAULT.meta["categories"]
        self._columns: dict[int, list[int]] = {}
        for photo in photos:
            tokens = {token for caption in photo.tokens for token in caption}
            for label in photo.image.labels:
                tokens.update(vocabulary.encode(tokenize(_class_name(label, names, photo.image))))
            found = sorted(columns[token] for token in tokens & columns.keys())
            self._columns[photo.image.image_id] = found

    def of_batch(self, image_ids: Sequence[int], tokens: Tensor) -> PhotoWords:
        """The words of a batch.

        Args:
            image_ids: (B,).
            tokens: (B, R, T + 1), see ``caption_losses``; a photo without captions gets no words.
        """
        present = torch.zeros(len(image_ids), len(self.tokens))
        for row, image_id in enumerate(image_ids):
            if tokens[row, 0, 0] != PAD:
                present[row, self._columns[image_id]] = 1.0
        return PhotoWords(self.tokens, present)


def _class_name(label: int | str, names: Sequence[str], image: CaptionedImage) -> str:
    if isinstance(label, str):
        return label
    if 0 < label < len(names) and names[label] not in NO_CATEGORY:
        return names[label]
    raise DataError(
        f"{image.path}: label {label} is not the number of a COCO category (1 to {len(names) - 1}, "
        "with gaps); give the name of the class"
    )


def build_objective(
    config: TrainConfig,
    photos: Sequence[EncodedImage],
    initial: StoredModel,
    steps: int,
    teachers: Sequence[CaptionModel] = (),
) -> Objective:
    """Build ``training.objective``.

    Args:
        config: Of the run.
        photos: The training photos.
        initial: The model before its first step.
        steps: Number of steps of the run.
        teachers: The models of ``distillation.models``; none: ``distillation`` learns from a copy
            of the initial model.
    """
    vocabulary, teacher = initial.vocabulary, None
    if config.distillation.active:
        models = teachers or [copy.deepcopy(initial.model)]
        teacher = Teacher(config.distillation, models, vocabulary, photos)
    if config.training.objective == "self_critical":
        from captioner.training.self_critical import SelfCritical  # it imports this module

        seed = config.training.seed
        return SelfCritical(config.self_critical, photos, vocabulary, seed, teacher)
    words = WordsOfPhotos(photos, vocabulary) if config.training.photo_words else None
    return ReferenceCaptions(config.training.scheduled_sampling, steps, teacher, words)
