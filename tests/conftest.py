"""Fixtures shared by all tests, and the three tiers of the suite.

``pytest`` runs the quick tests, ``pytest --slow`` the slow ones as well (as CI does), and
``pytest --stress`` adds soak, kill and fuzz tests.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from typing import Any

# Two tests run at a time, and some start processes: on two cores more threads only wait for each
# other. Before torch is imported, and for the processes too.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# On the CPU on every machine: device "auto" would take a GPU.
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

import pytest
import torch
from hypothesis import settings

from captioner.config import DecoderConfig, SearchOptions
from captioner.data.preprocessing import Preprocessing
from captioner.model_folder import StoredModel
from captioner.models.captioner import CaptionModel
from captioner.models.encoder import Encoder
from captioner.vocabulary import Vocabulary

# fsync guards against a loss of power, which no test simulates.
os.fsync = lambda descriptor: None
torch.set_num_threads(1)  # the tests' tensors are so small that threads only cost time
# Precision "auto" is fp32 on every machine; a test of bf16 gives bf16.
_capabilities = getattr(torch.cpu, "get_capabilities", dict)  # torch >= 2.12
torch.cpu.get_capabilities = lambda: {**_capabilities(), "amx_bf16": False}
# The same examples on every run and every machine, however long one takes.
settings.register_profile("captioner", deadline=None, derandomize=True, database=None)
settings.load_profile("captioner")

WORDS = ("a", "dog", "runs", "on", "grass", "the", "man", "'s", "hat")

# --- the three tiers -----------------------------------------------------------------------------

TIERS = {"slow": "--slow", "stress": "--stress"}
"""The marker of a tier and the option that adds it; a test without either marker always runs."""
NOT_RUN = pytest.StashKey[Counter[str]]()
"""How many tests of each tier were left out."""


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("captioner")
    group.addoption("--slow", action="store_true", help="also run the slow tests")
    group.addoption(
        "--stress", action="store_true", help="also run the stress tests: soak, kill and fuzz"
    )


def tier_of(item: pytest.Item) -> str | None:
    """Return the marker of the test's tier: stress if it has both."""
    return next((tier for tier in reversed(TIERS) if item.get_closest_marker(tier)), None)


@pytest.hookimpl(trylast=True)  # after -k and -m: what they exclude is not counted
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    kept, left_out = [], []
    for item in items:
        tier = tier_of(item)
        (kept if tier is None or config.getoption(TIERS[tier]) else left_out).append(item)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = kept
    config.stash[NOT_RUN] = Counter(tier_of(item) for item in left_out)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Under xdist only the workers collect: send the counts to the process that reports."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["not_run"] = dict(session.config.stash.get(NOT_RUN, {}))


@pytest.hookimpl(optionalhook=True)  # a hook of xdist
def pytest_testnodedown(node: Any) -> None:
    not_run = getattr(node, "workeroutput", {}).get("not_run")
    if not_run is not None:  # every worker collects the same tests
        node.config.stash[NOT_RUN] = Counter(not_run)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    for tier, count in sorted(config.stash.get(NOT_RUN, Counter()).items()):
        tests = "test" if count == 1 else "tests"
        terminalreporter.write_line(f"{count} {tier} {tests} not run: add {TIERS[tier]}")


# --- fixtures ------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _seed() -> None:
    # torch.manual_seed also seeds accelerators, and without one records the stack for later:
    # milliseconds, before each of thousands of tests.
    torch.default_generator.manual_seed(0)


class Concurrency:
    """``with concurrency: ...`` in several threads: ``most`` of them were inside at a time."""

    def __init__(self) -> None:
        self.most = 0
        self._inside = 0
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        with self._lock:
            self._inside += 1
            self.most = max(self.most, self._inside)

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1


@pytest.fixture
def concurrency() -> Concurrency:
    return Concurrency()


@pytest.fixture
def vocabulary() -> Vocabulary:
    return Vocabulary(WORDS)


@pytest.fixture
def tiny_config() -> DecoderConfig:
    """Sizes that all differ, so that a swapped axis cannot pass."""
    return DecoderConfig(embed_dim=5, hidden_dim=6, attention_dim=7, dropout=0.0)


@pytest.fixture
def tiny_model(vocabulary: Vocabulary, tiny_config: DecoderConfig) -> CaptionModel:
    """A whole model with random weights in eval mode: 64 pixels, a grid of 2 x 2, D = 96."""
    preprocessing = Preprocessing(image_size=64)
    encoder = Encoder("timm/test_resnet")
    return CaptionModel(encoder, tiny_config, preprocessing, len(vocabulary)).eval()


@pytest.fixture
def stored_model(
    tiny_model: CaptionModel, tiny_config: DecoderConfig, vocabulary: Vocabulary
) -> StoredModel:
    """The tiny model with all that a model folder holds."""
    search = SearchOptions(beam_size=2, max_length=4)
    return StoredModel(tiny_model, tiny_config, vocabulary, search, {"dataset": "none"})
