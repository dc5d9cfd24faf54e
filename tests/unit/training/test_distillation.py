"""Distillation: the targets are what a guided search would use, and a run can learn them."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_objectives import WORDS, batch_of, model_of, photos_of
from torch import Tensor

from captioner.data.batches import Batch
from captioner.inference.engine import EnsembleStepper
from captioner.inference.folder import StoredModel, load_model, save_model
from captioner.inference.torch_engine import DecoderStepper
from captioner.model.captioner import CaptionModel
from captioner.model.losses import caption_losses, score_words
from captioner.options import DistillationConfig, SelfCriticalConfig, TrainConfig
from captioner.text.vocabulary import NEVER_GENERATED, PAD
from captioner.training.distillation import Teacher
from captioner.training.loop import Trainer
from captioner.training.objectives import ReferenceCaptions, SelfCritical, build_objective
from captioner.training.run import RunFolder
from captioner.training.setup import prepare


def teacher_of(
    model: CaptionModel,
    guidance: list[float],
    rare_words: list[float],
    sources: int = 1,
    *others: CaptionModel,
) -> Teacher:
    """Of copies of the models."""
    models = [copy.deepcopy(one) for one in (model, *others)]
    photos = [
        replace(photo, image=replace(photo.image, source=number % sources))
        for number, photo in enumerate(photos_of(WORDS))
    ]
    config = DistillationConfig(guidance=guidance, rare_words=rare_words)
    return Teacher(config, models, WORDS, photos)


def real_rows(model: CaptionModel, batch: Batch, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Targets without padding, and the model's logits of the same rows."""
    memory = model.decoder.memory(batch.images)
    scored = score_words(model.decoder.eval(), memory, batch.tokens)
    real = scored.targets != PAD
    return targets[real], scored.logits[real]


def searched(
    models: Sequence[CaptionModel], features: Sequence[Tensor], tokens: list[int]
) -> list[Tensor]:
    """The models' log-probabilities after every word of a caption, one step at a time."""
    members = [
        DecoderStepper(model.decoder.eval(), model.decoder.memory(each[None]))
        for model, each in zip(models, features, strict=True)
    ]
    stepper = EnsembleStepper(members, one_grid=True)
    return [stepper.advance(torch.tensor([[token]])).log_probs[0, 0] for token in tokens]


@pytest.mark.parametrize(
    ("guidance", "rare_words", "count"),
    [(0.7, 0.0, 1), (0.0, 0.4, 1), (0.0, 0.0, 3), (0.7, 0.4, 3)],
)
def test_targets_are_the_formula_of_the_search(
    guidance: float, rare_words: float, count: int
) -> None:
    """Oracle: word by word, for plausible words and the others, of one model or an ensemble."""
    torch.manual_seed(3)
    models, batch = [model_of(WORDS) for _ in range(count)], batch_of(photos_of(WORDS))
    model = models[0]
    teacher = teacher_of(model, [guidance], [rare_words], 1, *models[1:])
    targets = teacher.targets(batch.images, batch.tokens, batch.image_ids)
    blanks = [one.encode(torch.from_numpy(one.preprocessing.blank()[None]))[0] for one in models]
    targets, _ = real_rows(model, batch, targets)
    found = torch.zeros(len(targets), dtype=torch.bool)
    for row, features in zip(batch.tokens.tolist(), batch.images, strict=True):
        for caption in row:
            words = [token for token in caption if token != PAD]
            if not words:
                continue
            own = searched(models, [features] * count, words[:-1])
            without = searched(models, blanks, words[:-1])
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


def test_self_critical_training_has_the_same_targets() -> None:
    model, photos = model_of(WORDS), photos_of(WORDS)
    batch = batch_of(photos, filling=(12,))
    teacher = teacher_of(model, [0.5], [])
    kept = [number for number, image_id in enumerate(batch.image_ids) if image_id != 12]
    images, tokens = batch.images[kept], batch.tokens[kept]
    targets = teacher.targets(images, tokens, [batch.image_ids[number] for number in kept])
    model.eval()
    memory = model.decoder.memory(model.to_features(images))
    found = []
    for weight in (0.5, 1.5):
        config = SelfCriticalConfig(cross_entropy=weight, max_length=6)
        objective = SelfCritical(config, photos, WORDS, 0, teacher)
        task = objective.task(model, batch, batch.images, 0)
        found.append(task.losses(model).cross_entropy * batch.words / task.words)
    expected = caption_losses(model.decoder, memory, tokens, targets=targets).cross_entropy
    torch.testing.assert_close(found[1] - found[0], expected)


def test_the_teacher_is_the_initial_model() -> None:
    """It does not change with the model that is trained."""
    config = TrainConfig(init_from="a model", distillation=DistillationConfig(guidance=[0.3]))
    initial, photos = StoredModel(model_of(WORDS), config.decoder, WORDS), photos_of(WORDS)
    built = build_objective(config, photos, initial, 1)
    assert isinstance(built, ReferenceCaptions)
    assert built.teacher is not None
    batch = batch_of(photos)
    before = built.teacher.targets(batch.images, batch.tokens, batch.image_ids)
    with torch.no_grad():
        for parameter in initial.model.decoder.parameters():
            parameter.zero_()
    after = built.teacher.targets(batch.images, batch.tokens, batch.image_ids)
    assert torch.equal(before, after)


def test_a_run_learns_from_the_models_that_it_names(
    configure: Any, first_stage: str, tmp_path: Path
) -> None:
    second = str(tmp_path / "second")
    stored = load_model(first_stage)
    torch.nn.init.normal_(stored.model.decoder.word_output.weight)
    save_model(second, stored)
    config = configure(init_from=first_stage, distillation={"models": [first_stage, second]})
    setup = prepare(config)
    batch = next(Trainer(setup, RunFolder(Path(config.run_folder), config)).source.batches(0, 0))
    objective = build_objective(config, setup.train, setup.stored, 1, setup.teachers)
    task = objective.task(setup.stored.model, batch, batch.images, 0)
    models = [load_model(folder).model for folder in (first_stage, second)]
    alone = Teacher(config.distillation, models, setup.stored.vocabulary, setup.train)
    targets = task.loss.keywords["targets"]
    assert torch.equal(targets, alone.targets(batch.images, batch.tokens, batch.image_ids))
    of_one = Teacher(config.distillation, models[:1], setup.stored.vocabulary, setup.train)
    one = of_one.targets(batch.images, batch.tokens, batch.image_ids)
    assert not torch.allclose(targets, one, atol=1e-3)
