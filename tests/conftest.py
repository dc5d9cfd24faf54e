"""Fixtures shared by all tests, and the three test tiers.

``pytest`` runs the quick tests, ``pytest --slow`` the slow ones as well (as CI does), and
``pytest --stress`` adds soak, kill and fuzz tests.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
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

from captioner.inference.folder import StoredModel
from captioner.model.captioner import CaptionModel
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
NOT_RUN = pytest.StashKey[Counter[str]]()
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
    kept, deselected = [], []
    for item in items:
        tier = tier_of(item)
        (kept if tier is None or config.getoption(TIERS[tier]) else deselected).append(item)
    if deselected:
        config.hook.pytest_deselected(items=deselected)
        items[:] = kept
    config.stash[NOT_RUN] = Counter(tier_of(item) for item in deselected)


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
    # torch.manual_seed also seeds accelerators, and without one records the stack for later, which
    # takes milliseconds before each of thousands of tests.
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


@pytest.fixture(scope="session")
def patience() -> float:
    """Milliseconds until a test that waits for the page gives up."""
    return 60_000


@pytest.fixture(scope="module")
def browser(patience: float) -> Iterator[Any]:
    """Headless Chromium; where it is missing the test is left out, but not in CI."""
    from playwright.sync_api import expect, sync_playwright

    expect.set_options(timeout=patience)
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        assert not os.environ.get("CI"), "CI has no Chromium; .ci/run installs it"
        pytest.skip("Chromium is not installed (apt-get install chromium)")
    with sync_playwright() as playwright:
        # CI runs as root, for whom Chromium has no sandbox of its own.
        made = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield made
        made.close()


@contextmanager
def _static_server(folder: Path) -> Iterator[str]:
    """A plain static file server, like ``python -m http.server``: its address."""

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture(scope="session")
def static_server() -> Callable[[Path], AbstractContextManager[str]]:
    """``with static_server(folder) as address``: a plain static file server."""
    return _static_server


@pytest.fixture
def serve_folder() -> Iterator[Callable[[Path], str]]:
    """``serve_folder(folder)``: the address of a static file server, until the test ends."""
    with ExitStack() as servers:
        yield lambda folder: servers.enter_context(_static_server(folder))


@pytest.fixture(scope="module")
def javascript(browser: Any) -> Iterator[Any]:
    """A tab that can import the site's modules: ``await import("/search.js")``."""
    with _static_server(WEB) as address:
        tab = browser.new_page()
        tab.goto(f"{address}search.js")
        yield tab
