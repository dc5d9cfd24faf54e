"""``captioner prepare``: prepare data for training and evaluation."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from captioner.bulk.options import RayOptions, on_ray
from captioner.cli.arguments import command
from captioner.cli.console import hint, warn
from captioner.cli.main import OK, SOME_FAILED
from captioner.cli.output_files import refuse_overwrite
from captioner.cli.train import ConfigOptions, read_changes, read_config
from captioner.data.dataset import prepare_dataset
from captioner.data.options import DatasetOptions
from captioner.data.reading import photo_bar
from captioner.errors import ConfigError
from captioner.messages import counted
from captioner.options import Positive, TrainConfig
from captioner.schema import Shown

OutputFolder = Annotated[str, Shown("FOLDER", ("-o", "--output"))]
CONFIG_USAGE = "[CONFIG.yaml] [SECTION.NAME=VALUE ...] -o FOLDER [options]"


# --- captions of other formats -------------------------------------------------------------------


@command(
    "prepare dataset", "SOURCE -o FOLDER [--images FOLDER] [--val 0.1 --test 0.1]", DatasetOptions
)
def dataset(options: DatasetOptions, _: Any) -> int:
    """Convert the captions, and print a summary."""
    print(prepare_dataset(options))
    return OK


# --- document frequencies ------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class FrequenciesOptions:
    """Count in how many photos each n-gram of 1 to 4 words occurs (document frequencies).

    CIDEr-D uses these counts (captioner evaluate --frequencies). With them, the score of a caption
    does not depend on which other photos are scored.
    """

    annotations: Annotated[list[str], Shown(positional=True)]
    """Count the captions of the training set in these COCO captions files."""
    output: Annotated[str, Shown("FILE|FOLDER", ("-o", "--output"))]
    """Write to this file, or add the counts to this model folder or run folder."""
    force: bool = False
    """Overwrite the output file."""


@command("prepare frequencies", "CAPTIONS.json... -o FILE.json.gz|MODEL_FOLDER", FrequenciesOptions)
def frequencies(options: FrequenciesOptions, _: Any) -> int:
    """Count n-grams and write the counts."""
    from captioner.data.coco import read_captions
    from captioner.evaluation.references import count_frequencies
    from captioner.files import atomic_write
    from captioner.inference.find_model import find_model
    from captioner.inference.names import FREQUENCIES

    target = Path(options.output)
    if target.is_dir():
        target = find_model(target) / FREQUENCIES
    elif options.output.endswith("/"):
        raise ConfigError(
            f"{options.output} does not exist; use an existing model folder, or a file name"
        )
    refuse_overwrite(target, options.force)
    references = read_captions(options.annotations, renumber=True)
    found = count_frequencies(references)
    atomic_write(target, found.to_bytes())
    print(f"{target}: {len(found.counts)} n-grams from the captions of {found.documents} photos")
    return OK


# --- features ------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class FeaturesOptions(RayOptions, ConfigOptions):
    """Compute the features of a frozen encoder, or of its frozen stages, once for all epochs.

    To continue after an interruption, run the same command again.
    """

    output: OutputFolder
    """Write the features to this folder."""
    dtype: Literal["float16", "bfloat16", "float32"] = "float16"
    """Store features as this type. float32 takes twice the space of the other types."""
    batch_size: Positive = 32
    """Process this many photos at a time. If the memory is too small, use a lower number."""
    device: str = "auto"
    """Run the encoder on this device: auto, cpu, cuda, cuda:1 (the second GPU), mps (Apple), ...
    auto: a GPU if PyTorch can use one, otherwise the CPU."""
    force: bool = False
    """Replace existing features."""


@command("prepare features", CONFIG_USAGE, FeaturesOptions, TrainConfig)
def features(options: FeaturesOptions, given: dict[str, Any]) -> int:
    """Encode all photos that have no features yet."""
    config = read_config(options, read_changes(options, given))
    folder, batch_size = Path(options.output), options.batch_size
    with_ray = on_ray(options)
    device = options.worker_device(options.device) if with_ray else options.device

    from captioner.data.features import FeatureCache, FeatureWriter
    from captioner.files import require_space
    from captioner.training.setup import plan_features

    encoder, images, flipped = plan_features(config, dtype=options.dtype, device=device)
    writer = FeatureWriter(folder, encoder, images, flipped, force=options.force)
    if not writer.complete:
        also, (height, width) = f" and {flipped} flipped" if flipped else "", encoder.grid
        print(
            f"{counted(len(images), 'photo')}{also}, each {height} x {width} regions of "
            f"{encoder.feature_dim} {options.dtype}: {writer.bytes:,} bytes in {folder}",
            file=sys.stderr,
        )
        require_space(folder, writer.missing_bytes)
        bar = photo_bar(total=len(images), initial=writer.done, desc="encoding")
        if with_ray:
            from captioner.bulk.cluster import cluster
            from captioner.bulk.features import ray_blocks

            blocks = ray_blocks(writer, config, options, device=device, batch_size=batch_size)
            engine: Any = cluster(options)
            written = writer.write(blocks)
        else:
            engine = nullcontext()
            written = writer.fill(batch_size)
        with hint(lambda: "the finished features are kept"), engine, bar:
            for count, errors in written:
                for error in errors:
                    warn(f"{error}; skipped")
                bar.update(count)

    cache = FeatureCache(folder, encoder.fingerprint)  # read it as training does
    cache.check(images)
    missing = [image for image in images if not cache.has(image.image_id)]
    skipped = f"; {len(missing)} skipped (first: {missing[0].path})" if missing else ""
    print(f"{folder}: features of {len(images) - len(missing)} photos{skipped}")
    return SOME_FAILED if missing else OK
