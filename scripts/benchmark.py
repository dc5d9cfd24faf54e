"""Benchmark captioning relative to the bare encoder, its upper bound.

    python scripts/benchmark.py FOLDER_OF_PHOTOS [--beam-size 3] [--precision bf16] [--rounds 5]

Each round encodes the same prepared batches, captions them, and captions the files they came from;
the order rotates. Prints medians over rounds of the speeds and of the ratios within a round. Peak
memory is measured for the first quarter of the photos and for all, each in its own process.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import get_args

from measuring import Report, add_arguments, clock, in_child, measure, median, peak_memory, ratio

from captioner.hardware import Precision

BATCH = 32


def main() -> None:
    """Run the measurements and print them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model")
    parser.add_argument("--beam-size", type=int)
    parser.add_argument("--precision", choices=get_args(Precision), default="auto")
    parser.add_argument("--photos", type=int, default=320)
    add_arguments(parser, rounds=5)
    parser.add_argument("--only-memory", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()

    from captioner.data.folders import find_images
    from captioner.hardware import keep_freed_memory
    from captioner.inference.captioner import load

    keep_freed_memory()  # as the command line does
    photos = find_images([options.folder])[: options.only_memory or options.photos]
    if options.only_memory:
        for _ in load(*folders(options), precision=options.precision).stream(photos):
            pass
        print(peak_memory())
        return
    report = Report("captioning", "job")
    _speed(options, photos, report)
    _memory(options, len(photos), report)
    report.finish(options)


def folders(options: argparse.Namespace) -> list[str]:
    """Arguments of ``load``; empty for the default model."""
    return [options.model] if options.model else []


def _speed(options: argparse.Namespace, photos: list[Path], report: Report) -> None:
    import numpy as np
    import torch

    from captioner.data.images import open_image
    from captioner.hardware import autocast
    from captioner.inference.captioner import load

    model = load(*folders(options), precision=options.precision)
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
    times = measure(jobs, options.rounds, warm_up=False, clock=clock(options))
    print(
        f"{len(photos)} photos, batches of {BATCH}, {model.precision}, {search}, "
        f"{torch.get_num_threads()} threads"
    )
    for name, text in (
        ("encoder", "bare encoder, prepared batches"),
        ("caption", "captions, prepared batches"),
        ("files", "captions from files"),
    ):
        figures = {
            "photos/s": len(photos) / median(times[name]),
            "of the encoder": ratio(times, name, "encoder"),
        }
        report.add(text, figures, times[name])


def _memory(options: argparse.Namespace, count: int, report: Report) -> None:
    given = ["--precision", options.precision]
    given += ["--model", options.model] if options.model else []
    for number in (max(1, count // 4), count):
        peak = in_child(__file__, options.folder, "--only-memory", number, *given)
        report.add(f"{number} photos, a process of its own", {"peak memory (MB)": peak})


if __name__ == "__main__":
    main()
