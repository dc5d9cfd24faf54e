"""Benchmark decoding from stored features against the loop that tutorials use.

    python scripts/benchmarks/decoding.py FOLDER_OF_PHOTOS [--model MODEL] [--precision fp32]

The photos are encoded once, then only the decoder runs. The loop decodes one photo at a time,
copies its features for every beam, projects them again at every word, and keeps sentences in Python
lists. Both run on the CPU with the same weights and threads.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import get_args

import torch
from measuring import Rows, clock, measure, median, parser, print_table, ratio
from torch import Tensor

from captioner.data.folders import find_images
from captioner.data.images import open_image
from captioner.hardware import Precision, autocast, keep_freed_memory
from captioner.inference.captioner import Captioner, load
from captioner.inference.torch_engine import DecoderStepper
from captioner.model.decoder import Decoder
from captioner.options import SearchOptions
from captioner.search.search import search
from captioner.text.vocabulary import END, PAD, START, UNKNOWN

BEAMS = (1, 3, 5, 10)
BATCHES = (1, 16, 64, 256)
LOOP_PHOTOS = 16
"""Photos per round of the loop; enough for a median within seconds."""


def main() -> None:
    """Measure and print a table."""
    given = parser(__doc__, rounds=3)
    given.add_argument("folder", type=Path)
    given.add_argument("--model", default="shipped")
    given.add_argument("--precision", choices=get_args(Precision), default="auto")
    options = given.parse_args()
    keep_freed_memory()  # as the command line does
    model = load(options.model, device="cpu", precision=options.precision).in_torch()
    photos = find_images([options.folder])[: max(BATCHES)]
    if len(photos) < max(BATCHES):
        given.error(f"{options.folder} has {len(photos)} photos; {max(BATCHES)} are needed")
    features = encode(model, photos)
    few = features[:LOOP_PHOTOS]
    print(
        f"{len(features)} photos, {features.shape[1]} regions, {model.precision}, "
        f"{torch.get_num_threads()} threads\n"
    )
    decoder, length = model.model.decoder, model.stored.search.max_length
    rows: Rows = {}
    with torch.inference_mode(), autocast(model.precision, model.device):
        for beam in BEAMS:
            found = SearchOptions(beam_size=beam, max_length=length)
            jobs: dict[str, Callable[[], object]] = {"loop": partial(loop, decoder, few, found)}
            counts = {"loop": len(few)}
            for batch in BATCHES:
                name = f"batch {batch}"
                counts[name] = batch * max(1, len(few) // batch)
                jobs[name] = partial(in_batches, decoder, features[: counts[name]], found, batch)
            times = measure(jobs, options.rounds, clock=clock(options))
            rows[str(beam)] = {name: counts[name] / median(times[name]) for name in jobs}
            rows[str(beam)]["best/loop"] = max(ratio(times, name, "loop", counts) for name in jobs)
        print_table("beam", rows)
        print(f"\n{agreement(decoder, few, length)}")


def encode(model: Captioner, photos: list[Path]) -> Tensor:
    """The photos' features, (N, L, D)."""
    [features] = model.ensemble.encode([model.prepare(open_image(photo)) for photo in photos])
    return features


def in_batches(decoder: Decoder, features: Tensor, options: SearchOptions, batch: int) -> None:
    """Decode in batches, including the projections of the features."""
    for part in features.split(batch):
        search(DecoderStepper(decoder, decoder.memory(part)), options)


def loop(decoder: Decoder, features: Tensor, options: SearchOptions) -> None:
    """Decode photo by photo."""
    for photo in features:
        tutorial_loop(decoder, photo, options)


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


def agreement(decoder: Decoder, features: Tensor, max_length: int) -> str:
    """Count equal captions of the loop and of greedy search."""
    options = SearchOptions(beam_size=1, max_length=max_length)
    ours = search(DecoderStepper(decoder, decoder.memory(features)), options)
    same = [
        found[0].tokens == tutorial_loop(decoder, photo, options)
        for found, photo in zip(ours, features, strict=True)
    ]
    return f"greedy captions equal to the loop's: {sum(same)} of {len(same)}"


if __name__ == "__main__":
    main()
