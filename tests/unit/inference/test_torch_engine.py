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
from table_stepper import (
    Prefix,
    Table,
    TableStepper,
    random_table,
)
from torch import nn
from toy_captioner import stored
from toy_encoder import randomize_norms

from captioner.data.images import open_image
from captioner.hardware import autocast
from captioner.inference.captioner import Captioner
from captioner.inference.folder import StoredModel
from captioner.inference.torch_engine import DecoderStepper
from captioner.model.build import build_decoder
from captioner.model.decoder import Decoder
from captioner.options import DecoderConfig, SearchOptions
from captioner.search.ensemble import EnsembleStepper, mean_probability
from captioner.search.search import Hypothesis, search
from captioner.text.vocabulary import END, PAD, START, UNKNOWN

B, L, D, V = 3, 4, 8, 12
OPTIONS = SearchOptions(beam_size=4, num_captions=3, max_length=5)


def build(config: DecoderConfig, regions: int = L) -> Decoder:
    new = build_decoder(config, D, V, regions).eval()
    with torch.no_grad():
        for parameter in new.parameters():
            parameter.normal_()
        # Make the special tokens likely: the search must exclude them whatever the weights.
        new.word_output.bias[[PAD, START, UNKNOWN]] += 3
        new.word_output.bias[END] += 2  # some sentences end, others are truncated
    return new


@pytest.fixture
def decoder(tiny_config: DecoderConfig) -> Decoder:
    return build(tiny_config)


@pytest.fixture
def features() -> torch.Tensor:
    return torch.randn(B, L, D)


def stepper_for(decoder: Decoder, features: torch.Tensor) -> DecoderStepper:
    return DecoderStepper(decoder, decoder.memory(features))


@torch.no_grad()
def test_step_forbids_only_the_special_tokens(decoder, features) -> None:
    stepper = stepper_for(decoder, features)

    advance = stepper.advance(torch.full((B, 1), START))

    forbidden = advance.log_probs.isneginf()
    assert forbidden.sum(dim=-1).tolist() == [[3]] * B
    assert forbidden[..., [PAD, START, UNKNOWN]].all()
    assert advance.alphas.shape == (B, 1, L)
    assert advance.gates.shape == (B, 1)


def test_keys_are_projected_once_and_not_copied_per_beam(decoder, features) -> None:
    keys, projections = [], []
    scorer = decoder.attention.scorer
    scorer.register_forward_pre_hook(lambda _, args: keys.append(args[1].shape[0]))
    scorer.key.register_forward_hook(lambda _, args, out: projections.append(out.shape))

    stepper = stepper_for(decoder, features)
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


def assert_close(one: list[list[Hypothesis]], other: list[list[Hypothesis]]) -> None:
    for left, right in zip(one, other, strict=True):
        assert [h.tokens for h in left] == [h.tokens for h in right]
        assert [h.ended for h in left] == [h.ended for h in right]
        for a, b in zip(left, right, strict=True):
            torch.testing.assert_close(a.token_log_probs, b.token_log_probs)
            torch.testing.assert_close(a.alphas, b.alphas)
            torch.testing.assert_close(a.gates, b.gates)
            assert a.log_prob == pytest.approx(b.log_prob, rel=1e-4, abs=1e-5)


def mean_table(*tables: Table) -> Table:
    """Mean probability of several tables, in double precision."""

    @cache
    def table(prefix: Prefix) -> np.ndarray:
        with np.errstate(divide="ignore"):
            mean = np.mean([np.exp(one(prefix).astype(np.float64)) for one in tables], axis=0)
            return np.log(mean).astype(np.float32)

    return table


class TableEnsemble(EnsembleStepper):
    """An ensemble of table steppers, with their start and end tokens."""

    start_token, end_token = TableStepper.start_token, TableStepper.end_token


def test_mean_is_over_probabilities() -> None:
    one = torch.tensor([[0.5, 0.25, 0.25, 0.0]]).log()
    other = torch.tensor([[0.1, 0.05, 0.85, 0.0]]).log()

    mean = mean_probability([one, other])

    torch.testing.assert_close(mean.exp(), torch.tensor([[0.3, 0.15, 0.55, 0.0]]))
    assert mean[0, 3] == -torch.inf  # not NaN
    assert torch.equal(mean_probability([one]), one)
    torch.testing.assert_close(mean_probability([one, one, one]), one)


@settings(max_examples=80)
@given(data=st.data(), seed=st.integers(0, 10_000), vocabulary=st.integers(2, 5))
def test_ensemble_equals_search_over_the_mean_table(data, seed, vocabulary) -> None:
    """Fails if ``reorder`` or ``keep`` misses a member: its prefixes would be wrong."""
    task = data.draw(tasks(vocabulary, ("beam", "forced")))
    photos, count = data.draw(st.integers(1, 3)), data.draw(st.integers(2, 3))
    tables = [
        [random_table(1000 * member + seed + photo, vocabulary) for photo in range(photos)]
        for member in range(count)
    ]
    members = [TableStepper(own) for own in tables]

    together = search(TableEnsemble(members, one_grid=True), *task)

    alone = TableStepper([mean_table(*own) for own in zip(*tables, strict=True)])
    assert_close(together, search(alone, *task))
    assert all(member.kept == alone.kept for member in members)
