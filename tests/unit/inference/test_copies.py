"""Copies of a model: in other processes, and in memory."""

from __future__ import annotations

import copy
import pickle
import shutil
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch
from toy_captioner import build

import captioner
from captioner.errors import ConfigError, ModelError
from captioner.inference.captioner import Captioner
from captioner.inference.copies import _load


@pytest.fixture
def saved(tmp_path: Path) -> Captioner:
    build().save(tmp_path / "model")
    return captioner.load(tmp_path / "model", device="cpu", precision="fp32")


def test_a_spawned_process_captions_with_the_model_that_it_is_sent(photos: list[Path]):
    """The shipped model, whose sessions cannot be pickled; errors travel back."""
    model = captioner.load(device="cpu")
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        found = list(pool.map(model.caption, photos[:2]))
        with pytest.raises(captioner.ImageError, match="the file does not exist"):
            pool.submit(model.caption, "missing.jpg").result()
        with pytest.raises(ConfigError, match=r"beam_size is \{'a': 1\}; use"):
            pool.submit(model.caption, photos[0], beam_size={"a": 1}).result()
    assert [one.text for one in found] == [model.caption(photo).text for photo in photos[:2]]


def test_a_pickled_model_is_small_and_is_loaded_once(saved: Captioner, photos: list[Path]):
    sent = pickle.dumps(saved)
    assert len(sent) < 1000
    one, two = pickle.loads(sent), pickle.loads(sent)
    assert one is two
    assert one is not saved
    assert one.caption(photos[0]).log_prob == saved.caption(photos[0]).log_prob
    assert (str(one.device), one.precision) == ("cpu", "fp32")


def test_a_folder_that_was_written_again_is_loaded_again(saved: Captioner):
    first = pickle.loads(pickle.dumps(saved))
    assert saved.stored.folder is not None
    build("squash").save(saved.stored.folder)
    new = pickle.loads(pickle.dumps(captioner.load(saved.stored.folder)))
    assert new is not first
    assert new.engine.preprocessing.resize == "squash"


def _change_search(model: Captioner) -> None:
    model.stored.search = replace(model.stored.search, beam_size=2)


def _change_info(model: Captioner) -> None:
    model.info["scores"] = 1


@torch.no_grad()
def _change_weights(model: Captioner) -> None:
    model.model.decoder.word_output.bias.add_(1)


@pytest.mark.parametrize("change", [_change_search, _change_info, _change_weights])
def test_a_model_that_was_changed_in_memory_is_not_pickled(
    saved: Captioner, change: Callable[[Captioner], None]
):
    pickle.dumps(saved)
    change(saved)
    with pytest.raises(ConfigError, match=r"changed after it was read from .*; save it with"):
        pickle.dumps(saved)


def test_a_model_without_a_folder_is_not_pickled(saved: Captioner):
    assert saved.stored.folder is not None
    shutil.rmtree(saved.stored.folder)
    with pytest.raises(ModelError, match=r"its folder .* no longer exists"):
        pickle.dumps(saved)
    with pytest.raises(ConfigError, match=r"it was never saved; save it with"):
        pickle.dumps(build())


def test_a_pickled_model_that_has_vanished_is_one_line(saved: Captioner):
    sent = pickle.dumps(saved)
    assert saved.stored.folder is not None
    shutil.rmtree(saved.stored.folder)
    _load.cache_clear()
    with pytest.raises(ModelError, match="does not exist"):
        pickle.loads(sent)


@torch.no_grad()
def test_a_deep_copy_is_independent(photos: list[Path]):
    """Of a model that is in memory only; a shallow copy shares the network."""
    model = build()
    before = model.caption(photos[0]).log_prob
    deep, shallow = copy.deepcopy(model), copy.copy(model)
    deep.model.decoder.word_output.bias.add_(torch.arange(12.0))
    assert deep.caption(photos[0]).log_prob != before
    assert model.caption(photos[0]).log_prob == before
    assert shallow.caption(photos[0]).log_prob == before
    assert shallow.model is model.model
