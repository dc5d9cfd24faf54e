"""Measure how far regions are from where they are drawn, for many encoders.

Prints a Markdown table. Offsets are fractions of a region: the centroid of the input gradient's
energy minus the drawn centre, at the middle of the input, mean of both axes. See docs/regions.md.

    python scripts/studies/region_offsets.py                       # twenty encoders, random weights
    python scripts/studies/region_offsets.py resnet18:160 timm/convnext_tiny:230
"""

from __future__ import annotations

import argparse

import torch

from captioner.geometry import Geometry
from captioner.model.encoder import Encoder
from captioner.model.regions import gradient_offsets, locate_regions

ENCODERS = (
    "resnet18:224", "resnet18:256", "resnet50:224", "timm/resnet18:224", "timm/resnet26d:224",
    "efficientnet_b0:224", "mobilenet_v2:224", "mobilenet_v3_large:224", "mobilenet_v3_small:224",
    "regnet_y_400mf:224", "densenet121:224", "squeezenet1_1:224", "vgg11:100", "vgg11:224",
    "timm/tf_efficientnet_lite0:224", "timm/tf_efficientnet_lite0:256",
    "timm/tf_efficientnet_lite2:260", "timm/tf_efficientnet_lite2:288", "timm/convnext_atto:224",
    "timm/convnext_atto:230", "timm/vit_tiny_patch16_224:224",
    "timm/swin_tiny_patch4_window7_224:224",
)  # fmt: skip


def main() -> None:
    """Measure the encoders one by one."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("encoders", nargs="*", default=ENCODERS, metavar="NAME:SIZE")
    print("| encoder | pixels | grid | first centre | pitch | equal cells | geometry |")
    print("|---|---|---|---|---|---|---|")
    for given in parser.parse_args().encoders:
        name, _, size = given.rpartition(":")
        torch.manual_seed(0)
        encoder, pixels = Encoder(name, image_size=int(size)), int(size)
        grid = encoder.measure(pixels)[1]
        found = locate_regions(encoder, pixels)
        even = Geometry.even(grid, right=pixels, bottom=pixels)
        before, after = (sum(pair) / 2 for pair in gradient_offsets(encoder, pixels, even, found))
        cells = (
            name, pixels, f"{grid[0]} x {grid[1]}", f"{found.x.first:.4g}", f"{found.x.pitch:.4g}",
            f"{before:+.2f}", f"{after:+.2f}",
        )  # fmt: skip
        print(f"| {' | '.join(map(str, cells))} |", flush=True)


if __name__ == "__main__":
    main()
