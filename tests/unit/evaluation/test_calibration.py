"""Confidence calibration: known answers and leak-free cross-validation."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from captioner.evaluation.calibrate import read_judgements, stored_figures
from captioner.evaluation.calibration import (
    Example,
    Judged,
    Recipe,
    auroc,
    calibration_error,
    coverage_gain,
    cross_validate,
    error_by_chance,
    fit,
    fit_reading,
    linear_reading,
    logistic_regression,
    measure,
    measure_groups,
    measure_kinds,
    reliability,
)
from captioner.inference.confidence import (
    Observation,
    PhotoSpace,
    PhraseTable,
    WordReading,
    sigmoid,
)
from captioner.search.search import Evidence, Hypothesis

PHRASES = PhraseTable.count(100, {"a": 90, "dog": 20, "a dog runs": 5})


def judgements(confidences, right) -> Judged:
    return Judged(np.array(confidences, float), np.array(right, float), 0.5)


def example(log_prob: float, score: float, vector, name: str) -> Example:
    words = np.full(3, log_prob / 4, np.float32)
    evidence = Evidence(-words, 0.5, 0.8)
    found = Hypothesis([], words, words, words, log_prob, ended=True, evidence=evidence)
    seen = Observation("a dog runs", found, np.array(vector, np.float32))
    return Example(seen, "", "photos", score, name)


def examples(count: int = 200, seed: int = 0) -> list[Example]:
    """Captions whose probability of being right rises with their log-probability."""
    random = np.random.default_rng(seed)
    found = []
    for number in range(count):
        log_prob = -8 * random.random()
        score = 1.0 if random.random() < sigmoid(log_prob + 4) else 0.0
        found.append(example(log_prob, score, random.normal(size=6), str(number)))
    return found


def with_photos(given: list[Example], vectors) -> list[Example]:
    """The examples with other vectors of their photos."""
    return [
        one._replace(seen=one.seen._replace(photo=np.asarray(vector, np.float32)))
        for one, vector in zip(given, vectors, strict=True)
    ]


RECIPE = Recipe(PHRASES, {"beam_size": 3}, 0.5)


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


def test_the_gain_of_the_confident_half() -> None:
    table = judgements([0.9, 0.1, 0.8, 0.2], [3.0, 0.0, 1.0, 0.0])

    assert coverage_gain(table, 0.5) == pytest.approx(2.0 / 1.0)
    assert coverage_gain(table, 0.25) == pytest.approx(3.0)
    assert coverage_gain(table, 1.0) == pytest.approx(1.0)
    # Half of three captions are one and a half.
    three = judgements([0.9, 0.8, 0.1], [3.0, 1.0, 0.0])
    assert coverage_gain(three, 0.5) == pytest.approx((3 + 0.5) / 1.5 / (4 / 3))


def test_intervals_contain_the_gain_and_groups_are_separate() -> None:
    random = np.random.default_rng(0)
    confidences = random.random(300)
    table = judgements(confidences, random.random(300) < confidences)

    found = measure_groups(table, ["one"] * 100 + ["two"] * 200)

    assert [part["photos"] for part in found.values()] == [100, 200, 300]
    assert list(found) == ["one", "two", "all"]
    assert found["two"] == measure(Judged(table.confidences[100:], table.scores[100:], 0.5))
    low, high = found["all"]["half_gain_interval"]
    assert low < found["all"]["half_gain"] < high
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
    assert coverage_gain(found, 0.5) > 1.3


def before_and_after(given: list[Example], change) -> list[np.ndarray]:
    """Cross-validated confidences with the last example as it is, and changed."""
    changed = [*given[:-1], change(given[-1])]
    return [cross_validate(those, RECIPE).confidences for those in (given, changed)]


def with_other_score(one: Example) -> Example:
    return one._replace(score=1.0 - one.score)


def test_confidence_of_an_example_does_not_depend_on_its_own_score() -> None:
    """Cross-validation must not leak: changing a score changes only the other examples."""
    before, after = before_and_after(examples(120), with_other_score)

    assert after[-1] == before[-1]
    assert (after[:-1] != before[:-1]).any()  # the other folds' models were trained on it


def test_captions_of_one_photo_are_never_on_both_sides() -> None:
    """Two captions of a photo, equal but for their scores: one must not teach the other."""
    given = examples(60) * 2

    before, after = before_and_after(given, with_other_score)

    assert after[[59, 119]].tolist() == before[[59, 119]].tolist()


def test_photo_space_of_an_example_does_not_depend_on_its_own_photo() -> None:
    """A different photo for the last example changes only the other folds."""
    given = examples(120)
    [moved] = with_photos(given[-1:], [given[-1].seen.photo + 50])
    fold = np.random.default_rng(0).permutation(120) % 10
    same = np.flatnonzero(fold == fold[-1])[:-1]

    before, after = before_and_after(given, lambda _: moved)

    assert (after[same] == before[same]).all()
    assert (after != before).sum() > 60


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


def test_a_photo_far_from_all_others_has_no_confidence() -> None:
    random = np.random.default_rng(0)
    photos = random.normal(size=(400, 40)) * np.r_[np.ones(10), np.full(30, 0.1)]
    given = with_photos(examples(400), photos)
    calibrator = fit(given, RECIPE)
    usual, strange = given[0].seen, np.r_[np.zeros(10), np.full(30, 3.0)].astype(np.float32)

    assert calibrator.confidence(usual, "") > 0
    assert calibrator.confidence(usual._replace(photo=strange), "") == 0
    others = np.concatenate([photos, np.tile(strange, (40, 1))]).astype(np.float32)
    known = fit(given, replace(RECIPE, usual=others))
    assert known.confidence(usual._replace(photo=strange), "") > 0


def test_other_kinds_of_images_have_no_confidence_even_if_their_kind_was_never_seen() -> None:
    random = np.random.default_rng(0)

    def seen(count: int, direction: int | None = None) -> list[Example]:
        vectors = random.normal(size=(count, 8))
        if direction is not None:
            vectors[:, direction] += 8
        return with_photos(examples(count), vectors)

    given = seen(400)
    alike = {name: [one.seen for one in seen(n, 0)] for name, n in (("pages", 50), ("charts", 60))}
    kinds = {**alike, "icons": [one.seen for one in seen(40, 1)]}  # which differ in another way
    recipe = replace(RECIPE, kinds=kinds)

    calibrator = fit(given, recipe)
    report = measure_kinds(given, recipe)

    strange = np.array([calibrator.strangeness(one.seen.photo) for one in given])
    familiar = [given[i].seen for i in np.flatnonzero(strange <= np.quantile(strange, 0.98))]
    assert [part["images"] for part in report.values()] == [50, 60, 40]
    for name in alike:
        assert report[name]["auroc"] > 0.999
        assert report[name]["below_0.2"] == 1
    assert report["icons"]["auroc"] < 0.9
    assert all(calibrator.confidence(one, "") == 0 for kind in kinds.values() for one in kind)
    unlimited = replace(calibrator, familiar=(1e9, 2e9))
    assert all(calibrator.confidence(one, "") == unlimited.confidence(one, "") for one in familiar)


def test_rarity_is_the_log_inverse_document_frequency() -> None:
    words = ["a", "dog", "runs", "home"]

    ln = np.log
    expected = (ln(100 / 90) + ln(100 / 20) + 2 * ln(100)) / 4
    assert PHRASES.mean_rarity(words, 1) == pytest.approx(expected, rel=1e-3)
    assert PHRASES.mean_rarity(words, 3) == pytest.approx((ln(20) + ln(100)) / 2, rel=1e-3)
    assert PHRASES.mean_rarity(words[:2], 3) == pytest.approx(ln(100))


def test_support_of_a_caption_by_the_photo() -> None:
    weights = np.array([[1.0, 0], [0, 2], [3, 3]], np.float32)
    reading = WordReading(("dog", "cat", "red"), weights, np.array([0, 1, 0], np.float32))
    photo = np.array([2.0, -1], np.float32)  # log-odds: dog 2, cat -1, red 3

    least, joint = reading.measure(photo, ["a", "dog", "and", "a", "cat"])

    assert least == -1
    assert joint == pytest.approx(np.log(sigmoid(2) * sigmoid(-1)), rel=1e-6)
    assert reading.measure(photo, ["a", "bird"]) == (0, 0)


def test_words_are_read_from_photos() -> None:
    random = np.random.default_rng(0)
    photos = random.normal(size=(400, 5)).astype(np.float32)
    words = [{"a", "dog"} if x > 0.5 else {"a"} for x in photos[:, 0]]
    words[0] |= {"zebra"}

    reading = fit_reading(photos, words)

    assert reading.words == ("dog",)  # the others are of all photos, or of too few
    odds = photos @ reading.weights[0] + reading.biases[0]
    assert auroc(odds[photos[:, 0] > 0.5], odds[photos[:, 0] <= 0.5]) > 0.98


def test_strength_and_unfamiliarity_of_a_photo() -> None:
    random = np.random.default_rng(0)
    photos = np.c_[random.normal(size=(500, 3)), np.zeros((500, 3))]  # a subspace of 3 dimensions
    space = PhotoSpace.fit(photos, components=3)

    within, across = np.array([3.0, 4, 0, 0, 0, 0]), np.array([0.0, 0, 0, 5, 0, 0])

    assert space.measure(space.mean + within) == pytest.approx((5, 0), abs=1e-2)
    assert space.measure(space.mean + across) == pytest.approx((5, 1), abs=1e-2)
    assert space.measure(space.mean) == pytest.approx((0, 0))


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


def test_the_linear_reading_is_that_of_newtons_method() -> None:
    random = np.random.default_rng(0)
    vectors = (random.normal(size=(300, 3)) * [1, 2, 5] + 1).astype(np.float32)
    labels = random.random((300, 2)) < 1 / (1 + np.exp(-vectors[:, :2]))
    scaled = (vectors - vectors.mean(axis=0)) / vectors.std(axis=0)

    weights, biases = linear_reading(vectors, labels, penalty=4.0)

    found = vectors @ weights.T + biases
    inputs = np.hstack([scaled, np.ones((300, 1))]).astype(float)
    for column in (0, 1):
        exact = logistic_regression(
            inputs, labels[:, column].astype(float), np.array([4.0, 4.0, 4.0, 1e-9])
        )
        assert found[:, column] == pytest.approx(inputs @ exact, abs=2e-3)
