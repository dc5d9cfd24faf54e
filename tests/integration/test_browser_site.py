"""Features that only the static site has (``captioner export --web``), in headless Chromium.

Tested are the models that it runs in JavaScript, offline use, threads, privacy and the GPU. All
other features are tested in test_browser_page.py. Every test fails if the page sends a request to
another host or logs an error.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from browsing import assert_as_python, make_site, results, runtime
from PIL import Image
from playwright.sync_api import Page as Tab
from playwright.sync_api import expect
from running import static_server
from toy_captioner import add_reading, mean_colours, random_model, toy_calibrator

from captioner import load
from captioner.data.colour import _cicp_profile
from captioner.inference.folder import save_model
from captioner.inference.names import SHIPPED_MODEL
from captioner.model.caption_model import CaptionModel
from captioner.model.preprocessing import Preprocessing
from captioner.options import DecoderConfig
from captioner.search.grammar import Grammar
from captioner.serving.site.writer import write_site

pytestmark = pytest.mark.slow

WORDS = ("a", "dog", "runs", "on", "grass", "the", "man", "'s", "hat")
ASSETS = Path(__file__).parents[2] / "assets" / "examples"


@pytest.fixture
def open_site(visit) -> Iterator[Callable[..., Tab]]:
    """``open_site(folder, **context options)``: a tab where the model is loaded."""
    with ExitStack() as servers:

        def opened(folder: Path, **options: Any) -> Tab:
            address = servers.enter_context(static_server(folder))
            tab = visit(address, allowed=address, **options)
            expect(tab.locator(".device")).to_contain_text("Ready")
            return tab

        yield opened


def ready_offline(tab: Tab) -> None:
    tab.locator(".device[data-offline='true']").wait_for()


# --- captions ------------------------------------------------------------------------------------


def test_photos_of_many_kinds(site, tiny, open_site, tmp_path) -> None:
    """EXIF orientation, colour profiles, transparency, palettes, grey, JPEG, a very large photo."""
    photo = Image.open(tiny.photos / "3.png")
    exif = Image.Exif()
    exif[0x0112] = 6
    large = Image.open(ASSETS / "chelsea.jpg")
    made = {
        "turned.jpg": lambda path: large.save(path, exif=exif, quality=95),
        "clear.png": lambda path: photo.convert("RGBA").rotate(30, expand=True).save(path),
        "palette.gif": lambda path: photo.convert("P").save(path),
        "grey.png": lambda path: photo.convert("L").save(path),
        "large.jpg": lambda path: large.resize((1900, 1300)).save(path, quality=90),
        "phone.png": lambda path: photo.save(path, icc_profile=_cicp_profile(12, 13)),  # Display P3
    }
    photos = [tmp_path / name for name in made]
    for path, save in zip(photos, made.values(), strict=True):
        save(path)
    tab = open_site(site.folder)

    for one, path in zip(results(tab, *photos), photos, strict=True):
        caption = site.model.caption(path)
        assert one["text"] == caption.text, path.name
        # JPEG decoders round differently.
        assert one["log_prob"] == pytest.approx(caption.log_prob, abs=0.05), path.name


# --- other models --------------------------------------------------------------------------------


def other_site(parent: Path) -> SimpleNamespace:
    """A site with a calibrated model that differs in styles, inputs and states.

    It sees the middle of a photo, in BGR. It reads photos, and leaves out doubtful words.
    """
    sizes = {"embed_dim": 5, "hidden_dim": 6, "projection_dim": 6, "dropout": 0.0}
    config = DecoderConfig(**sizes, attention="dot", order="luong")
    preprocessing = Preprocessing(image_size=64, resize="crop", channel_order="BGR")
    search = {
        "block_ngrams": 2, "guard_endings": True, "max_length": 6,
        "certainty": 0.5, "keywords": 3,
    }  # fmt: skip
    stored = random_model(
        3, config, WORDS, ("plain", "loud"), factor=3, preprocessing=preprocessing, beam_size=3,
        **search,
    )  # fmt: skip
    add_reading(stored, "dog", "run", "man", "hat")
    captions = ("a dog runs on the grass", "the man 's hat", "a man", "a dog")
    tokens = [stored.vocabulary.encode(caption.split()) for caption in captions]
    stored.grammar = Grammar.count(tokens * 20, stored.vocabulary)
    kinds = np.append(np.linspace(-0.3, 0.3, 6), 1).astype(np.float32)
    stored.calibrator = toy_calibrator(stored.search, kinds=kinds)
    save_model(parent / "model", stored)
    return make_site(parent / "model", parent)


def test_another_model_with_styles(tiny, open_site, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(CaptionModel, "encode", mean_colours)
    made = other_site(tmp_path)
    photos = sorted(tiny.photos.iterdir())
    tab = open_site(made.folder)
    found = results(tab, *photos)
    assert_as_python(found, made.model, photos)
    assert any("left_out" in one for one in found)

    tab.get_by_label("style").select_option("loud")

    expect(tab.locator(".count")).to_have_text("4 of 4 captioned")
    for card, photo in zip(tab.locator(".card .text").all(), photos, strict=True):
        expect(card).to_contain_text(made.model.caption(photo, style="loud").text)
    loud = made.model.caption(photos[0], style="loud")
    expect(tab.locator(".total")).to_contain_text(f"log p {loud.log_prob:.1f}")


def test_the_shipped_model_in_8_bits(open_site, tmp_path) -> None:
    """The captions of the shipped model match Python, and the first visit loads few megabytes."""
    photos = sorted(ASSETS.glob("*.jpg"))
    written = write_site(SHIPPED_MODEL, tmp_path / "site", runtime())
    tab = open_site(tmp_path / "site")

    # An activation between two of its 256 values may be rounded up in one runtime and down in the
    # other, so captions that are almost equally good can change places.
    texts = [one["text"] for one in results(tab, *photos)]
    expected = [caption.text for caption in load().caption(photos)]
    same = sum(one == other for one, other in zip(texts, expected, strict=True))
    assert same >= len(photos) / 2, (texts, expected)
    assert written.first_load < 25


# --- without a network ---------------------------------------------------------------------------


def test_it_works_without_a_network(site, tiny, visit) -> None:
    """With several threads, and in a subfolder of its host, as on GitHub Pages."""
    photos = sorted(tiny.photos.iterdir())
    with static_server(site.folder.parent) as address:
        tab = visit(f"{address}site/?threads=2", allowed=address)
        ready_offline(tab)
        expect(tab.locator(".device")).to_contain_text("CPU, 2 threads")
        assert tab.evaluate("crossOriginIsolated")  # the page was loaded again for threads
    tab.context.set_offline(True)

    assert_as_python(results(tab, *photos), site.model, photos)

    tab.reload()
    ready_offline(tab)
    assert_as_python(results(tab, *photos), site.model, photos)


def test_a_new_version_replaces_the_old_one_as_a_whole(site, tiny, visit, tmp_path) -> None:
    """Open tabs keep the old version. The next visit has the new one, also without a network."""
    served, newer = tmp_path / "served", tmp_path / "newer"
    shutil.copytree(site.folder, served)
    shutil.copytree(site.exported, newer)
    config = (newer / "config.json").read_text().replace('"dog"', '"cat"').replace('"a"', '"one"')
    (newer / "config.json").write_text(config)
    write_site(newer, tmp_path / "new site", runtime())
    photo = tiny.photos / "1.png"
    with static_server(served) as address:
        tab = visit(address, allowed=address)
        ready_offline(tab)
        shutil.rmtree(served)
        shutil.copytree(tmp_path / "new site", served)

        tab.reload()
        ready_offline(tab)
        assert_as_python(results(tab, photo), site.model, [photo])
        tab.evaluate(
            """async () => {
                const registration = await navigator.serviceWorker.getRegistration();
                await registration.update();
                while (!registration.waiting) await new Promise((wake) => setTimeout(wake, 50));
            }"""
        )
        context = tab.context
        tab.close()
    again = context.new_page()
    again.goto(address)
    ready_offline(again)
    assert_as_python(results(again, photo), load(newer), [photo])


# --- privacy -------------------------------------------------------------------------------------


@pytest.mark.parametrize("service_workers", ["allow", "block"])
def test_nothing_can_be_sent_to_another_host(site, tiny, open_site, visit, service_workers) -> None:
    """This also holds without a service worker, when the model runs in one thread."""
    tab = open_site(site.folder, service_workers=service_workers)
    send = """() => fetch("http://127.0.0.1:9/", {method: "POST", body: "photo", mode: "no-cors"})
        .then(() => "sent", () => "refused")"""

    (worker,) = tab.workers
    assert worker.evaluate(send) == tab.evaluate(send) == "refused"

    refusals = [line for line in visit.complaints if "Content Security Policy" in line]
    assert len(refusals) >= 2  # of the page and of its worker, as the browser reports them
    blocked = "console: Service Worker registration blocked by Playwright"
    visit.complaints[:] = [one for one in visit.complaints if one not in (*refusals, blocked)]
    if service_workers == "block":
        assert not tab.evaluate("crossOriginIsolated")
        expect(tab.locator(".device")).to_contain_text("Ready. The model runs on the CPU.")
        photo = tiny.photos / "1.png"
        assert_as_python(results(tab, photo), site.model, [photo])


# --- the GPU ------------------------------------------------------------------------------------


def test_the_gpu_loads_its_runtime_on_demand(site, tiny, browser) -> None:
    """Uses Chromium's own software GPU, if Chromium has one."""
    flags = ["--enable-unsafe-webgpu", "--use-webgpu-adapter=swiftshader", "--no-sandbox"]
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    with (
        static_server(site.folder) as address,
        browser.browser_type.launch(executable_path=chromium, args=flags) as with_gpu,
    ):
        tab = with_gpu.new_page()
        loaded: list[str] = []
        tab.context.on("request", lambda request: loaded.append(request.url))
        tab.goto(address)
        ready_offline(tab)
        if tab.evaluate("navigator.gpu.requestAdapter()") is None:
            pytest.skip("this Chromium has no software GPU")
        assert not any("asyncify" in url for url in loaded)

        tab.get_by_role("button", name="Use the GPU").click()

        expect(tab.locator(".device")).to_contain_text("The model runs on the GPU.")
        assert any("asyncify" in url for url in loaded)
        photo = tiny.photos / "1.png"
        assert_as_python(results(tab, photo), site.model, [photo])
