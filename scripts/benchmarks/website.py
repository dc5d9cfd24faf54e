"""Measure a static site of ``captioner export --web`` in headless Chromium.

    python scripts/benchmarks/website.py site/ assets/examples/*.jpg

Prints what the first visit transfers from a host that compresses texts, the time until the model is
ready, and the time from choosing a photo to its caption, without a network: the best of --rounds,
each with a new copy of the photo, so that nothing is kept from the round before.
"""

from __future__ import annotations

import argparse
import gzip
import shutil
import statistics
import tempfile
import threading
import time
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from playwright.sync_api import Page, sync_playwright

TEXTS = (".html", ".js", ".json")


class Host(SimpleHTTPRequestHandler):
    """A static host that compresses texts and counts what it sends."""

    sent = 0

    def do_GET(self) -> None:
        """Answer a request."""
        path = Path(self.translate_path(self.path))
        path = path / "index.html" if path.is_dir() else path
        if not path.is_file():
            self.send_error(404)
            return
        content = path.read_bytes()
        self.send_response(200)
        self.send_header("Content-Type", self.guess_type(str(path)))
        if path.suffix in (".html", ".js", ".json"):
            content = gzip.compress(content)
            self.send_header("Content-Encoding", "gzip")
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Cache-Control", "max-age=600")  # as GitHub Pages
        self.end_headers()
        self.wfile.write(content)
        Host.sent += len(content)

    def log_message(self, *_: Any) -> None:
        """No log."""


def caption(tab: Page, photo: Path) -> float:
    """Seconds from choosing a photo to its caption."""
    started = time.perf_counter()
    tab.locator("#file").set_input_files(photo)
    tab.wait_for_function(
        "name => [...document.querySelectorAll('.card[data-state=done]')]"
        ".some((card) => card.textContent.endsWith(name))",
        arg=photo.name,
    )
    return time.perf_counter() - started


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("site", type=Path)
    parser.add_argument("photos", nargs="+", type=Path)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Host, directory=str(options.site)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}/?threads={options.threads}"
    with sync_playwright() as playwright, tempfile.TemporaryDirectory() as folder:
        chromium = shutil.which("chromium") or shutil.which("chromium-browser")
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        started = time.perf_counter()
        tab = browser.new_page()
        tab.set_default_timeout(180_000)
        tab.goto(address)
        tab.locator(".device[data-offline='true']").wait_for()  # ready without a network
        print(f"first visit: {Host.sent / 1e6:.1f} MB, ready after", end=" ")
        print(f"{time.perf_counter() - started:.1f} s; {tab.locator('.device').inner_text()}")
        tab.context.set_offline(True)
        copy = shutil.copy(options.photos[0], Path(folder) / f"first{options.photos[0].suffix}")
        caption(tab, Path(copy))  # the first one also compiles
        best = []
        for photo in options.photos:
            times = []
            for number in range(options.rounds):
                copy = shutil.copy(photo, Path(folder) / f"{photo.stem}-{number}{photo.suffix}")
                times.append(caption(tab, Path(copy)))
            best.append(min(times))
            print(f"{photo.name}  {best[-1]:.2f} s  {tab.get_by_role('status').inner_text()}")
        print(f"median: {statistics.median(best):.2f} s")
        browser.close()
    server.shutdown()


if __name__ == "__main__":
    main()
