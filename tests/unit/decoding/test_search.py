"""The search itself: beams against brute force and a slow search, batches, ends, ties, waiting."""

from __future__ import annotations

import dataclasses
from itertools import pairwise

import array_api_compat.torch
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from slow_search import (
    Sentence,
    Task,
    assert_same,
    best_first,
    breaks_a_rule,
    brute_force,
    holds_the_words,
    rank,
    slow_beam_search,
    tasks,
)
from table_stepper import (
    END,
    START,
    Prefix,
    TableStepper,
    assert_identical,
    assert_true_to_its_path,
    constant_table,
    ending_after,
    random_table,
    written_table,
)
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from captioner.config import SearchOptions
from captioner.decoding.search import Advance, search
from captioner.decoding.words import SearchTokens

pytestmark = pytest.mark.usefixtures("array_library")


@pytest.mark.parametrize("penalty", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("num_captions", [1, 4])
@pytest.mark.parametrize("forbidden", [0.0, 0.3])
def test_a_wide_beam_is_brute_force(penalty, num_captions, forbidden) -> None:
    tables = [random_table(seed, 3, forbidden) for seed in range(4)]
    options = SearchOptions(
        beam_size=3**4, num_captions=num_captions, max_length=4, length_penalty=penalty
    )

    found = search(TableStepper(tables), options)

    for table, hypotheses in zip(tables, found, strict=True):
        assert_same(hypotheses, brute_force(table, Task(options)))


def test_a_wide_beam_gives_every_sentence_once_and_no_more() -> None:
    table = random_table(5, 2)
    options = SearchOptions(beam_size=50, num_captions=50, max_length=4)

    (found,) = search(TableStepper([table]), options)

    assert len(found) == 5  # ended after 0 to 3 words, or cut after 4
    assert_same(found, brute_force(table, Task(options)))
    assert sum(np.exp(h.log_prob) for h in found) == pytest.approx(1.0)


@settings(max_examples=150)
@given(
    seed=st.integers(0, 10_000),
    vocabulary=st.integers(2, 5),
    photos=st.integers(1, 3),
    beam_size=st.integers(1, 6),
    fewer=st.integers(0, 5),
    max_length=st.integers(1, 6),
    penalty=st.sampled_from([0.0, 0.5, 1.0]),
    forbidden=st.sampled_from([0.0, 0.4]),
)
def test_narrow_beams_are_the_slow_search(
    *, seed, vocabulary, photos, beam_size, fewer, max_length, penalty, forbidden
) -> None:
    tables = [random_table(seed + photo, vocabulary, forbidden) for photo in range(photos)]
    options = SearchOptions(
        beam_size=beam_size,
        num_captions=max(1, beam_size - fewer),
        max_length=max_length,
        length_penalty=penalty,
    )

    found = search(TableStepper(tables), options)

    assert len(found) == photos
    for table, hypotheses in zip(tables, found, strict=True):
        assert_same(hypotheses, slow_beam_search(table, Task(options)))
        for hypothesis in hypotheses:
            assert_true_to_its_path(hypothesis, table)
            assert len(hypothesis.tokens) <= max_length
            assert END not in hypothesis.tokens
        ranks = [rank(Sentence(tuple(h.tokens), h.log_prob, h.ended), options) for h in hypotheses]
        assert all(one >= other for one, other in pairwise(ranks))


def test_a_beam_of_one_takes_the_likeliest_word_every_time() -> None:
    tables = [random_table(seed, 5) for seed in range(6)]

    found = search(TableStepper(tables), SearchOptions(beam_size=1, max_length=7))

    for table, (hypothesis,) in zip(tables, found, strict=True):
        words: Prefix = ()
        while len(words) < 7 and (word := int(table(words).argmax())) != END:
            words = (*words, word)
        assert tuple(hypothesis.tokens) == words
        assert hypothesis.ended == (len(words) < 7)


@pytest.mark.parametrize("penalty", [0.0, 1.0])
def test_a_batch_is_its_photos_one_by_one(penalty) -> None:
    tables = [random_table(seed, 5) for seed in range(8)]
    options = SearchOptions(beam_size=3, num_captions=2, max_length=8, length_penalty=penalty)
    stepper = TableStepper(tables)

    together = search(stepper, options)

    assert stepper.kept  # some photo finished before the others
    for table, hypotheses in zip(tables, together, strict=True):
        (alone,) = search(TableStepper([table]), options)
        assert len(alone) == 2
        assert_identical(alone, hypotheses)


def test_finished_photos_leave_the_batch_and_keep_their_place_in_the_answer() -> None:
    tables = [ending_after(n) for n in (3, 0, 9, 1, 3)]
    stepper = TableStepper(tables)

    found = search(stepper, SearchOptions(beam_size=2, max_length=6))

    assert [len(hypotheses[0].tokens) for hypotheses in found] == [3, 0, 6, 1, 3]
    assert [hypotheses[0].ended for hypotheses in found] == [True, True, False, True, True]
    assert stepper.kept == [4, 3, 1]


def test_the_search_stops_when_every_photo_is_finished() -> None:
    stepper = TableStepper([ending_after(1), ending_after(1)])

    search(stepper, SearchOptions(beam_size=2, max_length=1000))

    assert len(stepper.prefixes[0][0]) == 1


@pytest.mark.parametrize("beam_size", [1, 3])
def test_sentences_that_cannot_end_are_cut(beam_size) -> None:
    options = SearchOptions(beam_size=beam_size, num_captions=beam_size, max_length=5)
    (found,) = search(TableStepper([constant_table(0.0, 0.5, 0.3, 0.2)]), options)

    assert len(found) == beam_size
    assert found[0].tokens == [1] * 5
    assert not any(hypothesis.ended for hypothesis in found)
    assert found[0].log_prob == pytest.approx(5 * np.log(0.5), rel=1e-5)


def test_one_word_at_most() -> None:
    table = random_table(3, 4)
    options = SearchOptions(beam_size=9, num_captions=9, max_length=1)

    (found,) = search(TableStepper([table]), options)

    assert_same(found, brute_force(table, Task(options)))
    assert sorted(len(hypothesis.tokens) for hypothesis in found) == [0, 1, 1, 1]


def test_ties_give_different_sentences() -> None:
    table = constant_table(0.25, 0.25, 0.25, 0.25)
    options = SearchOptions(beam_size=5, num_captions=5, max_length=3)
    (found,) = search(TableStepper([table]), options)

    assert len({(tuple(h.tokens), h.ended) for h in found}) == 5
    assert found[0].tokens == []  # the only sentence of one decision
    for hypothesis in found:
        assert_true_to_its_path(hypothesis, table)


def test_forbidden_words_are_never_said_even_to_fill_a_wide_beam() -> None:
    options = SearchOptions(beam_size=10, num_captions=10, max_length=3)
    (found,) = search(TableStepper([constant_table(0.5, 0, 0.5, 0)]), options)

    assert len(found) == 4
    assert {word for hypothesis in found for word in hypothesis.tokens} == {2}
    assert all(np.isfinite(hypothesis.log_prob) for hypothesis in found)


def test_a_photo_with_nothing_to_say_gives_nothing_and_spares_the_others() -> None:
    silent = constant_table(0, 0, 0)

    found = search(
        TableStepper([silent, ending_after(2, vocabulary=3)]), SearchOptions(beam_size=2)
    )

    assert found[0] == []
    assert found[1][0].tokens == [1, 1]


def test_a_length_penalty_prefers_the_longer_sentence() -> None:
    # "END" at once: log 0.4; "1 1 END": log 0.6 * 0.7 * 0.9 = log 0.378.
    def table(prefix: Prefix) -> np.ndarray:
        end = {0: 0.4, 1: 0.3}.get(len(prefix), 0.9)
        return np.log(np.array([end, 1 - end], dtype=np.float32))

    said = {}
    for penalty in (0.0, 0.5, 1.0):
        options = SearchOptions(beam_size=4, max_length=3, length_penalty=penalty)
        ((found,),) = search(TableStepper([table]), options)
        said[penalty] = found.tokens

    assert said == {0.0: [], 0.5: [1, 1], 1.0: [1, 1]}


def test_a_length_penalty_waits_for_a_sentence_that_overtakes_late() -> None:
    # "END": log 0.7 = -0.36. "1 1 1 1 END" is worth (log 0.3 + 4 log 0.99) / 5 = -0.25 in the
    # end, but still (log 0.3 + log 0.99) / 2 = -0.61 one word after "END" was found.
    def table(prefix: Prefix) -> np.ndarray:
        end = {0: 0.7, 4: 0.99}.get(len(prefix), 0.01)
        return np.log(np.array([end, 1 - end], dtype=np.float32))

    options = SearchOptions(beam_size=3, max_length=5, length_penalty=1.0)
    ((found,),) = search(TableStepper([table]), options)

    assert found.tokens == [1, 1, 1, 1]
    assert found.ended


def test_no_photos_give_no_captions() -> None:
    options = SearchOptions(max_length=1)

    class Empty(TableStepper):
        def advance(self, tokens: Tensor) -> Advance:
            return Advance(torch.zeros(0, 1, 4), torch.zeros(0, 1, 2), torch.zeros(0, 1))

    assert search(Empty([]), options) == []


# --- Every strategy ------------------------------------------------------------------------------

FORCED = SearchTokens(forced=(1,))
STRATEGIES = {
    "beam": (SearchOptions(beam_size=2, num_captions=2, max_length=6), SearchTokens()),
    "groups": (
        SearchOptions(beam_size=4, num_captions=2, max_length=6, beam_groups=2),
        SearchTokens(),
    ),
    "forced": (SearchOptions(beam_size=2, num_captions=2, max_length=6), FORCED),
    "draws": (
        SearchOptions(beam_size=1, num_captions=2, max_length=6, temperature=0.1),
        SearchTokens(),
    ),
}
every_strategy = pytest.mark.parametrize(
    ("options", "numbers"), STRATEGIES.values(), ids=STRATEGIES.keys()
)


@pytest.mark.slow
@settings(max_examples=250)
@given(data=st.data(), seed=st.integers(0, 10_000), vocabulary=st.integers(2, 5))
def test_whatever_the_options_a_batch_is_its_photos_one_by_one_and_keeps_the_rules(
    data, seed, vocabulary
) -> None:
    task = data.draw(tasks(vocabulary))
    photos, forbidden = data.draw(st.integers(1, 3)), data.draw(st.sampled_from([0.0, 0.3]))
    options, numbers = task
    tables = [random_table(seed + photo, vocabulary, forbidden) for photo in range(photos)]
    keys = [7 * seed + photo for photo in range(photos)]

    together = search(TableStepper(tables), options, numbers, keys)

    assert len(together) == photos
    for table, key, found in zip(tables, keys, together, strict=True):
        (alone,) = search(TableStepper([table]), options, numbers, [key])
        assert_identical(alone, found)
        assert len(found) <= options.num_captions
        sentences = [Sentence(tuple(h.tokens), h.log_prob, h.ended) for h in found]
        for hypothesis, sentence in zip(found, sentences, strict=True):
            assert_true_to_its_path(hypothesis, table)
            assert np.isfinite(hypothesis.log_prob)
            assert END not in sentence.words
            assert sentence.ended or len(sentence.words) == options.max_length
            assert not breaks_a_rule(sentence, task)
            assert holds_the_words(sentence, task)
        if options.temperature == 0:
            assert len({sentence.words for sentence in sentences}) == len(sentences)
        if options.beam_groups == 1:
            assert sentences == best_first(sentences, options)


@every_strategy
def test_a_finished_photo_leaves_the_batch_and_keeps_its_place(options, numbers) -> None:
    stepper = TableStepper([ending_after(n) for n in (3, 1, 9, 2, 3)])

    found = search(stepper, dataclasses.replace(options, num_captions=1), numbers)

    assert [len(hypotheses[0].tokens) for hypotheses in found] == [3, 1, 6, 2, 3]
    assert [hypotheses[0].ended for hypotheses in found] == [True, True, False, True, True]
    assert stepper.kept[0] < 5
    assert stepper.kept[-1] == 1
    assert stepper.kept == sorted(set(stepper.kept), reverse=True)


@every_strategy
def test_sentences_without_an_end_are_cut_at_the_greatest_length(options, numbers) -> None:
    table = constant_table(0.0, 0.5, 0.3, 0.2)

    (found,) = search(TableStepper([table]), options, numbers)

    assert len(found) == 2
    for hypothesis in found:
        assert not hypothesis.ended
        assert len(hypothesis.tokens) == 6
        assert_true_to_its_path(hypothesis, table)


@every_strategy
def test_a_photo_that_may_say_nothing_spares_the_others(options, numbers) -> None:
    silent, lost = constant_table(0, 0, 0), written_table({(): (0, 1, 0)}, (0, 0, 0))
    speaks = ending_after(2, vocabulary=3)

    found = search(TableStepper([silent, speaks, lost]), options, numbers)

    assert found[0] == found[2] == []
    assert found[1][0].tokens == [1, 1]


@pytest.mark.parametrize("kind", STRATEGIES)
def test_one_token_at_most(kind) -> None:
    table = constant_table(0.2, 0.5, 0.3)
    options, numbers = STRATEGIES[kind]
    short = SearchOptions(
        **{
            name: getattr(options, name)
            for name in ("beam_size", "num_captions", "temperature", "beam_groups")
        },
        max_length=1,
    )

    (found,) = search(TableStepper([table]), short, numbers)

    assert found[0].tokens == [1]
    assert {tuple(h.tokens) for h in found} <= {(), (1,), (2,)}


@pytest.mark.parametrize("kind", STRATEGIES)
@pytest.mark.parametrize("max_length", [1, 2, 3])
def test_more_places_than_sentences_stay_empty(kind, max_length) -> None:
    table, numbers = random_table(4, 2), STRATEGIES[kind][1]
    options = {
        "beam": SearchOptions(beam_size=40, num_captions=40, max_length=max_length),
        "groups": SearchOptions(
            beam_size=40, num_captions=40, max_length=max_length, beam_groups=2
        ),
        "forced": SearchOptions(beam_size=40, num_captions=40, max_length=max_length),
        "draws": SearchOptions(
            beam_size=1, num_captions=40, max_length=max_length, temperature=1.0
        ),
    }[kind]

    (found,) = search(TableStepper([table]), options, numbers)

    wide = SearchOptions(beam_size=40, num_captions=40, max_length=max_length)
    every = brute_force(table, Task(wide, numbers))
    if kind == "draws":
        assert len(found) == 40
        assert {tuple(h.tokens) for h in found} <= {sentence.words for sentence in every}
    elif kind == "groups":  # in the order of their groups
        assert sorted(tuple(h.tokens) for h in found) == sorted(s.words for s in every)
    else:
        assert_same(found, every)


@every_strategy
def test_ties_give_whole_sentences(options, numbers) -> None:
    table = constant_table(0.25, 0.25, 0.25, 0.25)

    (found,) = search(TableStepper([table]), options, numbers)

    assert len(found) == 2
    for hypothesis in found:
        assert hypothesis.ended or len(hypothesis.tokens) == 6
        assert_true_to_its_path(hypothesis, table)


@pytest.mark.parametrize("penalty", [0.0, 1.0])
@pytest.mark.parametrize("first", [1, 2])
def test_a_sentence_that_has_not_ended_is_not_given_for_one_as_good_that_has(
    penalty, first
) -> None:
    # Words 1 and 2 are as good as each other; the end is sure after one of them, and after the
    # other word 1 is, for ever.
    sure = written_table({(): (0, 0.5, 0.5), (first,): (1, 0, 0)}, (0, 1, 0))
    options = SearchOptions(beam_size=2, max_length=5, length_penalty=penalty)

    ((found,),) = search(TableStepper([sure]), options)

    assert found.ended or len(found.tokens) == 5


def test_under_the_greatest_length_penalty_the_longest_sentence_is_the_best() -> None:
    options = SearchOptions(beam_size=4, max_length=20, length_penalty=10.0)

    ((found,),) = search(TableStepper([constant_table(0.3, 0.7)]), options)

    assert len(found.tokens) == 20


# --- Waiting for the device ----------------------------------------------------------------------


class Recorder(TorchDispatchMode):
    """Counts how often the program asks what a tensor of the device holds.

    The device is simulated: a tensor is on the host if it comes from ``.cpu()`` or only from such
    tensors; every other tensor is on the device.
    """

    ASKS = ("aten::_local_scalar_dense", "aten::nonzero", "aten::is_nonzero", "aten::equal")
    ASKS += ("aten::masked_select", "aten::unique_dim", "aten::_unique2")

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.asked: list[str] = []
        tolist = Tensor.tolist

        def fetched(tensor: Tensor) -> Tensor:
            self._ask("cpu", tensor)
            host = tensor.clone()
            host.on_host = True  # type: ignore[attr-defined]
            return host

        def listed(tensor: Tensor) -> object:
            self._ask("tolist", tensor)
            return tolist(tensor)

        monkeypatch.setattr(Tensor, "cpu", fetched)
        monkeypatch.setattr(Tensor, "tolist", listed)

    def _ask(self, name: str, tensor: Tensor) -> None:
        if not hasattr(tensor, "on_host"):
            self.asked.append(name)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = [arg for arg in args if isinstance(arg, Tensor)]
        by_mask = func.name() in ("aten::index.Tensor", "aten::index_put_") and any(
            mask is not None and mask.dtype == torch.bool for mask in args[1]
        )
        if by_mask or func.name().split(".")[0] in self.ASKS:
            self._ask(func.name(), given[0])
        result = func(*args, **(kwargs or {}))
        if given and all(hasattr(arg, "on_host") for arg in given) and isinstance(result, Tensor):
            result.on_host = True  # type: ignore[attr-defined]
        return result


class TensorStepper:
    """Three photos of tensors alone; one of them leaves after three words, if any does."""

    xp, device = array_api_compat.torch, torch.device("cpu")
    start_token, end_token = START, END

    def __init__(self, recorder: Recorder, *, leaves: bool) -> None:
        self.recorder, self.leaves = recorder, leaves
        self.photos = torch.arange(3)
        self.asked: list[int] = []

    @property
    def batch_size(self) -> int:
        return len(self.photos)

    def advance(self, tokens: Tensor) -> Advance:
        self.asked.append(len(self.recorder.asked))  # before this step
        ends = self.leaves and len(self.asked) == 3
        endless = torch.tensor([-torch.inf, -0.5, -1.0, -2.0]).expand(*tokens.shape, 4)
        end = torch.tensor([0.0, -torch.inf, -torch.inf, -torch.inf])
        leaves = ((self.photos == 1) & ends).view(-1, 1, 1)
        log_probs = torch.where(leaves, end, endless).clone()
        return Advance(log_probs, torch.ones(*tokens.shape, 2), torch.ones(tokens.shape))

    def reorder(self, parents: Tensor) -> None:
        pass

    def keep(self, rows: Tensor) -> None:
        self.photos = self.photos[rows]


RULES = {"min_length": 1, "block_ngrams": 9, "guard_endings": True, "banned_words": ("w",)}


@pytest.mark.parametrize("leaves", [True, False])
@every_strategy
def test_a_step_waits_for_the_device_once(options, numbers, leaves, monkeypatch) -> None:
    numbers = numbers._replace(banned=(3,), bad_endings=(2,))
    options = dataclasses.replace(options, **RULES)

    with monkeypatch.context() as patch, Recorder(patch) as recorder:
        stepper = TensorStepper(recorder, leaves=leaves)
        search(stepper, options, numbers)

    assert stepper.asked == list(range(6))
    assert len(stepper.photos) == (2 if leaves else 3)
