"""Names of COCO categories in captions, the phrase table, and CHAIR on a small set by hand."""

from __future__ import annotations

import json
import math
from collections import Counter
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from captioner.errors import DataError
from captioner.evaluation.metrics import CaptionEvaluator
from captioner.evaluation.objects import (
    _PHRASES,
    CATEGORIES,
    OTHERS,
    Name,
    by_confidence,
    find_names,
    photo_objects,
    phrases,
    read_objects,
)
from captioner.text.tokenizer import tokenize


def named(sentence: str) -> list[tuple[str, str]]:
    words = tokenize(sentence)
    return [(name.category, " ".join(words[name.start : name.stop])) for name in find_names(words)]


@pytest.mark.parametrize(
    ("sentence", "expected"),
    [
        ("A man's dog sleeps on a couch.", "person:man dog:dog couch:couch"),
        ("Two women, a boy and kids.", "person:women person:boy person:kids"),
        ("A teddy bear and a brown bear", "teddy bear:teddy bear bear:bear"),
        ("A stuffed bear, a stuffed dog, a toy truck", "teddy bear:stuffed bear"),
        ("A dog toy near the dog house of a puppy", "dog:puppy"),
        ("A baby elephant and a baby", "elephant:baby elephant person:baby"),
        ("A boy in an orange shirt eats two oranges", "person:boy orange:oranges"),
        ("A bat and a ball", "baseball bat:bat sports ball:ball"),
        ("Men playing ball near a ball pit", "person:men"),
        ("A woman with glasses drinks a glass of wine", "person:woman wine glass:glass of wine"),
        ("People watch a train at the train station", "person:people train:train"),
        ("A bike passes a dirt bike", "bicycle:bike motorcycle:dirt bike"),
        ("A man skis down a hill on skis", "person:man skis:skis"),
        ("A double decker bus", "bus:double decker bus"),
        ("A man in a tie ties his shoe", "person:man tie:tie"),
        ("A couple of giraffes", "giraffe:giraffes"),
        ("Pictures of grass and the sky", ""),
    ],
)  # fmt: skip
def test_names_found_in_captions(sentence: str, expected: str) -> None:
    assert " ".join(f"{category}:{text}" for category, text in named(sentence)) == expected


LISTED = [
    (category, phrase) for category, entries in CATEGORIES.items() for phrase in phrases(entries)
]


def test_no_duplicatephrases() -> None:
    counts = Counter([phrase for _, phrase in LISTED] + list(phrases(OTHERS)))
    assert [phrase for phrase, count in counts.items() if count > 1] == []


def test_every_phrase_names_its_category() -> None:
    for category, phrase in LISTED:
        assert find_names(phrase) == [Name(category, 0, len(phrase))]
        assert tuple(tokenize(" ".join(phrase))) == phrase  # otherwise no caption could contain it


def test_excludedphrases_contain_a_name_but_give_none() -> None:
    for phrase in phrases(OTHERS):
        assert find_names(phrase) == []
        parts = {phrase[i:j] for i, j in combinations(range(len(phrase) + 1), 2)} - {phrase}
        assert any(_PHRASES.get(part) for part in parts), phrase


SOME = [
    "a", "and", "hot", "dog", "dogs", "bear", "teddy", "stuffed", "baby", "house", "wine", "glass",
    "of", "bus", "driver", "stop", "double", "decker", "flat", "screen", "tv", "catcher", "'s",
    "mitt", "hot-dog",
]  # fmt: skip
OF_SOME = [phrase for phrase in _PHRASES if set(phrase) <= set(SOME)]


@given(st.lists(st.sampled_from(SOME), max_size=10))
def test_the_longest_phrase_from_the_left_wins(words: list[str]) -> None:
    """The result is compared with a search that tries every phrase at every position."""
    expected, start = [], 0
    while start < len(words):
        here = [p for p in OF_SOME if tuple(words[start : start + len(p)]) == p]
        longest = max(here, key=len, default=("",))
        category = _PHRASES.get(longest)
        if category:
            expected.append(Name(category, start, start + len(longest)))
        start += len(longest)

    assert find_names(words) == expected


REFERENCES = {1: ["A dog on grass.", "A puppy."], 2: ["Two men."], 3: ["A cat."], 4: ["Grass."]}
ANNOTATED = {1: {"frisbee"}, 2: {"dog"}, 9: {"cat"}}
CAPTIONS = {
    1: "A dog and a cat play with a frisbee near a cat",  # the cats are not there
    2: "a man with a dog",
    3: "some grass",
    4: "a kitten",  # not there
}


def test_objects_are_those_of_references_and_annotations() -> None:
    assert photo_objects(REFERENCES, ANNOTATED) == {
        1: {"dog", "frisbee"}, 2: {"person", "dog"}, 3: {"cat"}, 4: set(),
    }  # fmt: skip


@pytest.mark.parametrize(
    "photos",
    [{"7": [2, 0], "9": []}, {"a.jpg": [7, [2, 0]], "b.jpg": [9, []]}],
    ids=["by image id", "by file name"],
)
def test_both_forms_of_an_objects_file(tmp_path: Path, photos: object) -> None:
    content = {"classes": ["dog", "cat", "hot dog"], "photos": photos}
    path = tmp_path / "objects.json"
    path.write_text(json.dumps(content))

    assert read_objects(path) == {7: {"dog", "hot dog"}, 9: set()}


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ({"photos": {"7": [0]}}, "lacks 'classes' or 'photos'"),
        ({"classes": ["dog"], "photos": {}}, "lacks 'classes' or 'photos'"),
        ({"classes": ["dog", "sofa"], "photos": {"7": [0]}}, "the class 'sofa' is not one of"),
        ({"classes": [["dog"]], "photos": {"7": [0]}}, r"the class \['dog'\] is not one of"),
        ({"classes": ["dog"], "photos": {"7": [1]}}, "photo '7' has invalid objects"),
        ({"classes": ["dog"], "photos": {"7": [-1]}}, "photo '7' has invalid objects"),
        ({"classes": ["dog"], "photos": {"7": ["dog"]}}, "photo '7' has invalid objects"),
        ({"classes": ["dog"], "photos": {"7": 0}}, "photo '7' has invalid objects"),
        ({"classes": ["dog"], "photos": {"a.jpg": [0]}}, "photo 'a.jpg' has invalid objects"),
        ({"classes": ["dog"], "photos": {"a.jpg": [7.5, [0]]}}, "photo 'a.jpg' has invalid objec"),
        ({"classes": ["dog"], "photos": {"a.jpg": [7, 8, [0]]}}, "photo 'a.jpg' has invalid obj"),
    ],
)
def test_an_invalid_objects_file_is_one_line(tmp_path: Path, content: object, problem: str) -> None:
    path = tmp_path / "objects.json"
    path.write_text(json.dumps(content))

    with pytest.raises(DataError, match=problem) as caught:
        read_objects(path)

    assert "\n" not in str(caught.value)


def test_chair_by_hand() -> None:
    evaluator = CaptionEvaluator(REFERENCES, objects=photo_objects(REFERENCES, ANNOTATED))

    found = evaluator.score(CAPTIONS)

    assert found.corpus["CHAIR_i"] == pytest.approx(3 / 7)
    assert found.corpus["CHAIR_s"] == 2 / 4
    assert [one["CHAIR_s"] for one in found.images.values()] == [1, 0, 0, 1]
    assert [found.images[i]["CHAIR_i"] for i in (1, 2, 4)] == [0.5, 0, 1]
    assert math.isnan(found.images[3]["CHAIR_i"])
    drawn = found.resample([[2, 2, 0, 0], [0, 0, 4, 0]])
    assert drawn["CHAIR_i"] == pytest.approx([4 / 12, math.nan], nan_ok=True)
    assert drawn["CHAIR_s"].tolist() == [0.5, 0]


def test_chair_by_confidence() -> None:
    counts = np.array([[2, 4], [0, 2], [0, 0], [1, 1]], float)

    low, high = by_confidence(counts, [0.1, 0.8, 1.0, 0.199])

    assert low == {
        "from": 0, "to": 0.2, "captions": 2, "mentions": 5, "CHAIR_i": 3 / 5, "CHAIR_s": 1,
    }  # fmt: skip
    assert high == {
        "from": 0.8, "to": 1, "captions": 2, "mentions": 2, "CHAIR_i": 0, "CHAIR_s": 0,
    }  # fmt: skip
