"""Names of COCO categories in captions, and the phrase table."""

from __future__ import annotations

from collections import Counter
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from captioner.evaluation.objects import (
    _PHRASES,
    CATEGORIES,
    OTHERS,
    Name,
    find_names,
    phrases,
)
from captioner.text.tokenizer import tokenize


def named(sentence: str) -> list[tuple[str, str]]:
    words = tokenize(sentence)
    return [(name.category, " ".join(words[name.start : name.stop])) for name in find_names(words)]


# --- Captions ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sentence", "expected"),
    [
        ("A man's dog sleeps on a couch.", "person:man dog:dog couch:couch"),
        ("Two women, a boy and kids.", "person:women person:boy person:kids"),
        ("A hot dog next to a dog", "hot dog:hot dog dog:dog"),
        ("Hot-dogs on a plate", "hot dog:hot-dogs"),
        ("A teddy bear and a brown bear", "teddy bear:teddy bear bear:bear"),
        ("A stuffed bear, a stuffed dog, a toy truck", "teddy bear:stuffed bear"),
        ("A dog toy near the dog house of a puppy", "dog:puppy"),
        ("A baby elephant and a baby", "elephant:baby elephant person:baby"),
        ("A mother bear with her cubs", "bear:mother bear"),
        ("A boy in an orange shirt", "person:boy"),
        ("An orange and two oranges", "orange:oranges"),
        ("A tennis player swings a racquet", "person:tennis player tennis racket:racquet"),
        ("The baseball game: a player at bat", "person:player"),
        ("A batter holds a baseball bat", "person:batter baseball bat:baseball bat"),
        ("A bat and a ball", "baseball bat:bat sports ball:ball"),
        ("He kicks a soccer ball", "sports ball:soccer ball"),
        ("Men playing ball near a ball pit", "person:men"),
        ("A red fire hydrant and a hydrant", "fire hydrant:fire hydrant fire hydrant:hydrant"),
        ("A toilet with toilet paper", "toilet:toilet"),
        ("A mouse, a mouse pad and Mickey Mouse", "mouse:mouse"),
        ("A woman with glasses drinks a glass of wine", "person:woman wine glass:glass of wine"),
        ("A glass table and a coffee table", "dining table:table"),
        ("Someone holds a remote control", "person:someone remote:remote control"),
        ("A remote area with a TV remote", "remote:tv remote"),
        ("People watch a train at the train station", "person:people train:train"),
        ("The bus driver waits at a bus stop", "person:bus driver"),
        ("A bike rider on a bike passes a dirt bike", "person:bike rider bicycle:bike "
         "motorcycle:dirt bike"),
        ("A man skis down a hill on skis", "person:man skis:skis"),
        ("A double-decker bus", "bus:double-decker bus:bus"),
        ("A double decker bus", "bus:double decker bus"),
        ("A doughnut, a carrot cake, a carrot", "donut:doughnut cake:carrot cake carrot:carrot"),
        ("A man in a tie ties his shoe", "person:man tie:tie"),
        ("A jet, a jet ski", "airplane:jet"),
        ("A couple of giraffes", "giraffe:giraffes"),
        ("A clock tower with a clock", "clock:clock"),
        ("A bed of lettuce on a bed", "bed:bed"),
        ("A sofa, a television, a cellphone", "couch:sofa tv:television cell phone:cellphone"),
        ("A catcher's mitt and an oven mitt", "baseball glove:catcher 's mitt"),
        ("A pit bull and a bull", "dog:pit bull cow:bull"),
        ("Pictures of grass and the sky", ""),
    ],
)  # fmt: skip
def test_names_found_in_captions(sentence: str, expected: str) -> None:
    assert " ".join(f"{category}:{text}" for category, text in named(sentence)) == expected


def test_positions_are_word_indices() -> None:
    assert find_names(["a", "hot", "dog", "dog"]) == [Name("hot dog", 1, 3), Name("dog", 3, 4)]
    assert find_names([]) == []
    assert find_names(["hot"]) == []


# --- The table -----------------------------------------------------------------------------------

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


# --- The search ----------------------------------------------------------------------------------

SOME = [
    "a", "and", "hot", "dog", "dogs", "bear", "teddy", "stuffed", "baby", "house", "wine", "glass",
    "of", "bus", "driver", "stop", "double", "decker", "flat", "screen", "tv", "catcher", "'s",
    "mitt", "hot-dog",
]  # fmt: skip
OF_SOME = [phrase for phrase in _PHRASES if set(phrase) <= set(SOME)]


@given(st.lists(st.sampled_from(SOME), max_size=10))
def test_the_longest_phrase_from_the_left_wins(words: list[str]) -> None:
    """Compared with a search that tries every phrase at every position."""
    expected, start = [], 0
    while start < len(words):
        here = [p for p in OF_SOME if tuple(words[start : start + len(p)]) == p]
        longest = max(here, key=len, default=("",))
        category = _PHRASES.get(longest)
        if category:
            expected.append(Name(category, start, start + len(longest)))
        start += len(longest)

    assert find_names(words) == expected
