"""``captioner train``: a config file, changes to it, a run folder."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import jsonargparse

from captioner.cli.main import INTERRUPTED, OK
from captioner.cli.options import Parser, new_parser
from captioner.config import TrainConfig
from captioner.errors import ConfigError

RUN_FILES = ("state.safetensors", "metrics.jsonl", "best", "samples", "tensorboard")
"""What starting over in a run folder would replace."""


def parser() -> Parser:
    """Every setting of ``TrainConfig`` as an option."""
    jsonargparse.set_parsing_settings(docstring_parse_attribute_docstrings=True)
    new = new_parser(
        "train",
        "Train a model. Every setting may stand in the file and be changed on the command line.",
        "[CONFIG.yaml] [--resume auto] [--force] [--training.epochs 20 ...]",
    )
    new.add_argument("--config", action="config", help="YAML file with settings")
    new.add_argument(
        "--resume",
        choices=["auto"],
        help="auto: go on where the run folder's checkpoint is, or start when there is none",
    )
    new.add_argument("--force", action="store_true", help="start over in a used run folder")
    new.add_class_arguments(TrainConfig)
    return new


def read(argv: Sequence[str]) -> tuple[TrainConfig, bool, bool]:
    """The config, whether to resume, whether to start over."""
    argv = list(argv)
    if argv and not argv[0].startswith("-"):
        argv = ["--config", *argv]
    new = parser()
    arguments = new.parse(argv)
    settings = new.instantiate(arguments.clone(with_meta=False)).as_dict()
    resume, force = settings.pop("resume") is not None, settings.pop("force")
    settings.pop("config")
    return TrainConfig(**settings), resume, force


def main(argv: Sequence[str]) -> int:
    """Train to the end, or until interrupted."""
    config, resume, force = read(argv)
    folder = Path(config.run_folder)
    state = folder / "state.safetensors"
    used = any((folder / name).exists() for name in RUN_FILES)
    if used and not (resume and state.exists()) and not force:
        raise ConfigError(
            f"{folder} holds a run or other files of such names; go on with --resume auto, start "
            "over with --force, or give another --run-folder"
        )
    from captioner.training.setup import prepare
    from captioner.training.trainer import Interrupted, start

    setup = prepare(config)
    print(
        f"{len(setup.train)} training photos, {len(setup.val)} validation photos, "
        f"{len(setup.stored.vocabulary)} words, run folder {folder}",
        file=sys.stderr,
    )
    try:
        progress = start(config, setup, folder, resume=resume and state.exists())
    except Interrupted:
        print(
            f"captioner: interrupted; the state is saved, go on with: captioner train --config "
            f"{folder / 'config.yaml'} --resume auto",
            file=sys.stderr,
        )
        return INTERRUPTED
    best = f"best CIDEr {100 * progress.best:.1f} in epoch {progress.best_epoch + 1}"
    print(f"{best}: {folder / 'best'}")
    return OK
