"""``captioner prepare features``: cache the features of a frozen encoder on disk."""

from __future__ import annotations

import functools
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from captioner.cli.main import FAILED, INTERRUPTED, OK
from captioner.cli.options import DEVICE_HELP, Parser, warn
from captioner.cli.train_options import new_train_parser, read_train_config
from captioner.config import TrainConfig
from captioner.errors import ConfigError, DataError

if TYPE_CHECKING:
    from torch import Tensor

    from captioner.data.coco import CaptionedImage
    from captioner.data.feature_writer import FeaturePlan, FeatureWriter
    from captioner.data.preprocessing import Preprocessing


@functools.cache
def parser() -> Parser:
    """Options of the command: every field of ``TrainConfig`` and its own."""
    new = new_train_parser(
        "prepare features",
        "Compute the features of a frozen encoder (or of its frozen stages) once, instead of in "
        "every epoch. After an interruption, run the same command again to continue.",
        "CONFIG.yaml [--data.images ...] -o FOLDER",
    )
    new.add_argument("-o", "--output", required=True, help="folder for the features")
    new.add_argument(
        "--dtype",
        choices=["float16", "bfloat16", "float32"],
        default="float16",
        help="storage type; float32 takes twice the space",
    )
    new.add_argument("--batch-size", type=int, default=32, help="number of photos per batch")
    new.add_argument("--device", default="auto", help=DEVICE_HELP)
    new.add_argument("--force", action="store_true", help="replace existing features")
    new.add_class_arguments(TrainConfig)
    return new


def run(options: Any) -> int:
    """Encode the photos that are not in the folder yet."""
    config, own = read_train_config(parser(), options)
    folder = Path(own["output"])
    if own["batch_size"] < 1:
        raise ConfigError(f"--batch-size is {own['batch_size']}; give an integer >= 1")

    from captioner.data.feature_writer import FeatureWriter

    plan, preprocessing, encode = _plan(config, own["dtype"], own["device"])
    writer = FeatureWriter(folder, plan, force=own["force"])
    if writer.complete and not own["force"]:
        return _report(folder, plan)
    _check_room(writer)
    try:
        _fill(writer, encode, preprocessing, own["batch_size"])
    except KeyboardInterrupt:
        warn("interrupted; run the same command again to continue")
        return INTERRUPTED
    except OSError as error:  # a full disk is reported without a file name
        error.filename = error.filename or str(folder)
        raise
    return _report(folder, plan)


def _plan(
    config: TrainConfig, dtype: str, device_name: str
) -> tuple[FeaturePlan, Preprocessing, Callable[[Tensor], Tensor]]:
    """Return the plan, the preprocessing and the encoder function."""
    import torch

    from captioner.data.feature_writer import FeaturePlan
    from captioner.data.features import feature_key
    from captioner.hardware import autocast, pick_device, pick_precision
    from captioner.training.setup import open_encoder, read_data

    device = pick_device(device_name)
    train, val = read_data(replace(config.data, shards=None))
    torch.manual_seed(config.training.seed)  # the same random weights as the run
    encoder, preprocessing = open_encoder(config)
    stage = config.encoder.finetune_from  # the stages before it are frozen
    feature_dim, grid = encoder.measure(preprocessing.image_size, stage)
    precision = pick_precision(config.training.precision, device)
    state = encoder.state_dict() if stage is None else encoder.state_until(stage)
    key = feature_key(
        encoder.name, state, preprocessing, dtype=dtype, precision=precision, stage=stage
    )
    encoder.to(device).to(memory_format=torch.channels_last)

    def encode(pixels: Tensor) -> Tensor:
        with torch.inference_mode(), autocast(precision, device):
            images = preprocessing.normalize(pixels.to(device))
            found = encoder(images) if stage is None else encoder.run_until(images, stage)
            features: Tensor = found[0]
            return features

    flipped = len(train) if config.data.horizontal_flip else 0
    plan = FeaturePlan(_together(train, val), flipped, grid, feature_dim, key)
    return plan, preprocessing, encode


def _together(
    train: Sequence[CaptionedImage], val: Sequence[CaptionedImage]
) -> list[CaptionedImage]:
    """Training photos, then the validation photos that are not among them."""
    known = {(image.image_id, image.path) for image in train}
    return [*train, *(image for image in val if (image.image_id, image.path) not in known)]


def _check_room(writer: FeatureWriter) -> None:
    """Print the size of the features; check that the disk has space for them."""
    plan, folder = writer.plan, writer.folder.absolute()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    needed, free = writer.missing_bytes, shutil.disk_usage(existing).free
    rows = f"{len(plan.images)} photos" + (f" and {plan.mirrored} flipped" if plan.mirrored else "")
    print(
        f"{rows}, each {plan.grid[0]} x {plan.grid[1]} regions of {plan.feature_dim} "
        f"{plan.key['dtype']}: {plan.bytes:,} bytes in {writer.folder}",
        file=sys.stderr,
    )
    if needed > free:
        raise DataError(
            f"{writer.folder}: {needed:,} bytes are needed, {free:,} are free; free some space, "
            "give a folder on another disk, or use --dtype float16"
        )


def _fill(
    writer: FeatureWriter,
    encode: Callable[[Tensor], Tensor],
    preprocessing: Preprocessing,
    batch_size: int,
) -> None:
    from tqdm import tqdm

    bar = tqdm(
        total=len(writer.plan.images),
        initial=len(writer.records),
        desc="encoding",
        unit="photo",
        dynamic_ncols=True,
    )
    with bar:
        for count, errors in writer.fill(encode, preprocessing, batch_size):
            for error in errors:
                warn(f"{error}; skipped")
            bar.update(count)


def _report(folder: Path, plan: FeaturePlan) -> int:
    """Check the features as training does and print a summary."""
    from captioner.data.features import FeatureCache

    cache = FeatureCache.open(folder, plan.key)
    cache.check(plan.images)
    missing = [image for image in plan.images if not cache.has(image.image_id)]
    skipped = f"; {len(missing)} skipped (first: {missing[0].path})" if missing else ""
    print(f"{folder}: features of {len(plan.images) - len(missing)} photos{skipped}")
    return FAILED if missing else OK
