"""Confidence calibration: known answers and leak-free cross-validation."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from captioner.evaluation.calibrate import read_judgements, stored_figures
from captioner.evaluation.fit_confidence import (
    Judged,
    Recipe,
    ScoredCaption,
    auroc,
    calibration_error,
    cross_truth,
    cross_validate,
    error_by_chance,
    fit,
    fit_kinds,
    fit_truth,
    logistic_regression,
    measure,
    measure_groups,
    measure_kinds,
    measure_truth,
    reliability,
    true_words,
)
from captioner.inference.confidence import Observation, features, sigmoid
from captioner.inference.truth import WordTruth
from captioner.search.search import Hypothesis
from captioner.search.worth import FUNCTION_WORD, UNKNOWN_WORD


def judgements(confidences, right) -> Judged:
    return Judged(np.array(confidences, float), np.array(right, float), 0.5)


def example(log_prob: float, score: float, name: str) -> ScoredCaption:
    words = np.full(3, log_prob / 4, np.float32)
    found = Hypothesis([], words, words, words, log_prob, ended=True)
    rows, nothing = np.full(3, FUNCTION_WORD), np.zeros(0, np.float32)
    seen = Observation("a dog runs", ("a", "dog", "runs"), found, np.zeros(6), rows, nothing)
    return ScoredCaption(seen, "", "photos", score, name, np.full(3, np.nan))


def examples(count: int = 200, seed: int = 0) -> list[ScoredCaption]:
    """Make captions that are right more often if their log-probability is higher."""
    random = np.random.default_rng(seed)
    found = []
    for number in range(count):
        log_prob = -8 * random.random()
        score = 1.0 if random.random() < sigmoid(log_prob + 4) else 0.0
        found.append(example(log_prob, score, str(number)))
    return found


RECIPE = Recipe({"beam_size": 3}, 0.5)


def test_the_calibration_error_of_a_small_table() -> None:
    # Bin 0.2-0.3: 3 captions, 1 right; bin 0.9-1: 2 captions, both right.
    table = judgements([0.2, 0.25, 0.24, 0.9, 1.0], [0, 0, 1, 1, 1])

    expected = 3 / 5 * abs(0.23 - 1 / 3) + 2 / 5 * abs(0.95 - 1)

    assert calibration_error(table) == pytest.approx(expected)
    low, high = reliability(table)
    assert low == pytest.approx({"photos": 3, "confidence": 0.23, "right": 1 / 3})
    assert high == pytest.approx({"photos": 2, "confidence": 0.95, "right": 1})


def test_expected_error_by_chance() -> None:
    many = judgements(np.full(10_000, 0.5), np.zeros(10_000))
    few = judgements(np.full(100, 0.5), np.zeros(100))

    # The mean of |binomial share - 0.5| is about sqrt(2 / pi) sqrt(0.25 / n).
    assert error_by_chance(few) == pytest.approx((0.5 / np.pi / 100) ** 0.5, rel=0.1)
    assert error_by_chance(many) < error_by_chance(few) / 5
    certain = judgements([0.0, 1.0], [0, 1])
    assert error_by_chance(certain) == 0


def test_intervals_contain_the_error_and_groups_are_separate() -> None:
    random = np.random.default_rng(0)
    confidences = random.random(300)
    table = judgements(confidences, random.random(300) < confidences)

    found = measure_groups(table, ["one"] * 100 + ["two"] * 200)

    assert [part["photos"] for part in found.values()] == [100, 200, 300]
    assert list(found) == ["one", "two", "all"]
    assert found["two"] == measure(Judged(table.confidences[100:], table.scores[100:], 0.5))
    low, high = found["all"]["calibration_error_interval"]
    assert low < found["all"]["calibration_error"] < high
    assert sum(one["photos"] for one in found["all"]["bins"]) == 300


def test_undefined_figures_are_not_stored() -> None:
    nothing_right = measure_groups(judgements(np.linspace(0, 1, 40), np.zeros(40)), ["one"] * 40)

    assert stored_figures(nothing_right)["one"].keys() == {
        "photos", "right", "score", "calibration_error", "calibration_error_interval",
        "calibration_error_by_chance",
    }  # fmt: skip


def test_auroc_counts_equal_values_half() -> None:
    assert auroc(np.array([0.9, 0.5]), np.array([0.5, 0.1])) == pytest.approx(3.5 / 4)
    assert auroc(np.array([]), np.array([0.1])) is None


def test_logistic_regression_finds_the_minimum() -> None:
    random = np.random.default_rng(0)
    inputs = np.c_[random.normal(size=(400, 2)), np.ones(400)]
    true = np.array([1.5, -0.7, 0.3])
    labels = (random.random(400) < 1 / (1 + np.exp(-inputs @ true))).astype(float)
    penalties = np.array([0.5, 0.5, 0.01])

    weights = logistic_regression(inputs, labels, penalties)

    p = 1 / (1 + np.exp(-inputs @ weights))
    assert inputs.T @ (p - labels) + penalties * weights == pytest.approx(np.zeros(3), abs=1e-6)
    assert weights == pytest.approx(true, abs=0.4)


def test_cross_validated_confidence_is_calibrated() -> None:
    found = cross_validate(examples(1000), RECIPE)

    assert calibration_error(found) < 0.06
    right = found.right > 0
    assert auroc(found.confidences[right], found.confidences[~right]) > 0.8


def before_and_after(given: list[ScoredCaption], change) -> list[np.ndarray]:
    """Return cross-validated confidences before and after a change of the last example."""
    changed = [*given[:-1], change(given[-1])]
    return [cross_validate(those, RECIPE).confidences for those in (given, changed)]


def with_other_score(one: ScoredCaption) -> ScoredCaption:
    return one._replace(score=1.0 - one.score)


def test_confidence_of_an_example_does_not_depend_on_its_own_score() -> None:
    """Changing an example's score must not change its own cross-validated confidence."""
    before, after = before_and_after(examples(120), with_other_score)

    assert after[-1] == before[-1]
    assert (after[:-1] != before[:-1]).any()  # the models of the other folds were fitted to it


def test_captions_of_one_photo_are_never_on_both_sides() -> None:
    """A caption must not be used to fit the confidence of another caption of its photo."""
    given = examples(60) * 2

    before, after = before_and_after(given, with_other_score)

    assert after[[59, 119]].tolist() == before[[59, 119]].tolist()


def test_judgements_are_right_if_everybody_finds_them_so() -> None:
    random = np.random.default_rng(3)
    given = [one._replace(score=(0.75, 1.0)[random.random() < 0.3]) for one in examples(200)]

    found = cross_validate(given, replace(RECIPE, threshold=None))

    assert found.confidences.mean() == pytest.approx(0.3, abs=0.1)


def test_styles_have_their_own_intercepts() -> None:
    given = [
        one._replace(style="coco" if number % 2 else "flickr", score=float(number % 4 > 0))
        for number, one in enumerate(examples(200))
    ]

    calibrator = fit(given, RECIPE)

    assert set(calibrator.intercepts) == {"coco", "flickr"}
    assert calibrator.intercepts["coco"] > calibrator.intercepts["flickr"]


# --- images that are not photos ------------------------------------------------------------------


def vectors(count: int, direction: int | None = None, seed: int = 0) -> np.ndarray:
    found = np.random.default_rng([seed, count]).normal(size=(count, 8)).astype(np.float32)
    if direction is not None:
        found[:, direction] += 8
    return found


def test_images_that_are_not_photos_have_no_confidence_even_if_their_kind_was_never_seen() -> None:
    photos = [one[None] for one in vectors(2000)]
    images = {"pages": vectors(50, 0), "charts": vectors(60, 0), "icons": vectors(40, 1)}
    [one] = examples(1)
    seen = {
        name: [one.seen._replace(photo=vector) for vector in of_kind]
        for name, of_kind in images.items()
    }

    kinds = fit_kinds(photos, images)
    calibrator = fit(examples(), replace(RECIPE, kinds=kinds))
    report = measure_kinds(calibrator, kinds, seen, "")

    assert [part["images"] for part in report.values()] == [50, 60, 40]
    for name in ("pages", "charts"):  # which are alike
        assert report[name]["auroc"] > 0.999
        assert report[name]["below_0.2"] == 1
    assert report["icons"]["auroc"] < 0.9
    for observed in seen.values():
        assert all(calibrator.confidence(image, "") == 0 for image in observed)


def test_at_most_one_in_200_photos_that_were_never_seen_has_no_confidence() -> None:
    """The test has few photos for their size, so the fitted photos look more familiar."""
    random = np.random.default_rng(1)
    photos = random.normal(size=(3000, 200)).astype(np.float32)
    kinds = {name: random.normal(0.3, 1, size=(50, 200)).astype(np.float32) for name in "abcd"}

    calibrator = fit(
        examples(), replace(RECIPE, kinds=fit_kinds([one[None] for one in photos[:1000]], kinds))
    )

    familiarity = np.array([calibrator.familiarity(photo) for photo in photos[1000:]])
    assert (familiarity == 0).mean() <= 0.005
    assert (familiarity == 1).mean() > 0.9


# --- the truth of words --------------------------------------------------------------------------


def test_a_word_is_true_if_a_reference_has_it_or_its_object_is_annotated() -> None:
    words = ("a", "red", "dogs", "with", "two", "men", "and", "a", "person", "on", "a", "couch")
    references = ["a dog and a man on a sofa", "five reddish women"]

    labels = true_words(words, references, {"couch", "person", "cat"})

    known = {word: label for word, label in zip(words, labels, strict=True) if label >= 0}
    assert known == {"red": 0, "dogs": 1, "two": 0, "men": 0, "person": 1, "couch": 1}
    assert true_words(("a", "hot", "dog"), [], {"dog"}).tolist()[1:] == [0, 0]
    assert true_words(("a", "hot", "dog"), [], {"hot dog"}).tolist()[1:] == [1, 1]
    assert true_words((), [], {"dog"}).tolist() == []


TRUTH = WordTruth(0.8, 0.4, 0.5, -1.0, 0.9, 0.3, -0.8)
WORDS = ("a", "red", "dog", "on", "a", "sofa", "thing")  # phrases: a red dog, on a sofa thing


def read(count: int, seed: int = 0) -> list[ScoredCaption]:
    """Make captions with words that are true with the probabilities in ``TRUTH``."""
    random, found = np.random.default_rng(seed), []
    rows = np.array([FUNCTION_WORD, 0, 1, FUNCTION_WORD, FUNCTION_WORD, 2, UNKNOWN_WORD])
    for number in range(count):
        log_probs = random.uniform(-4, 0, 7).astype(np.float32)
        z = random.normal(0, 2, 3).astype(np.float32)
        hypothesis = Hypothesis([], log_probs, log_probs, log_probs, log_probs.sum(), ended=True)
        seen = Observation(" ".join(WORDS), WORDS, hypothesis, np.zeros(6), rows, z)
        truths = TRUTH.truths(rows, log_probs, z)
        true = np.where(np.isnan(truths), np.nan, random.random(7) < truths)
        found.append(ScoredCaption(seen, "", "photos", 0.0, str(number), true))
    return found


def test_the_truth_of_words_is_found_again() -> None:
    given = read(2000)

    found = fit_truth(given)

    assert found is not None
    for name in ("scale", "log_prob_weight", "bias", "unknown"):
        assert getattr(found, name) == pytest.approx(getattr(TRUTH, name), abs=0.15)
    # Without log p, which is -2 on average.
    assert found.search_bias == pytest.approx(found.bias - 2 * found.log_prob_weight, abs=0.15)


def test_measured_words_and_phrases_are_calibrated() -> None:
    given = read(600)

    report = measure_truth(given, cross_truth(given))

    assert {name: part["count"] for name, part in report.items()} == {
        "words": 600 * 4,
        "phrases": 600 * 2,
    }
    for part in report.values():
        assert part["calibration_error"] < 0.04
        assert sum(one["count"] for one in part["bins"]) == part["count"]
        for one in part["bins"]:
            if one["count"] >= 100:
                assert one["true"] == pytest.approx(one["truth"], abs=0.12)
    assert report["words"]["auroc"] > 0.7
    assert measure_truth(given, [None] * 600) == {}


def test_the_truth_of_a_word_does_not_depend_on_its_own_photo() -> None:
    given = read(60)
    changed = [*given[:-1], given[-1]._replace(true=1 - given[-1].true)]

    before, after = cross_truth(given), cross_truth(changed)

    assert before[-1] == after[-1]
    assert before[:-1] != after[:-1]


def test_a_model_without_a_reading_has_no_truth() -> None:
    assert fit_truth(examples(20)) is None
    assert fit_truth([]) is None
    assert features(examples(1)[0].seen, None)[1:].tolist() == [0, 0]


def test_features_of_a_caption() -> None:
    [one] = read(1)
    truths = TRUTH.truths(one.seen.rows, one.seen.found.token_log_probs, one.seen.z)

    mean, least, joint = features(one.seen, TRUTH)

    assert mean == pytest.approx(one.seen.found.log_prob / 8)
    assert sigmoid(least) == pytest.approx(np.nanmin(truths), abs=1e-6)
    assert joint == pytest.approx(np.nansum(np.log(truths)), abs=1e-5)


# --- judgements ----------------------------------------------------------------------------------

TABLE = """image,style,caption,judge,grade,errors
a.jpg,coco,a man rides a horse,1,partly,person
a.jpg,coco,a man rides a horse,2,wrong,person object
b.jpg,,a dog,1,right,
b.jpg,,a dog,2,,
"""


def test_the_mean_of_the_judges_counts(tmp_path) -> None:
    (tmp_path / "judged.csv").write_text(TABLE)
    found = read_judgements([str(tmp_path / "judged.csv")], "flickr8k")
    assert found == {
        "coco": {("a.jpg", "a man rides a horse"): 0.25},
        "flickr8k": {("b.jpg", "a dog"): 1.0},
    }


def test_a_neutral_caption_has_no_wrong_sex(tmp_path) -> None:
    (tmp_path / "judged.csv").write_text(TABLE)
    found = read_judgements([str(tmp_path / "judged.csv")], "flickr8k", neutral=True)
    assert found["coco"] == {("a.jpg", "a person rides a horse"): 0.5}
