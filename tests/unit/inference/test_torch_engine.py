"""The network run by torch: its weights, its steps, and ensembles of decoders."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_search import tasks
from table_stepper import Prefix, Table, TableStepper, assert_matches_table, random_table
from torch import nn
from toy_captioner import stored
from toy_decoder import random_decoder
from toy_encoder import randomize_norms

from captioner.data.images import open_image
from captioner.hardware import autocast
from captioner.inference.captioner import Captioner
from captioner.inference.engine import EnsembleStepper
from captioner.inference.stored_model import StoredModel
from captioner.inference.torch_engine import DecoderStepper
from captioner.options import SearchOptions
from captioner.search.search import search

B, L, D, V = 3, 4, 8, 12
OPTIONS = SearchOptions(beam_size=4, num_captions=3, max_length=5)


def test_keys_are_projected_once_and_not_copied_per_beam() -> None:
    decoder, features = random_decoder(D, V, L).eval(), torch.randn(B, L, D)
    keys, projections = [], []
    scorer = decoder.attention.scorer
    scorer.register_forward_pre_hook(lambda _, args: keys.append(args[1].shape[0]))
    scorer.key.register_forward_hook(lambda _, args, out: projections.append(out.shape))

    stepper = DecoderStepper(decoder, decoder.memory(features))
    search(stepper, OPTIONS)

    assert projections == [(B, L, 7)]  # projected once, for all steps and beams
    assert keys[0] == B
    assert keys == sorted(keys, reverse=True)
    assert stepper.memory.keys.shape[0] == stepper.memory.values.shape[0] == keys[-1]


def with_norms() -> StoredModel:
    """A model whose encoder folds norms, with random batch norm statistics."""
    model = stored(encoder="timm/tf_efficientnet_lite0", size=64)
    randomize_norms(model.model.encoder)
    return model


@pytest.mark.parametrize(("precision", "allowed"), [("fp32", 1e-5), ("bf16", 0.1)])
@torch.inference_mode()
def test_folded_norms_give_the_same_features(precision, allowed, photos: list[Path]):
    model = with_norms()
    captioner = Captioner(model, device="cpu", precision=precision)
    pixels = np.stack([captioner.prepare(open_image(photo)).pixels[0] for photo in photos])
    expected = model.model.encode(torch.from_numpy(pixels))

    with autocast(precision, captioner.device):
        found = captioner.model.encode(torch.from_numpy(pixels)).float()

    assert not any(isinstance(m, nn.BatchNorm2d) for m in captioner.model.encoder.modules())
    assert (found - expected).norm() <= allowed * expected.norm()
    assert expected.std(dim=0).mean() > 0.01  # photos differ


def test_inference_leaves_the_stored_weights_as_they_are(photos: list[Path]):
    model = with_norms()
    before = {name: tensor.clone() for name, tensor in model.model.state_dict().items()}
    learning = [parameter.requires_grad for parameter in model.model.parameters()]
    for precision in ("fp32", "bf16"):
        Captioner(model, device="cpu", precision=precision).caption(photos[0])  # type: ignore[arg-type]
    after = model.model.state_dict()
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert torch.equal(tensor, after[name]), name
        assert tensor.dtype == after[name].dtype
    assert learning == [parameter.requires_grad for parameter in model.model.parameters()]


# --- Ensembles -----------------------------------------------------------------------------------


def mean_table(*tables: Table) -> Table:
    """Mean probability of several tables, in double precision."""

    @cache
    def table(prefix: Prefix) -> np.ndarray:
        with np.errstate(divide="ignore"):
            mean = np.mean([np.exp(one(prefix).astype(np.float64)) for one in tables], axis=0)
            return np.log(mean).astype(np.float32)

    return table


@settings(max_examples=80)
@given(data=st.data(), seed=st.integers(0, 10_000), vocabulary=st.integers(2, 5))
def test_ensemble_equals_search_over_the_mean_table(data, seed, vocabulary) -> None:
    """Fails if ``reorder`` or ``keep`` misses a member: its prefixes would be wrong."""
    task = data.draw(tasks(vocabulary, ("beam", "forced")))
    photos, count = data.draw(st.integers(1, 3)), data.draw(st.integers(2, 3))
    tables = [
        [random_table(1000 * member + seed + photo, vocabulary, 0.3) for photo in range(photos)]
        for member in range(count)
    ]
    members = [TableStepper(own) for own in tables]

    together = search(EnsembleStepper(members, one_grid=True), *task)

    means = [mean_table(*own) for own in zip(*tables, strict=True)]
    alone = TableStepper(means)
    for mean, found, expected in zip(means, together, search(alone, *task), strict=True):
        assert [(h.tokens, h.ended) for h in found] == [(h.tokens, h.ended) for h in expected]
        for hypothesis in found:
            assert_matches_table(hypothesis, mean, tolerance=1e-6)
    assert all(member.kept == alone.kept for member in members)
