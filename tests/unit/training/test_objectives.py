"""Test objectives: self-critical training follows the gradient of the expected reward."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from toy_encoder import PatchEncoder

from captioner.data.batches import Batch, collate
from captioner.data.example import Example
from captioner.inference.reading import ReadingWords
from captioner.inference.stored_model import StoredModel
from captioner.model.caption_model import CaptionModel
from captioner.model.preprocessing import Preprocessing
from captioner.model.reading import PhotoReading
from captioner.options import DecoderConfig, SelfCriticalConfig, TrainConfig, TrainingConfig
from captioner.search.search import Hypothesis
from captioner.text.vocabulary import END, PAD, START, UNKNOWN, Vocabulary
from captioner.training import objectives
from captioner.training.objectives import Objective, SelfCritical, build_objective, encode
from captioner.training.reading import StemsOfPhotos

L, D = 4, 3
TWO_WORDS = Vocabulary(["a", "dog"])
WORDS = Vocabulary(["a", "dog", "runs", "on", "grass", "the", "man", "hat"])
CAPTIONS = ("A dog runs.", "The man on the grass.", "A dog on the grass runs.")


def model_of(vocabulary: Vocabulary, dropout: float = 0.0) -> CaptionModel:
    config = DecoderConfig(embed_dim=4, hidden_dim=5, attention_dim=6, dropout=dropout)
    model = CaptionModel(PatchEncoder(D), config, Preprocessing(image_size=32), len(vocabulary))
    with torch.no_grad():  # larger than initialized: captions differ from photo to photo
        for parameter in model.decoder.parameters():
            parameter.normal_(std=0.7)
    return model.train()


def photos_of(vocabulary: Vocabulary, count: int = 5) -> list[Example]:
    """Photo n, with id 10 + n, has some of CAPTIONS and a caption of the first n + 1 words."""
    photos = []
    for number in range(count):
        texts = (*CAPTIONS[: 1 + number % 3], " ".join(vocabulary.words[: number + 1]))
        words = [vocabulary.encode(text.lower().strip(".").split()) for text in texts]
        tokens = tuple([*caption, END] for caption in words)
        photos.append(Example(10 + number, Path("x"), texts, tokens=tokens))
    return photos


def batch_of(photos: list[Example], filling: tuple[int, ...] = ()) -> Batch:
    """Return a batch whose features depend on the photo. Photos in ``filling`` lack captions."""
    read = []
    for photo in photos:
        number = photo.image_id
        features = torch.randn(L, D, generator=torch.Generator().manual_seed(number))
        tokens = () if number in filling else photo.tokens
        read.append((replace(photo, tokens=tokens), features))
    return collate(read)


def in_double(batch: Batch) -> Batch:
    return replace(batch, images=batch.images.double())


def objective_of(photos: list[Example], seed: int = 0, **changes: Any) -> SelfCritical:
    vocabulary = TWO_WORDS if changes.pop("small", False) else WORDS
    config = SelfCriticalConfig(**{"samples": 4, "max_length": 6} | changes)
    training = TrainingConfig(seed=seed, attention_penalty=0.0)
    return SelfCritical(training, config, photos, vocabulary)


def samples_of(
    objective: SelfCritical, model: CaptionModel, batch: Batch
) -> dict[int, list[tuple[int, ...]]]:
    """Return sampled captions by photo, with their end tokens."""
    features = encode(model, batch)
    starts = batch.tokens[:, 0, 0]
    found = objective.sample(model.decoder, features, batch.image_ids, starts, batch.step)
    return {
        image_id: [(*one.tokens, END) if one.ended else tuple(one.tokens) for one in of_photo]
        for image_id, of_photo in zip(batch.image_ids, found, strict=True)
    }


# --- The gradient by enumeration of all sentences ------------------------------------------------

LENGTH = 3


def all_sentences() -> Iterator[tuple[tuple[int, ...], bool]]:
    """Sentences with a flag: up to two words with an end (True), or three words (False)."""
    for length in range(LENGTH):
        for words in itertools.product((4, 5), repeat=length):
            yield words, True
    for words in itertools.product((4, 5), repeat=LENGTH):
        yield words, False


def toy_reward(words: tuple[int, ...], ended: bool) -> float:
    """Return a reward that is different for every sentence and exact in float32."""
    return sum((word - 3) * 3**position for position, word in enumerate(words)) / 8 - 1.5 * ended


class ToyReward:
    """Replacement of ``CaptionReward``."""

    def __call__(self, image_ids: Any, samples: Any, ended: Any) -> np.ndarray:
        return np.array(
            [
                [toy_reward(tuple(words), done) for words, done in zip(*photo, strict=True)]
                for photo in zip(samples, ended, strict=True)
            ]
        )


def hypothesis(words: tuple[int, ...], ended: bool) -> Hypothesis:
    nothing = torch.empty(0)
    return Hypothesis(list(words), nothing, nothing, nothing, 0.0, ended)


class Enumeration:
    """One photo, a float64 model, and every caption that it can sample."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
        photos = photos_of(TWO_WORDS, 1)
        self.model, self.batch = model_of(TWO_WORDS).double(), in_double(batch_of(photos))
        self.images = self.batch.images
        self.objective = objective_of(photos, small=True, max_length=LENGTH, **changes)
        self.objective.reward = ToyReward()  # type: ignore[assignment]
        self.sentences = list(all_sentences())
        self.sampled: tuple[int, ...] = ()

        def search(*given: Any, **seeds: Any) -> list[list[Hypothesis]]:
            return [[hypothesis(*self.sentences[index]) for index in self.sampled]]

        monkeypatch.setattr(objectives, "search", search)

    def log_probs(self) -> Tensor:
        """Compute every sentence's log-probability step by step, over words and the end token."""
        decoder, totals = self.model.decoder, []
        memory = decoder.memory(self.images)
        for words, ended in self.sentences:
            state, total, last = decoder.start(memory), torch.zeros((), dtype=torch.float64), START
            for word in (*words, END) if ended else words:
                embedded = decoder.embed(torch.tensor([[last]]))
                step = decoder.step(decoder.word_gates(embedded), state, memory)
                logits = decoder.readout(embedded, *step.outputs)[0, 0]
                possible = logits[[END, 4, 5]].log_softmax(0)
                total = total + possible[{END: 0, 4: 1, 5: 2}[word]]
                state, last = step.state, word
            totals.append(total)
        return torch.stack(totals)

    def loss_of(self, sampled: tuple[int, ...]) -> Tensor:
        """Return the training loss if these sentences are sampled."""
        self.sampled = sampled
        return self.objective(self.model, self.batch)[0]

    def gradient(self, value: Tensor) -> Tensor:
        parameters = list(self.model.decoder.parameters())
        found = torch.autograd.grad(value, parameters)
        return torch.cat([part.flatten() for part in found])

    def expected_reward(self) -> Tensor:
        rewards = torch.tensor([toy_reward(*sentence) for sentence in self.sentences]).double()
        probabilities = self.log_probs().exp()
        assert probabilities.sum().item() == pytest.approx(1, abs=1e-12)  # all sentences
        return (probabilities * rewards).sum()


def test_gradient_with_the_leave_one_out_baseline_is_unbiased(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    enumeration = Enumeration(monkeypatch, samples=2)
    expected = enumeration.gradient(-enumeration.expected_reward())
    probabilities = enumeration.log_probs().exp().tolist()

    estimate = enumeration.gradient(
        sum(
            (1 + (one != other))
            * probabilities[one]
            * probabilities[other]
            * enumeration.loss_of((one, other))
            for one, other in itertools.combinations_with_replacement(range(len(probabilities)), 2)
        )
    )

    assert len(probabilities) == 15
    torch.testing.assert_close(estimate, 2 * expected, rtol=0, atol=1e-8)  # summed over samples
    assert expected.abs().max() > 0.01


def test_sampling_and_loss_use_the_same_probabilities() -> None:
    """Sampling and loss both exclude the tokens that are never generated."""
    photos = photos_of(TWO_WORDS, 1)
    model, batch = model_of(TWO_WORDS).double(), in_double(batch_of(photos))
    with torch.no_grad():
        model.decoder.word_output.bias[[PAD, START, UNKNOWN]] += 1.0
    samples = 5_000
    objective = objective_of(photos, small=True, max_length=LENGTH, samples=samples)

    (found,) = samples_of(objective, model, batch).values()

    enumeration = Enumeration.__new__(Enumeration)
    enumeration.model, enumeration.images = model, batch.images
    enumeration.sentences = list(all_sentences())
    for (words, ended), log_prob in zip(
        enumeration.sentences, enumeration.log_probs().tolist(), strict=True
    ):
        probability = np.exp(log_prob)
        count = found.count((*words, END) if ended else words)
        assert (
            abs(count / samples - probability)
            < 4 * (probability * (1 - probability) / samples) ** 0.5 + 1e-9
        )


# --- Rewards and baselines -----------------------------------------------------------------------


def test_leave_one_out_baseline_known_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    enumeration = Enumeration(monkeypatch, samples=3)
    samples = [enumeration.sentences[number] for number in (1, 4, 9)]
    rewards = [toy_reward(*sentence) for sentence in samples]

    found = enumeration.objective.advantages([10], [[hypothesis(*one) for one in samples]])

    others = [(sum(rewards) - own) / 2 for own in rewards]
    expected = [own - other for own, other in zip(rewards, others, strict=True)]
    assert found.tolist() == [pytest.approx(expected, rel=1e-6)]
    sums = enumeration.objective.sums()
    assert sums["reward"] == pytest.approx(sum(rewards))
    assert sums["baseline"] == pytest.approx(sum(rewards))  # the mean is always the same
    enumeration.loss_of((1, 4, 9))
    assert enumeration.objective.sums()["samples"] == 3


# --- Sampling ------------------------------------------------------------------------------------


def test_samples_do_not_depend_on_the_rest_of_the_batch() -> None:
    photos = photos_of(WORDS)
    model, whole = model_of(WORDS).double(), replace(in_double(batch_of(photos)), step=3)
    objective = objective_of(photos)
    together = samples_of(objective, model, whole)
    batches = [*whole.parts(2)]
    for numbers in ([0], [1, 2, 3, 4], [4, 2, 0], [3, 1]):  # as in two processes
        some = batch_of([photos[number] for number in numbers])
        batches.append(replace(in_double(some), step=3))

    for batch in batches:
        for image_id, words in samples_of(objective, model, batch).items():
            assert words == together[image_id]
    assert len({str(words) for words in together.values()}) == len(photos)
    assert samples_of(objective, model, replace(whole, step=4)) != together
    assert model.decoder.training


def test_dropout_is_off_in_the_training_pass() -> None:
    """The gradient belongs to the model that was sampled from."""
    photos = photos_of(WORDS)
    model, batch = model_of(WORDS, dropout=0.9), batch_of(photos)
    objective = objective_of(photos)

    def gradient() -> Tensor:
        return torch.autograd.grad(objective(model, batch)[0], model.decoder.embedding.weight)[0]

    with_dropout = gradient()
    assert model.decoder.dropout.training
    model.decoder.dropout.p = 0.0
    assert torch.equal(with_dropout, gradient())


# --- Sums and signature --------------------------------------------------------------------------


def test_a_photo_without_captions_adds_nothing() -> None:
    """A second process with only such a photo does not change anything either."""
    photos = photos_of(WORDS)
    model = model_of(WORDS).double()
    whole = in_double(batch_of(photos))
    other = in_double(batch_of([photos[0]], filling=(10,)))
    results = []
    for batches in ([whole], [whole, other]):
        objective, words, gradient = objective_of(photos), 0, 0
        for batch in batches:
            loss, found = objective(model, batch)
            gradient += torch.autograd.grad(
                loss, model.decoder.word_output.weight, allow_unused=True
            )[0]
            words += found
        results.append((words, gradient, objective.sums()))

    assert results[0][0] == results[1][0]
    assert torch.equal(results[0][1], results[1][1])
    assert results[0][2] == results[1][2]


# --- The reading ---------------------------------------------------------------------------------


def test_stems_of_a_photo_are_counted_in_all_its_captions() -> None:
    stems = StemsOfPhotos(photos_of(WORDS), ["run", "grass", "dog", "cat"])

    # Captions 1; 1 and 2; 1, 2 and 3 of CAPTIONS, and the first words of the vocabulary.
    counts, captions = stems.of_photos([10, None, 11, 12])

    assert counts.tolist() == [[1, 0, 1, 0], [0, 0, 0, 0], [1, 1, 2, 0], [3, 2, 3, 0]]
    assert captions.tolist() == [2, 0, 3, 4]


def reading_loss_of(objective: Objective, model: CaptionModel, batch: Batch) -> float:
    """Return the part of the loss that comes from the reading."""
    torch.manual_seed(0)
    whole, _ = objective(model, batch)
    weight, objective.training.reading = objective.training.reading, 0.0
    torch.manual_seed(0)
    without, _ = objective(model, batch)
    objective.training.reading = weight
    return (whole - without).item()


@pytest.mark.parametrize("kind", ["cross_entropy", "self_critical"])
def test_the_objective_trains_the_reading_beside_the_captions(kind: str) -> None:
    photos, model = photos_of(WORDS), model_of(WORDS)
    photos = [replace(one, captions=CAPTIONS[:2]) for one in photos]
    model.reading = PhotoReading(D, 3, hidden=4)
    model.reading.dropout.p = 0.0
    stored = StoredModel(model, DecoderConfig(), WORDS)
    stored.reading = ReadingWords.of(["dog", "man", "hat"], WORDS)
    training = TrainingConfig(reading=1.0, objective=kind)  # type: ignore[arg-type]
    config = TrainConfig(init_from="x", training=training)
    batch = batch_of(photos, filling=(11,))
    objective = build_objective(config, photos, stored)
    optimizer = torch.optim.Adam(model.reading.parameters(), lr=0.3)

    before = reading_loss_of(objective, model, batch)
    for _ in range(20):
        optimizer.zero_grad()
        objective(model, batch)[0].backward()
        optimizer.step()

    after = reading_loss_of(objective, model, batch)
    # Half of the captions have a dog, half a man, none a hat: no reading knows better. The photo
    # that could not be read does not count.
    least = 4 * 2 * 2 * math.log(2)
    assert least < after < 1.05 * least < before


def test_the_reading_learns_nothing_of_photos_that_cannot_be_read() -> None:
    photos, model = photos_of(WORDS, 2), model_of(WORDS)
    model.reading = PhotoReading(D, 2, hidden=4)
    batch = batch_of(photos, filling=(10, 11))
    objective = objective_of(photos)
    objective.stems = StemsOfPhotos(photos, ["dog", "man"])

    loss, words = objective(model, batch)

    assert (loss.item(), words) == (0, 0)
    loss.backward()  # so that all processes have gradients for the same weights
    assert all(part.grad is not None for part in model.reading.parameters())
