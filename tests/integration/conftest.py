"""A tiny data set and model for the commands, and a browser."""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import pickle
import secrets
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from running import PATIENCE, serve_command
from tiny_data import noise_photos, run_settings, write_captions, write_dogs
from toy_captioner import random_model

from captioner.cli.main import main
from captioner.inference.folder import save_model
from captioner.options import DecoderConfig

WORDS = ("a", "dog", "runs", "on", "grass", "the", "man", "'s", "hat")
CAPTIONS = {
    "1.png": ["A dog runs on grass.", "The dog runs."],
    "2.png": ["A man runs.", "A man's hat on the grass."],
    "3.png": ["The hat of a man.", "A hat.", "A dog's hat"],
    "4.png": ["A dog and a man on grass.", "The man runs on the grass."],
}


def write_model(folder: Path, seed: int, words: tuple[str, ...] = WORDS, **search: Any) -> Path:
    """A model with random weights: 64 pixels, a grid of 2 x 2."""
    decoder = DecoderConfig(embed_dim=5, hidden_dim=6, attention_dim=7, dropout=0.0)
    search = {"beam_size": 2, "max_length": 6} | search
    save_model(folder, random_model(seed, decoder, words, factor=4, **search))
    return folder


@pytest.fixture(scope="session")
def script() -> Callable[[str], ModuleType]:
    """``script("benchmarks/scale")``: scripts/benchmarks/scale.py as a new module."""

    def load(name: str) -> ModuleType:
        path = Path(__file__).parents[2] / "scripts" / f"{name}.py"
        if str(path.parent) not in sys.path:  # as when the script is run
            sys.path.append(str(path.parent))
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load


Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """``run("info", "--model", folder)``: a command's exit code, standard output and error."""

    def command(*arguments: object) -> tuple[int, str, str]:
        return main([str(argument) for argument in arguments]), *capsys.readouterr()

    return command


@pytest.fixture
def caption(tiny: SimpleNamespace, run: Run) -> Run:
    """``caption("photo.jpg")``: the same of ``captioner caption`` with the tiny model."""
    return lambda *arguments: run("caption", *arguments, "--model", tiny.model)


@pytest.fixture
def make_model() -> Callable[..., Path]:
    """``make_model(folder, seed, beam_size=3)``: write a model with these search options."""
    return write_model


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """Paths: ``photos``, ``captions`` and ``instances`` (COCO), ``results``, ``others``; ``model``,
    ``twin`` (same words, other weights) and ``stranger`` (other words). Do not write to them.

    The dog fills the left half of photos 1, 2 and 3; photo 4 is empty.
    """
    folder = tmp_path_factory.mktemp("tiny")
    noise_photos(folder / "photos", CAPTIONS, (40, 32))

    def write_results(name: str, *texts: str) -> Path:
        entries = [{"image_id": i, "caption": text} for i, text in enumerate(texts, 1)]
        (folder / name).write_text(json.dumps(entries))
        return folder / name

    return SimpleNamespace(
        folder=folder,
        photos=folder / "photos",
        captions=write_captions(folder / "captions.json", CAPTIONS),
        instances=write_dogs(folder / "instances.json", [*CAPTIONS], 3),
        results=write_results(
            "results.json", "a dog runs", "a man runs", "a man's hat", "the the dog on"
        ),
        others=write_results(
            "others.json", "a dog on grass", "a hat", "a man's hat", "a man on grass"
        ),
        model=write_model(folder / "model", 1),
        twin=write_model(folder / "twin", 2),
        stranger=write_model(folder / "stranger", 1, ("a", "cat")),
    )


@pytest.fixture(scope="session")
def training_settings(tiny: SimpleNamespace) -> dict[str, Any]:
    """A config for the tiny photos, without the length of the training."""
    return run_settings(tiny.captions, tiny.photos)


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., SimpleNamespace]]:
    """``serve("--option", ...)`` runs a server; see ``serve_command``."""
    with ExitStack() as servers:
        number = itertools.count()
        yield lambda *options: servers.enter_context(
            serve_command(tmp_path / f"server{next(number)}", *options)
        )


# --- object storage ---


@pytest.fixture(scope="session")
def new_bucket() -> Iterator[Callable[[pytest.MonkeyPatch], str]]:
    """``new_bucket(monkeypatch)``: the address of an empty bucket, in an S3 server of ours."""
    server, fsspec = pytest.importorskip("moto.server"), pytest.importorskip("fsspec")
    pytest.importorskip("s3fs")
    running = server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    running.start()
    host, port = running.get_host_and_port()

    def make(monkeypatch: pytest.MonkeyPatch) -> str:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
        monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        name = f"bucket-{secrets.token_hex(4)}"
        fsspec.filesystem("s3", skip_instance_cache=True).mkdir(name)
        return f"s3://{name}"

    yield make
    running.stop()


# --- Ray ---


# Ray ends the process of a driver, or of a cluster's owner, when it loses its connection. It never
# runs in the tests' own process, which would take all other tests of that process with it.
CLUSTER = """
import sys
from ray.cluster_utils import Cluster

cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
print("address", cluster.address, flush=True)
sys.stdin.read()  # until the tests close it
cluster.shutdown()
"""


@pytest.fixture(scope="module")
def ray_address() -> Iterator[str]:
    """A Ray node that serves the tests of a file; to start one takes seconds.

    With one for several files, Ray sometimes cancelled the workers of later jobs before they ran.
    """
    pytest.importorskip("ray.cluster_utils")
    with subprocess.Popen(
        [sys.executable, "-c", CLUSTER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "RAY_worker_niceness": "0"},
    ) as owner:
        assert owner.stdout is not None
        lines = iter(owner.stdout.readline, "")
        address = next(line.split()[1] for line in lines if line.startswith("address "))
        yield address
        owner.communicate(timeout=60)


@pytest.fixture
def on_ray(ray_address: str) -> Run:
    """``on_ray("caption", "photos", ...)``: a command as a process of its own, whose
    ``--engine ray`` uses that node; exit code, standard output and error. ``before`` is Python code
    that it runs first. The node's workers have the environment variables of its start.
    """

    def run(*arguments: object, before: str = "") -> tuple[int, str, str]:
        code = f"import sys\n{before}\nfrom captioner.cli.main import main\nsys.exit(main())"
        done = subprocess.run(
            [sys.executable, "-c", code, *map(str, arguments)],
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
            env=os.environ | {"RAY_ADDRESS": ray_address},
        )
        return done.returncode, done.stdout, done.stderr

    return run


@pytest.fixture
def workers_here(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Let a task process items in this process, without Ray.

    With ``stop_after`` set, the command is interrupted after this number of items.
    """
    pytest.importorskip("ray")
    from captioner.bulk import cluster

    settings = SimpleNamespace(stop_after=None)

    def run(task: Any, items: Any, _: object, **__: object) -> Iterator[Any]:
        task = pickle.loads(pickle.dumps(task))
        for number, item in enumerate(items):
            if number == settings.stop_after:
                raise KeyboardInterrupt
            yield task(item)

    monkeypatch.setattr(cluster, "cluster", lambda *_: nullcontext())
    monkeypatch.setattr(cluster, "run_on_cluster", run)
    monkeypatch.setattr("captioner.bulk.features.run_on_cluster", run)
    return settings


# --- the browser ---------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def site(tiny: SimpleNamespace, tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """The static site of the tiny model; see ``make_site``."""
    from browsing import make_site

    return make_site(tiny.model, tmp_path_factory.mktemp("site"))


@pytest.fixture
def visit(browser: Any, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """``visit(page or address, **context options)``: a tab that allows no word of complaint.

    Each beginning in ``visit.expected`` is that of a complaint which must occur.
    """
    complaints: list[str] = []
    expected: list[str] = []
    contexts = []

    def open_tab(what: Any, allowed: str = "file:", **options: Any) -> Any:
        settings: dict[str, Any] = {"reduced_motion": "reduce"} | options
        contexts.append(browser.new_context(**settings))
        tab = contexts[-1].new_page()
        tab.set_default_timeout(1000 * PATIENCE)
        tab.on("console", lambda said: complaints.append(f"console: {said.text}"))
        tab.on("pageerror", lambda error: complaints.append(f"error: {error}"))
        tab.on(
            "request",
            lambda request: (
                None
                if request.url.startswith((allowed, "data:", "blob:", "about:"))
                else complaints.append(f"request: {request.url[:80]}")
            ),
        )
        if not isinstance(what, str):
            what.save(tmp_path / "page.html")
            what = (tmp_path / "page.html").as_uri()
        tab.goto(what)
        # The site navigates once more when its service worker is ready, so its content is not read.
        if tab.url.startswith("file:") and '<main class="single">' in tab.content():
            tab.locator(".viewer").wait_for()  # it waits for the photo to be decoded
        return tab

    open_tab.complaints = complaints  # type: ignore[attr-defined]
    open_tab.expected = expected  # type: ignore[attr-defined]
    yield open_tab
    for context in contexts:
        context.close()  # only now have all messages arrived
    for beginning in expected:
        assert any(line.startswith(beginning) for line in complaints)
    assert [line for line in complaints if not line.startswith(tuple(expected))] == []
