"""Compare the scores of captioner with those of pycocoevalcap and its Java tokenizer.

    captioner caption PHOTOS... --format coco --annotations CAPTIONS.json -o results.json
    python scripts/studies/compare_with_java.py CAPTIONS.json results.json

Scores the file and four variants of it: entries in another order, captions assigned to other
photos, captions truncated after four words, and the first third of the photos. Prints both scores,
the largest difference over corpus and per-image scores, and the time of each.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from captioner.data.coco import read_captions
from captioner.evaluation.metrics import Scores, score
from captioner.evaluation.report import read_captions_of

METRICS = ("Bleu_1", "Bleu_2", "Bleu_3", "Bleu_4", "ROUGE_L", "CIDEr")


def main() -> None:
    """Score everything twice and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("annotations")
    parser.add_argument("results", help="COCO results file, or a report of captioner evaluate")
    options = parser.parse_args()

    _, references = read_captions([options.annotations])
    print(f"| file | scored by | {' | '.join(METRICS)} | largest difference | seconds |")
    print("|---" * (len(METRICS) + 4) + "|")
    worst = 0.0
    with tempfile.TemporaryDirectory() as folder:
        for name, entries in variants(read_captions_of(options.results)).items():
            path = Path(folder) / f"{name}.json"
            path.write_text(json.dumps(entries))
            captions = read_captions_of(path)
            found = []
            for scorer in (score, by_java):
                started = time.perf_counter()
                found.append((scorer(captions, references), time.perf_counter() - started))
            largest = difference(found[0][0], found[1][0])
            worst = max(worst, largest)
            for who, (scores, seconds) in zip(("captioner", "pycocoevalcap"), found, strict=True):
                cells = " | ".join(f"{100 * scores.corpus[metric]:.4f}" for metric in METRICS)
                print(f"| {name} | {who} | {cells} | {largest:.0e} | {seconds:.1f} |", flush=True)
    if worst > 1e-6:
        sys.exit(f"the largest difference is {worst}, more than 1e-6")


def variants(captions: Mapping[int, str]) -> dict[str, list[dict[str, object]]]:
    """COCO results by name of the variant."""
    generator = random.Random(0)
    ids = list(captions)
    order = generator.sample(ids, len(ids))
    shifted = dict(zip(ids, [captions[i] for i in ids[1:] + ids[:1]], strict=True))
    cut = {i: " ".join(text.split()[:4]) for i, text in captions.items()}
    return {
        "as it is": entries_of(captions),
        "in another order": entries_of({i: captions[i] for i in order}),
        "captions of other photos": entries_of(shifted),
        "captions cut": entries_of(cut),
        "file cut": entries_of({i: captions[i] for i in ids[: max(1, len(ids) // 3)]}),
    }


def entries_of(captions: Mapping[int, str]) -> list[dict[str, object]]:
    """Captions in COCO's results format."""
    return [{"image_id": i, "caption": text} for i, text in captions.items()]


def by_java(captions: Mapping[int, str], references: Mapping[int, list[str]]) -> Scores:
    """Score as pycocoevalcap's COCOEvalCap does, with its tokenizer and scorers."""
    from pycocoevalcap.bleu.bleu import Bleu
    from pycocoevalcap.cider.cider import Cider
    from pycocoevalcap.rouge.rouge import Rouge
    from pycocoevalcap.tokenizer.ptbtokenizer import PTBTokenizer

    tokenizer = PTBTokenizer()
    truth = tokenizer.tokenize({i: [{"caption": c} for c in references[i]] for i in captions})
    result = tokenizer.tokenize({i: [{"caption": c}] for i, c in captions.items()})
    whole, each = Bleu(4).compute_score(truth, result, verbose=0)
    found = {f"Bleu_{n + 1}": (whole[n], each[n]) for n in range(4)}
    found["ROUGE_L"] = Rouge().compute_score(truth, result)
    found["CIDEr"] = Cider().compute_score(truth, result)
    images: dict[int, dict[str, float]] = {i: {} for i in truth}
    for metric, (_, values) in found.items():
        for image_id, value in zip(truth, values, strict=True):
            images[image_id][metric] = float(value)
    return Scores({metric: float(value) for metric, (value, _) in found.items()}, images)


def difference(one: Scores, other: Scores) -> float:
    """Largest difference over the corpus and per-image scores."""
    pairs = [(one.corpus, other.corpus)]
    pairs += [(one.images[i], other.images[i]) for i in other.images]
    return max(abs(a[metric] - b[metric]) for a, b in pairs for metric in METRICS)


if __name__ == "__main__":
    main()
