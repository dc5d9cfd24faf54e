"""Benchmark decoding from stored features against the loop that tutorials use.

    python scripts/benchmark_decoding.py FOLDER_OF_PHOTOS [--beams 1 5] [--batches 1 64]
                                         [--precision bf16]
    python scripts/benchmark_decoding.py --sizes 196 2048 512 9490 [...]

The photos are encoded once, then only the decoder runs. The loop decodes one photo at a time,
copies its features for every beam, projects them again at every word, and keeps sentences in Python
lists. Both run on the CPU with the same weights and threads. All cells of a row are measured in
each round; medians are printed.

``--sizes`` (regions, feature size, layer size, vocabulary; the values above are those of the
tutorials) uses a decoder with random weights on random features.

The bound is the time that the matrix products alone would take at the speed of one large product,
measured in the same run. Operations are counted by torch; look-ups, tanh, beam selection and memory
traffic are ignored.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import torch
from measuring import Report, add_arguments, clock, measure, median, ratio
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from captioner.data.folders import find_images
from captioner.data.images import open_image
from captioner.hardware import Precision, autocast, keep_freed_memory
from captioner.inference.captioner import Captioner, load
from captioner.inference.stepper import DecoderStepper
from captioner.model.build import build_decoder
from captioner.model.decoder import Decoder
from captioner.options import DecoderConfig, SearchOptions
from captioner.search.search import search
from captioner.text.vocabulary import END, PAD, START, UNKNOWN

LOOP_PHOTOS = 16
"""Photos per round of the loop; enough for a median within seconds."""


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--model")
    parser.add_argument("--precision", choices=get_args(Precision), default="auto")
    parser.add_argument("--sizes", type=int, nargs=4, help="regions, features, layers, words")
    parser.add_argument("--beams", type=int, nargs="+", default=[1, 3, 5, 10])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16, 64, 256])
    add_arguments(parser, rounds=3)
    options = parser.parse_args()

    if (options.folder is None) == (options.sizes is None):
        parser.error("give a folder of photos or --sizes")
    keep_freed_memory()  # as the command line does
    needed = max(*options.batches, LOOP_PHOTOS)
    with torch.inference_mode():
        if options.sizes:
            decoder, features = at_random(needed, *options.sizes)
            report(decoder, features, 20, options)
            return
        given = [options.model] if options.model else []
        model = load(*given, device="cpu", precision=options.precision)
        photos = find_images([options.folder])[:needed]
        if len(photos) < needed:
            parser.error(f"{options.folder} has {len(photos)} photos; {needed} are needed")
        features = encode(model, photos)
        with autocast(model.precision, model.device):
            report(model.model.decoder, features, model.stored.search.max_length, options)


def at_random(
    photos: int, regions: int, size: int, layers: int, words: int
) -> tuple[Decoder, Tensor]:
    """A random decoder and random features of these sizes."""
    torch.manual_seed(0)
    config = DecoderConfig(embed_dim=layers, hidden_dim=layers, attention_dim=layers)
    decoder = build_decoder(config, size, words, regions).eval()
    decoder.cache_word_gates()
    return decoder, torch.rand(photos, regions, size)


def encode(model: Captioner, photos: list[Path]) -> Tensor:
    """The photos' features, (N, L, D)."""
    pixels = [
        torch.from_numpy(model.prepare(open_image(photo)).pixels[0].copy()) for photo in photos
    ]
    with autocast(model.precision, model.device):
        return torch.cat(
            [model.model.encode(torch.stack(pixels[i : i + 32])) for i in range(0, len(pixels), 32)]
        )


def report(
    decoder: Decoder, features: Tensor, max_length: int, options: argparse.Namespace
) -> None:
    """Measure and print everything."""
    peak = peak_product(features.dtype if features.dtype == torch.bfloat16 else torch.float32)
    dtype = str(features.dtype).removeprefix("torch.")
    print(
        f"{len(features)} photos, {features.shape[1]} regions, {dtype}, "
        f"{torch.get_num_threads()} threads; one large product: {peak / 1e9:.0f} GFLOP/s"
    )
    table = Report("decoding", "beam")
    notes = []
    for beam in options.beams:
        found = SearchOptions(beam_size=beam, max_length=max_length)
        jobs: dict[str, Callable[[], None]] = {"loop": loop_job(decoder, features, found)}
        counts = {"loop": min(LOOP_PHOTOS, len(features))}
        for batch in options.batches:
            counts[str(batch)] = batch * max(1, min(LOOP_PHOTOS, len(features)) // batch)
            jobs[str(batch)] = batch_job(decoder, features[: counts[str(batch)]], found, batch)
        times = measure(jobs, options.rounds, clock=clock(options))
        speeds = {name: counts[name] / median(times[name]) for name in jobs}
        best = max(speeds[str(batch)] for batch in options.batches)
        table.add(
            str(beam),
            {"loop": speeds["loop"]}
            | {f"batch {batch}": speeds[str(batch)] for batch in options.batches}
            | {"best/loop": max(ratio(times, str(b), "loop", counts) for b in options.batches)},
        )
        notes.append(floor_note(decoder, features, found, best, peak))
    print("\nphotos per second")
    table.finish(options)
    print("\n" + "\n".join(notes))
    print(agreement(decoder, features[:LOOP_PHOTOS], max_length))


def batch_job(
    decoder: Decoder, features: Tensor, options: SearchOptions, batch: int
) -> Callable[[], None]:
    """Decode in batches, including the projections of the features."""

    def job() -> None:
        for part in features.split(batch):
            search(DecoderStepper(decoder, decoder.memory(part)), options)

    return job


def loop_job(decoder: Decoder, features: Tensor, options: SearchOptions) -> Callable[[], None]:
    """Decode photo by photo."""

    def job() -> None:
        for photo in features[:LOOP_PHOTOS]:
            tutorial_loop(decoder, photo, options)

    return job


def tutorial_loop(decoder: Decoder, features: Tensor, options: SearchOptions) -> list[int]:
    """Decode one photo (L, D) as tutorials do; return the tokens without start and end."""
    beams = options.beam_size
    features = features.expand(beams, *features.shape)  # a copy per beam once used
    state = decoder.start(decoder.memory(features))
    sentences, maps = [[START] for _ in range(beams)], [[] for _ in range(beams)]
    scores = torch.zeros(beams)
    done: list[tuple[float, list[int]]] = []
    for length in range(options.max_length):
        memory = decoder.memory(features.clone())  # projects all regions again, for every beam
        last = torch.tensor([[sentence[-1]] for sentence in sentences])
        embedded = decoder.embed(last)
        step = decoder.step(decoder.word_gates(embedded), state, memory)
        log_probs = decoder.readout(embedded, *step.outputs).float().log_softmax(-1).squeeze(1)
        log_probs[:, [PAD, START, UNKNOWN]] = -torch.inf
        totals = scores.unsqueeze(1) + log_probs
        best = (totals[:1] if length == 0 else totals).flatten().topk(len(sentences))
        parents = (best.indices // log_probs.shape[1]).tolist()
        words = (best.indices % log_probs.shape[1]).tolist()
        sentences = [[*sentences[p], w] for p, w in zip(parents, words, strict=True)]
        maps = [[*maps[p], step.alphas[p]] for p in parents]
        going = [k for k, word in enumerate(words) if word != END]
        done += [
            (float(best.values[k]), sentences[k][1:-1]) for k, w in enumerate(words) if w == END
        ]
        if not going:
            break
        sentences, maps = [sentences[k] for k in going], [maps[k] for k in going]
        rows = torch.tensor([parents[k] for k in going])
        state = step.state.select(rows)
        features, scores = features[rows], best.values[going]
    done = done or [(float(s), sentence[1:]) for s, sentence in zip(scores, sentences, strict=True)]
    return max(done)[1]


def peak_product(dtype: torch.dtype) -> float:
    """Operations per second of one large matrix product, best of several runs."""
    left, right = torch.randn(1024, 2048, dtype=dtype), torch.randn(2048, 2048, dtype=dtype)
    times = []
    for _ in range(12):
        started = time.perf_counter()
        left @ right
        times.append(time.perf_counter() - started)
    return 2 * 1024 * 2048 * 2048 / min(times)


def floor_note(
    decoder: Decoder, features: Tensor, options: SearchOptions, speed: float, peak: float
) -> str:
    """Compare the speed of the best batch with the bound of its matrix products."""
    with FlopCounterMode(display=False) as ours:
        search(DecoderStepper(decoder, decoder.memory(features)), options)
    few = features[:LOOP_PHOTOS]
    with FlopCounterMode(display=False) as loops:
        for photo in few:
            tutorial_loop(decoder, photo, options)
    work = ours.get_total_flops() / len(features)
    loop_work = loops.get_total_flops() / len(few)
    floor = peak / work
    return (
        f"beam {options.beam_size}: {work / 1e6:.0f} MFLOP per photo in products (the loop: "
        f"{loop_work / 1e6:.0f}, {loop_work / work:.1f} times as many); bound by the speed of a "
        f"large product: {floor:.0f} photos/s, {100 * speed / floor:.0f}% reached"
    )


def agreement(decoder: Decoder, features: Tensor, max_length: int) -> str:
    """Count equal captions of the loop and of greedy search."""
    options = SearchOptions(beam_size=1, max_length=max_length)
    ours = search(DecoderStepper(decoder, decoder.memory(features)), options)
    same = [
        found[0].tokens == tutorial_loop(decoder, photo, options)
        for found, photo in zip(ours, features, strict=True)
    ]
    beside = ("embedding", "init_", "word_gates", "projection", "attention.scorer.key")
    weights = sum(
        p.numel() * p.element_size()
        for name, p in decoder.named_parameters()
        if not name.startswith(beside)  # looked up, or used once per photo
    )
    return (
        f"weights used in each step: {weights / 1e6:.0f} MB; "
        f"greedy captions equal to the loop's: {sum(same)} of {len(same)}"
    )


if __name__ == "__main__":
    main()
