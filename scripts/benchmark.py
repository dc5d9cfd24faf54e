"""Benchmark captioning relative to the bare encoder, its upper bound.

    python scripts/benchmark.py FOLDER_OF_PHOTOS [--beam-size 3] [--rounds 5]

Each round encodes the same prepared batches, captions them, and captions the files they came from;
the order rotates. Prints medians over rounds of the speeds and of the ratios within a round. Peak
memory is measured for the first quarter of the photos and for all, each in its own process.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

BATCH = 32


def main() -> None:
    """Run the measurements and print them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model")
    parser.add_argument("--beam-size", type=int)
    parser.add_argument("--photos", type=int, default=320)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only-memory", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()

    from captioner.api import load
    from captioner.data.folders import find_images
    from captioner.hardware import keep_freed_memory

    keep_freed_memory()  # as the command line does
    photos = find_images([options.folder])[: options.only_memory or options.photos]
    if options.only_memory:
        for _ in load(*folders(options)).stream(photos):
            pass
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
        return
    _speed(options, photos)
    _memory(options, len(photos))


def folders(options: argparse.Namespace) -> list[str]:
    """Arguments of ``load``; empty for the default model."""
    return [options.model] if options.model else []


def _speed(options: argparse.Namespace, photos: list[Path]) -> None:
    import numpy as np
    import torch

    from captioner.api import load
    from captioner.data.images import open_image
    from captioner.hardware import autocast

    model = load(*folders(options))
    changes = {"beam_size": options.beam_size} if options.beam_size else {}
    search = model.options(**changes)
    prepared = [model.prepare(open_image(photo)) for photo in photos]
    batches = [prepared[i : i + BATCH] for i in range(0, len(prepared), BATCH)]

    @torch.inference_mode()
    def encode() -> None:
        for batch in batches:
            pixels = torch.from_numpy(np.stack([p.pixels[0] for p in batch]))
            with autocast(model.precision, model.device):
                model.model.encode(pixels.to(model.device))

    def caption() -> None:
        for batch in batches:
            model.caption_batch(batch, search)

    def files() -> None:
        for _ in model.stream(photos, batch_size=BATCH, **changes):
            pass

    jobs: dict[str, Callable[[], None]] = {"encoder": encode, "caption": caption, "files": files}
    model.caption_batch(batches[0], search)  # warm-up
    rounds: list[dict[str, float]] = []
    for number in range(options.rounds):
        names = list(jobs)[number % 3 :] + list(jobs)[: number % 3]
        rounds.append({})
        for name in names:
            started = time.perf_counter()
            jobs[name]()
            rounds[-1][name] = len(photos) / (time.perf_counter() - started)
    print(f"{len(photos)} photos, batches of {BATCH}, {search}, {torch.get_num_threads()} threads")
    for name, text in (
        ("encoder", "bare encoder, prepared batches"),
        ("caption", "captions, prepared batches"),
        ("files", "captions from files"),
    ):
        speed = statistics.median(r[name] for r in rounds)
        share = statistics.median(r[name] / r["encoder"] for r in rounds)
        print(f"{text:<32} {speed:7.1f} photos/s   {100 * share:5.1f}% of the bare encoder")


def _memory(options: argparse.Namespace, count: int) -> None:
    for number in (max(1, count // 4), count):
        command = [sys.executable, __file__, str(options.folder), "--only-memory", str(number)]
        if options.model:
            command += ["--model", options.model]
        peak = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        print(f"peak memory, {number:>5} photos {'':>10} {float(peak):8.0f} MB")


if __name__ == "__main__":
    main()
