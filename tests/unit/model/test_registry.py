"""Test the registration of scorers and encoders, and the errors for missing ones."""

from __future__ import annotations

from importlib.metadata import EntryPoint, EntryPoints
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from captioner import register_encoder, register_scorer
from captioner.errors import ConfigError
from captioner.model.attention import Scorer, Sizes
from captioner.model.backbones import ENCODERS
from captioner.model.build import SCORERS, build_attention
from captioner.model.encoder import Encoder
from captioner.model.registry import Registry, what_is_missing
from captioner.options import DecoderConfig


class MyScorer(Scorer):
    """A scorer that returns the same score for all regions."""

    def forward(self, query: Tensor, keys: Tensor) -> Tensor:
        return keys.sum(-1).unsqueeze(1).expand(-1, query.shape[1], -1)


class Patches(nn.Module):
    """An encoder with one region per 8 x 8 pixels."""

    mean = (0.4, 0.5, 0.6)

    def __init__(self, pretrained: bool = False) -> None:
        super().__init__()
        self.pretrained = pretrained
        self.project = nn.Conv2d(3, 6, 8, stride=8)

    def forward(self, images: Tensor) -> Tensor:
        return self.project(images)


@pytest.fixture(autouse=True)
def _empty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SCORERS, "_registered", {})
    monkeypatch.setattr(ENCODERS, "_registered", {})


def test_registered_names_are_found() -> None:
    register_scorer("mine", MyScorer)
    register_scorer("mine", MyScorer)  # as when a notebook cell is run twice
    with pytest.raises(ConfigError, match=r"'mine' is .* registered already"):
        register_scorer("mine", type("Other", (MyScorer,), {}))

    assert SCORERS["mine"] is MyScorer
    assert list(SCORERS)[-1] == "mine"
    assert SCORERS.provider("mine") == {"kind": "scorer", "name": "mine", "module": __name__}
    assert SCORERS.provider("dot") is SCORERS.provider("unknown") is None


def test_a_registered_encoder_can_be_used() -> None:
    register_encoder("patches", Patches)

    encoder = Encoder("patches", pretrained=True)

    features, grid = encoder(torch.zeros(2, 3, 32, 24))
    assert (features.shape, grid) == ((2, 12, 6), (4, 3))
    assert encoder.mean == (0.4, 0.5, 0.6)
    assert encoder.backbone.pretrained is True
    assert encoder.stages() == ["project"]


@pytest.mark.parametrize(
    ("register", "expected"),
    [
        (lambda: register_scorer("dot", MyScorer), "scorer 'dot' is built in"),
        (lambda: register_scorer("fixed", MyScorer), "scorer 'fixed' is built in"),
        (lambda: register_scorer("a b", MyScorer), "scorer name 'a b' is invalid; use letters"),
        (lambda: register_scorer(5, MyScorer), "scorer name 5 is invalid"),
        (lambda: register_encoder("resnet18", Patches), "'resnet18' is a torchvision"),
        (lambda: register_encoder("timm/mine", Patches), "'timm/mine' is invalid"),
    ],
)
def test_what_cannot_be_registered(register: Any, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected) as caught:
        register()
    assert "\n" not in str(caught.value)


class Flat(Scorer):
    """A scorer that forgets the axis of captions."""

    def forward(self, query: Tensor, keys: Tensor) -> Tensor:
        return keys.sum(-1)


class NoForward(Scorer):
    """A class that is not a scorer."""


@pytest.mark.parametrize(
    ("scorer", "expected"),
    [
        (Flat, r"Flat returns scores of shape \(2, 4\); return \(B, R, L\), here \(2, 3, 4\)"),
        (NoForward, r"scorer NoForward fails .*query \(2, 3, 6\) \(NotImplementedError"),
    ],
)
def test_scores_of_another_shape_are_refused(scorer: type[Scorer], expected: str) -> None:
    register_scorer("mine", scorer)
    with pytest.raises(ConfigError, match=expected):
        build_attention(DecoderConfig(attention="mine"), Sizes(5, 6, 7, 4))


@pytest.mark.parametrize(
    ("build", "expected"),
    [
        (nn.Identity, None),  # without weights
        (nn.ReLU, "cannot be built with pretrained=False .*unexpected keyword"),
        (Patches(), "cannot be built with pretrained=False .*unexpected keyword"),
        (lambda pretrained: nn.Flatten(), r"a tensor of shape \(1, 192\), not a feature grid"),
        (lambda pretrained: nn.Flatten(1, 2), "24 tokens, which do not form a square"),
    ],
)
def test_what_a_registered_encoder_returns(build: Any, expected: str | None) -> None:
    register_encoder("mine", build)
    if expected is None:
        assert Encoder("mine").measure(8) == (3, (8, 8))
        return
    with pytest.raises(ConfigError, match=expected):
        Encoder("mine").measure(8)


def points_of(monkeypatch: pytest.MonkeyPatch, *values: tuple[str, str]) -> Registry[Any]:
    """Return a registry that finds these names and values as entry points."""
    found = EntryPoints(EntryPoint(name, value, "captioner.scorers") for name, value in values)
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: found.select(group=group))
    return Registry("scorer", {"dot": nn.Linear})


def test_entry_points_are_found_after_built_in_names(monkeypatch) -> None:
    registry = points_of(monkeypatch, ("dot", "nowhere:A"), ("mine", f"{__name__}:MyScorer"))

    assert list(registry) == ["dot", "mine"]
    assert len(registry) == 2
    assert registry["mine"] is MyScorer
    assert registry["dot"] is nn.Linear


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (["no_such_module:A"], r"'mine' cannot .*_module:A .ModuleNotFoundError"),
        (["torch.nn:Linear"], r"'mine' is .*Linear.*; register a subclass of"),
    ],
)
def test_entry_points_that_cannot_be_used(monkeypatch, values: list[str], expected: str) -> None:
    points_of(monkeypatch, *(("mine", value) for value in values))
    with pytest.raises(ConfigError, match=expected):
        build_attention(DecoderConfig(attention="mine"), Sizes(5, 6, 7, 4))


RECORD = {"kind": "scorer", "name": "mine", "module": "my_scorers"}


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        (
            {**RECORD, "package": "my-pkg"},
            "the scorer mine of the package my-pkg; run: pip install",
        ),
        (
            {**RECORD, "package": "torch"},
            "which my_scorers registers; in Python import my_scorers first, for commands install",
        ),
        (
            RECORD,
            "which my_scorers registers; in Python import my_scorers first, for commands install",
        ),
        ({**RECORD, "module": "__main__"}, "call captioner.register_scorer('mine', ...) first"),
        ({**RECORD, "package": "x; rm -rf /", "module": "\x1b[2J"}, "call captioner.register_scor"),
    ],
)
def test_errors_for_missing_entries_name_the_remedy(record: dict[str, str], expected: str) -> None:
    assert expected in what_is_missing(record)
