"""Fixtures shared by all tests, the three test tiers, and packages that may be missing.

``pytest`` runs the quick tests, ``pytest --slow`` the slow ones as well (as CI does), and
``pytest --stress`` adds soak, kill and fuzz tests. Tests whose packages are not installed are
skipped, except in CI.
"""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Tests run in parallel and some start processes, so more threads would only compete for cores. Set
# before torch is imported, and inherited by the processes.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Run on the CPU on every machine: device "auto" would select a GPU.
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

import pytest
import torch
from hypothesis import settings
from optional_packages import skip_if_missing, summarize_missing
from running import PATIENCE, static_server

from captioner.inference.stored_model import StoredModel
from captioner.model.caption_model import CaptionModel
from captioner.model.encoder import Encoder
from captioner.model.preprocessing import Preprocessing
from captioner.options import DecoderConfig, SearchOptions
from captioner.text.vocabulary import Vocabulary

pytest.register_assert_rewrite("table_stepper", "toy_captioner")
# fsync protects against power loss, which no test simulates.
os.fsync = lambda descriptor: None
torch.set_num_threads(1)  # the tests' tensors are so small that threads only cost time
# Make precision "auto" mean fp32 on every machine; tests of bf16 request it explicitly.
_capabilities = getattr(torch.cpu, "get_capabilities", dict)  # torch >= 2.12
torch.cpu.get_capabilities = lambda: {
    **_capabilities(),
    "amx_bf16": False,
    "avx512_bf16": False,
}
# The same examples on every run and machine, without deadlines.
settings.register_profile("captioner", deadline=None, derandomize=True, database=None)
settings.load_profile("captioner")

WEB = Path(__file__).parents[1] / "captioner" / "serving" / "site" / "web"
"""The site's own JavaScript."""
WORDS = ("a", "dog", "runs", "on", "grass", "the", "man", "'s", "hat")

# --- the three tiers -----------------------------------------------------------------------------

TIERS = {"slow": "--slow", "stress": "--stress"}
"""Marker and option of each tier; tests without a marker always run."""
NOT_RUN: dict[str, int] = {}
"""Number of deselected tests by tier."""


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("captioner")
    group.addoption("--slow", action="store_true", help="also run the slow tests")
    group.addoption(
        "--stress", action="store_true", help="also run the stress tests: soak, kill and fuzz"
    )


def tier_of(item: pytest.Item) -> str | None:
    """Return the marker of the test's tier; stress takes precedence."""
    return next((tier for tier in reversed(TIERS) if item.get_closest_marker(tier)), None)


@pytest.hookimpl(trylast=True)  # after -k and -m: what they exclude is not counted
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    tiers = {item: tier_of(item) for item in items}
    deselected = [
        item for item, tier in tiers.items() if tier and not config.getoption(TIERS[tier])
    ]
    if deselected:
        config.hook.pytest_deselected(items=deselected)
        items[:] = [item for item in items if item not in deselected]
    NOT_RUN.update(Counter(str(tiers[item]) for item in deselected))
    # Under xdist only the workers collect: they send the counts to the process that reports.
    getattr(config, "workeroutput", {})["not_run"] = NOT_RUN


@pytest.hookimpl(optionalhook=True)  # a hook of xdist
def pytest_testnodedown(node: Any) -> None:
    NOT_RUN.update(getattr(node, "workeroutput", {}).get("not_run", {}))  # equal in all workers


def pytest_terminal_summary(terminalreporter: Any) -> None:
    for tier, count in sorted(NOT_RUN.items()):
        tests = "test" if count == 1 else "tests"
        terminalreporter.write_line(f"{count} {tier} {tests} not run: add {TIERS[tier]}")
    summarize_missing(terminalreporter)


# --- packages that .[dev] does not install -------------------------------------------------------


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Any:
    report = yield
    return skip_if_missing(report, getattr(report, "call", None), collector.path, 0)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: Any) -> Any:
    report = yield
    return skip_if_missing(report, call, item.path, item.location[1] or 0)


# --- fixtures ------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _seed() -> None:
    # torch.manual_seed also seeds accelerators, and without one records the stack for later, which
    # takes milliseconds before each of thousands of tests.
    torch.default_generator.manual_seed(0)


@pytest.fixture
def vocabulary() -> Vocabulary:
    return Vocabulary(WORDS)


@pytest.fixture
def tiny_config() -> DecoderConfig:
    """Sizes that all differ, so that a swapped axis fails."""
    return DecoderConfig(embed_dim=5, hidden_dim=6, attention_dim=7, dropout=0.0)


@pytest.fixture
def tiny_model(vocabulary: Vocabulary, tiny_config: DecoderConfig) -> CaptionModel:
    """A complete model with random weights in eval mode: 64 pixels, a grid of 2 x 2, D = 96."""
    preprocessing = Preprocessing(image_size=64)
    encoder = Encoder("timm/test_resnet")
    return CaptionModel(encoder, tiny_config, preprocessing, len(vocabulary)).eval()


@pytest.fixture
def stored_model(
    tiny_model: CaptionModel, tiny_config: DecoderConfig, vocabulary: Vocabulary
) -> StoredModel:
    """The tiny model with everything that a model folder contains."""
    search = SearchOptions(beam_size=2, max_length=4)
    return StoredModel(tiny_model, tiny_config, vocabulary, search, {"dataset": "none"})


# --- the browser ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Headless Chromium; where it is missing the test is left out, but not in CI."""
    from playwright.sync_api import expect, sync_playwright

    expect.set_options(timeout=1000 * PATIENCE)
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        assert not os.environ.get("CI"), "CI has no Chromium; .ci/run installs it"
        pytest.skip("Chromium is not installed (apt-get install chromium)")
    with sync_playwright() as playwright:
        # CI runs as root, for whom Chromium has no sandbox of its own.
        made = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield made
        made.close()


@pytest.fixture(scope="module")
def javascript(browser: Any) -> Iterator[Any]:
    """A tab that can import the site's modules: ``await import("/search.js")``."""
    with static_server(WEB) as address:
        tab = browser.new_page()
        tab.goto(f"{address}search.js")
        yield tab
