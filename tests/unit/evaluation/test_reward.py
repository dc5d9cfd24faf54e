"""The self-critical reward compared with pycocoevalcap and with known answers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from captioner.evaluation.reward import CaptionReward
from captioner.text.vocabulary import PAD, UNKNOWN, Vocabulary

Tokens = list[str]

# "cat" and "grass" are not in the vocabulary, "bird" is in no reference; one word has a space.
VOCABULARY = Vocabulary(["a", "dog", "runs", "on", "bird", "1\u00a01/2"])
REFERENCE = st.lists(
    st.sampled_from(["a", "dog", "runs", "on", "cat", "grass", "1\u00a01/2"]), max_size=7
)
TRUTH = st.dictionaries(
    st.integers(0, 99), st.lists(REFERENCE, min_size=1, max_size=3), min_size=1, max_size=5
).filter(lambda truth: any(tokens for captions in truth.values() for tokens in captions))
SAMPLE = st.lists(st.integers(4, len(VOCABULARY) - 1), max_size=7)


def text(tokens: Tokens, end: bool) -> str:
    return " ".join([*tokens, "zzend"] if end else tokens)


def rewards(truth, **options) -> CaptionReward:
    return CaptionReward({"": truth}, VOCABULARY, **options)


@pytest.mark.parametrize("count_end", [False, True])
@given(truth=TRUTH, data=st.data())
def test_rewards_equal_pycocoevalcap(count_end, truth, data) -> None:
    from pycocoevalcap.bleu.bleu import Bleu
    from pycocoevalcap.cider.cider import Cider

    samples = {i: data.draw(SAMPLE) for i in truth}
    ended = {i: data.draw(st.booleans()) for i in truth}
    reward = rewards(truth, cider=3, bleu=0.5, count_end=count_end)

    found = reward(
        list(truth), [[samples[i], []] for i in truth], [[ended[i], True] for i in truth]
    )

    references = {i: [text(t, count_end) for t in captions] for i, captions in truth.items()}
    candidates = {i: [text(VOCABULARY.decode(samples[i]), count_end and ended[i])] for i in truth}
    cider_d = np.array(Cider().compute_score(references, candidates)[1])
    bleu_4 = np.array(Bleu(4).compute_score(references, candidates, verbose=0)[1][3])
    assert found[:, 0] == pytest.approx(3 * cider_d + 0.5 * bleu_4, abs=1e-9)


@pytest.mark.parametrize("special", range(PAD, UNKNOWN + 1))
def test_a_special_token_matches_nothing(special) -> None:
    """It matches neither an unknown word, nor the text ``<unk>``, nor the end of a sentence."""
    truth = {1: [["cat"], ["<pad>"], ["<start>"], ["<end>"], ["<unk>"]], 2: [["dog"]]}
    reward = rewards(truth, bleu=1)

    assert reward([1], [[[special] * 3]], [[False]]).max() < 1e-8


def test_rare_words_that_a_reference_says_are_rewarded_and_others_penalized() -> None:
    """A word counts ln(3 / df) / ln 3: "a", in all photos, counts 0. Words in one photo count 1."""
    truth = {1: [["a", "dog"], ["dog", "runs"]], 2: [["a", "cat", "runs"]], 3: [["a", "grass"]]}
    reward = rewards(truth, cider=0, bleu=1, rare_words=0.5)
    usual = rewards(truth, cider=0, bleu=1)
    captions = {"a dog": 1, "dog dog dog": 1, "a bird": -1, "dog runs on": np.log(1.5) / np.log(3)}

    samples = [[VOCABULARY.encode(words.split()) for words in captions]]
    ended = [[True] * len(captions)]
    added = reward([1], samples, ended) - usual([1], samples, ended)
    assert added[0] == pytest.approx(0.5 * np.array([*captions.values()]))


def test_each_style_has_its_own_document_frequencies() -> None:
    dogs = {1: [["a", "dog", "runs"]], 3: [["a", "dog"]]}
    birds = {2: [["a", "dog", "on", "grass"]], 4: [["a", "cat"]], 5: [["cat", "on", "grass"]]}
    samples = [[VOCABULARY.encode(words.split())] for words in ("a dog", "a dog on", "dog runs")]
    ended = [[True], [False], [True]]

    both = CaptionReward({"dogs": dogs, "birds": birds}, VOCABULARY)

    of_birds = rewards(birds)([2], samples[1:2], ended[1:2])
    of_dogs = rewards(dogs)([3, 1], samples[::2], ended[::2])
    found = both([3, 2, 1], samples, ended)
    assert found.tolist() == [of_dogs[0].tolist(), of_birds[0].tolist(), of_dogs[1].tolist()]
    assert found[1, 0] != rewards(dogs | birds)([2], samples[1:2], ended[1:2])


TRUTH_OF_TWO = {1: [["a", "dog"]], 2: [["a", "cat"]]}


def test_signature_changes_with_every_setting() -> None:
    found = [
        rewards(truth, **settings).signature()
        for truth, settings in [
            (TRUTH_OF_TWO, {}),
            (TRUTH_OF_TWO, {"cider": 0.5}),
            (TRUTH_OF_TWO, {"bleu": 0.5}),
            (TRUTH_OF_TWO, {"rare_words": 0.5}),
            (TRUTH_OF_TWO, {"count_end": False}),
            ({1: [["a", "dog"]], 2: [["the", "dog"]]}, {}),
            ({**TRUTH_OF_TWO, 3: [["bird"]]}, {}),
        ]
    ]

    assert len(set(found)) == len(found)
    assert CaptionReward({"": TRUTH_OF_TWO}, Vocabulary(["cat"])).signature() == found[0]
