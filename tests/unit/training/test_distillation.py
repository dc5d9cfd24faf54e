"""Distillation: the targets are what a guided search would use, and a run can learn them."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from test_objectives import CAPTIONS, WORDS, batch_of, model_of, photos_of
from torch import Tensor, nn

from captioner.config import DistillationConfig, SelfCriticalConfig, TrainConfig
from captioner.data.batches import Batch
from captioner.decoding.stepper import DecoderStepper
from captioner.errors import ConfigError
from captioner.model_folder import StoredModel
from captioner.models.captioner import CaptionModel
from captioner.models.losses import score_longest_first
from captioner.subwords import Subwords
from captioner.training.api import build_config
from captioner.training.distillation import Teacher
from captioner.training.objectives import ReferenceCaptions, SelfCritical, build_objective
from captioner.vocabulary import NEVER_GENERATED, PAD, Vocabulary

TWO_FILES = {"train_annotations": ["a.json", "b.json"]}


def teacher_of(
    model: CaptionModel, guidance: list[float], rare_words: list[float], sources: int = 1
) -> Teacher:
    photos = [
        replace(photo, image=replace(photo.image, source=number % sources))
        for number, photo in enumerate(photos_of(WORDS))
    ]
    return Teacher(DistillationConfig(guidance, rare_words), model, WORDS, photos)


def real_rows(model: CaptionModel, batch: Batch, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Targets without padding, and the model's logits of the same rows."""
    memory = model.decoder.memory(batch.images)
    _, scored = score_longest_first(model.decoder.eval(), memory, batch.tokens)
    real = scored.targets != PAD
    return targets[real], scored.logits[real]


def searched(model: CaptionModel, features: Tensor, tokens: list[int]) -> list[Tensor]:
    """The model's log-probabilities after every word of a caption, one step at a time."""
    stepper = DecoderStepper(model.decoder.eval(), model.decoder.memory(features[None]))
    return [stepper.advance(torch.tensor([[token]])).log_probs[0, 0] for token in tokens]


@pytest.mark.parametrize(
    ("guidance", "rare_words"), [(0.0, 0.0), (0.7, 0.0), (0.0, 0.4), (0.7, 0.4)]
)
def test_targets_are_the_formula_of_the_search(guidance: float, rare_words: float) -> None:
    """Oracle: word by word, for plausible words and the others."""
    torch.manual_seed(3)
    model, batch = model_of(WORDS), batch_of(photos_of(WORDS))
    teacher = teacher_of(model, [guidance], [rare_words])
    targets = teacher.targets(batch.images, batch.tokens, batch.image_ids)
    blank = model.encode(torch.from_numpy(model.preprocessing.blank()[None]))[0]
    targets, _ = real_rows(model, batch, targets)
    found = torch.zeros(len(targets), dtype=torch.bool)
    for row, features in zip(batch.tokens.tolist(), batch.images, strict=True):
        for caption in row:
            words = [token for token in caption if token != PAD]
            if not words:
                continue
            own = searched(model, features, words[:-1])
            without = searched(model, blank, words[:-1])
            for with_photo, with_blank in zip(own, without, strict=True):
                change = guidance * (with_photo - with_blank)
                plausible = with_photo >= with_photo.max() + math.log(0.1)
                scores = with_photo + torch.where(plausible, change, change[plausible].min())
                rarity = [math.log(max(t - 4, 0) + 3.7) for t in range(len(WORDS))]
                expected = (scores + rare_words * torch.tensor(rarity)).softmax(-1)
                expected[list(NEVER_GENERATED)] = 0
                equal = (targets - expected).abs().amax(1) < 1e-5
                assert equal.any()
                found |= equal
    assert found.all()  # every row is the target of a word


def test_each_captions_file_has_its_own_guidance() -> None:
    torch.manual_seed(3)
    model, batch = model_of(WORDS), batch_of(photos_of(WORDS))
    one, other, both = (
        teacher_of(model, guidance, [], 2).targets(batch.images, batch.tokens, batch.image_ids)
        for guidance in ([0.5, 0.0], [0.0, 0.5], [0.5])
    )
    neither = teacher_of(model, [0.0], [0.0]).targets(batch.images, batch.tokens, batch.image_ids)
    differs = lambda a, b: (a - b).abs().amax(1) > 1e-6  # noqa: E731
    first, second, every = (differs(x, neither) for x in (one, other, both))
    assert first.any()
    assert second.any()
    assert not (first & second).any()
    assert torch.equal(first | second, every)
    assert torch.equal(one[first], both[first])


def test_its_own_probabilities_give_no_gradient() -> None:
    """Without guidance the teacher is the model, which is then where the loss is smallest."""
    model, batch = model_of(WORDS), batch_of(photos_of(WORDS))
    objective = ReferenceCaptions(0.0, 1, teacher_of(model, [0.0], []))
    with torch.no_grad():  # never generated, so not part of the targets
        model.decoder.word_output.bias[list(NEVER_GENERATED)] = -1e4
    (task,) = objective.tasks(model, batch, batch.images, 0)
    losses = model(task.images, task.tokens, targets=task.targets)
    losses.cross_entropy.backward()
    (plain,) = ReferenceCaptions(0.0, 1).tasks(model, batch, batch.images, 0)
    norm = gradient_norm(model)
    model.zero_grad()
    model(plain.images, plain.tokens).cross_entropy.backward()
    assert norm < 1e-4 * gradient_norm(model)


def gradient_norm(model: CaptionModel) -> float:
    gradients = [part.grad.norm() for part in model.parameters() if part.grad is not None]
    return float(torch.stack(gradients).norm())


def test_certain_targets_are_words() -> None:
    """Equivalence: targets of probability 1 give the cross-entropy of the words."""
    model, batch = model_of(WORDS), batch_of(photos_of(WORDS))
    _, scored = score_longest_first(model.decoder, model.decoder.memory(batch.images), batch.tokens)
    certain = nn.functional.one_hot(scored.targets, len(WORDS)).float()
    soft = model(batch.images, batch.tokens, targets=certain)
    hard = model(batch.images, batch.tokens)
    for one, other in zip(soft, hard, strict=True):
        torch.testing.assert_close(one, other)


def test_the_model_learns_the_guided_probabilities() -> None:
    torch.manual_seed(5)
    model, batch = model_of(WORDS), batch_of(photos_of(WORDS))
    objective = ReferenceCaptions(0.0, 1, teacher_of(model, [0.8], [0.3]))
    optimizer = torch.optim.Adam(model.decoder.parameters(), lr=0.02)
    divergences = []
    for step in range(300):
        (task,) = objective.tasks(model, batch, batch.images, step)
        model(task.images, task.tokens, targets=task.targets).cross_entropy.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            targets, logits = real_rows(model, batch, task.targets)
        log_ratio = targets.clamp(min=1e-12).log() - logits.log_softmax(-1)
        divergences.append(float((targets * log_ratio).sum(1).mean()))
        model.train()
    assert divergences[-1] < 0.02 * divergences[0]


def test_pieces_of_words_have_guidance_but_no_rare_words() -> None:
    subwords = Subwords.train(CAPTIONS, 60, 2)
    vocabulary = Vocabulary(subwords.pieces, (), subwords)
    model, photos, batch = model_of(vocabulary), photos_of(WORDS), batch_of(photos_of(WORDS))
    teacher = Teacher(DistillationConfig([0.5]), model, vocabulary, photos)
    targets = teacher.targets(batch.images, batch.tokens, batch.image_ids)
    assert targets.shape[1] == len(vocabulary)
    torch.testing.assert_close(targets.sum(1), torch.ones(len(targets)))
    with pytest.raises(ConfigError, match=r"rare_words.* pieces of words"):
        Teacher(DistillationConfig([], [0.5]), model, vocabulary, photos)


def test_self_critical_training_has_the_same_targets() -> None:
    model, photos = model_of(WORDS), photos_of(WORDS)
    batch = batch_of(photos, filling=(12,))
    teacher = teacher_of(model, [0.5], [])
    config = SelfCriticalConfig(cross_entropy=0.5, max_length=6)
    objective = SelfCritical(config, photos, WORDS, 0, teacher)
    _, task = objective.tasks(model, batch, batch.images, 0)
    kept = [number for number, image_id in enumerate(batch.image_ids) if image_id != 12]
    expected = teacher.targets(
        batch.images[kept], batch.tokens[kept], [batch.image_ids[number] for number in kept]
    )
    assert torch.equal(task.targets, expected)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"distillation": {"guidance": [0.3] * 3}}, r"guidance has 3 entries and .* 2 files"),
        ({"data": {**TWO_FILES, "karpathy_split": "split.json"}}, r"karpathy.*single entry in"),
        ({"distillation": {"rare_words": [0.3, 2]}}, r"rare_words is \[0\.3, 2\]; give .* 0 to 1"),
        ({"init_from": None}, r"distillation needs a trained model .* give init_from"),
        ({"training": {"label_smoothing": 0.1}}, r"label_smoothing is 0\.1, but distillation"),
        ({"decoder": {"selection": "hard"}}, r"distillation cannot train decoder\.selection hard"),
        ({"training": {"objective": "self_critical"}}, r"self_critical\.cross_entropy is 0"),
    ],
)
def test_settings_that_contradict_each_other(changes: dict[str, Any], message: str) -> None:
    given = {
        "init_from": "shipped",
        "data": TWO_FILES,
        "distillation": {"guidance": [0.3, 0.0]},
    }
    with pytest.raises(ConfigError, match=message):
        build_config(given | changes)


@pytest.mark.parametrize("objective", ["cross_entropy", "self_critical"])
def test_the_teacher_is_the_initial_model(objective: str) -> None:
    """It does not change with the model that is trained."""
    config = TrainConfig(
        init_from="a model",
        data=replace(TrainConfig().data, train_annotations=["a.json"]),
        training=replace(TrainConfig().training, objective=objective),  # type: ignore[arg-type]
        self_critical=SelfCriticalConfig(cross_entropy=0.1, max_length=6),
        distillation=DistillationConfig([0.3]),
    )
    initial, photos = StoredModel(model_of(WORDS), config.decoder, WORDS), photos_of(WORDS)
    built = build_objective(config, photos, initial, 1)
    assert isinstance(built, ReferenceCaptions | SelfCritical)
    assert built.teacher is not None
    batch = batch_of(photos)
    before = built.teacher.targets(batch.images, batch.tokens, batch.image_ids)
    with torch.no_grad():
        for parameter in initial.model.decoder.parameters():
            parameter.zero_()
    after = built.teacher.targets(batch.images, batch.tokens, batch.image_ids)
    assert torch.equal(before, after)
