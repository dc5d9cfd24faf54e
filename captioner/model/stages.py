"""Stages of an encoder, so that later stages can be trained while earlier stages stay frozen.

A stage is a group of layers with a common name, such as layer4 or blocks.5. An EfficientNet-Lite
can also be run in two parts. The output of the first, frozen part can then be cached as features.

Notation: B, L, D, H, W, Gh and Gw as in ``encoder``. The input of a stage has L' positions with D'
features each.
"""

from __future__ import annotations

import math
import re
from typing import Any

import torch
from torch import Tensor, nn

from captioner.errors import ConfigError
from captioner.model.efficientnet_lite import EfficientNetLite


class StagedEncoder(nn.Module):
    """Base class of `Encoder` with the methods that deal with stages."""

    name: str
    """Name of the encoder, as in ``encoder.name``."""
    backbone: nn.Module
    """The image network, without its global pooling."""

    def as_grid(self, features: Any) -> tuple[Tensor, tuple[int, int]]:
        """Reshape the output of the network to features (see ``Encoder.as_grid``)."""
        raise NotImplementedError

    def stages(self) -> list[str]:
        """Return the stage names that ``finetune_from`` accepts, in the order of the layers.

        A name is the first part or the first two parts of a parameter's name.
        """
        names: list[str] = []
        for parameter, _ in self.backbone.named_parameters():
            parts = parameter.split(".")
            for depth in (1, 2):
                name = ".".join(parts[:depth])
                if len(parts) > depth and name not in names:
                    names.append(name)
        return names

    def finetune_from(
        self, stage: str | None, image_size: int, *, freeze_depthwise: bool = False
    ) -> None:
        """Make a stage and all later stages trainable, and freeze the earlier stages.

        Some networks have layers after the grid. These layers stay frozen. They do not get a
        gradient, and distributed training would wait for the gradient of a trainable layer.

        Args:
            stage: The first trainable stage, one of ``stages()``. If None, all stages are frozen.
            image_size: Height and width of the photos (pixels).
            freeze_depthwise: Keep depthwise convolutions and their norms frozen in all stages.

        Raises:
            ConfigError: The stage does not exist or comes after the grid.
        """
        self.requires_grad_(False)
        if stage is None:
            return
        learning: list[nn.Parameter] = []
        for name, parameter in self.backbone.named_parameters():
            if learning or name == stage or name.startswith(f"{stage}."):
                parameter.requires_grad_(True)
                learning.append(parameter)
        if not learning:
            raise ConfigError(
                f"encoder.finetune_from {stage!r} is not a stage of {self.name}; "
                f"use one of {', '.join(self.stages())}"
            )
        photo = torch.zeros(1, 3, image_size, image_size, device=learning[0].device)
        total = self(photo)[0].sum()
        if not total.requires_grad:
            raise ConfigError(
                f"encoder.finetune_from {stage!r} comes after the feature grid of {self.name} and "
                "cannot be trained; use an earlier stage"
            )
        for parameter, gradient in zip(
            learning, torch.autograd.grad(total, learning, allow_unused=True), strict=True
        ):
            parameter.requires_grad_(gradient is not None)
        if freeze_depthwise:
            before: nn.Module = self
            for module in self.modules():  # in order, so each norm comes after its convolution
                if _is_depthwise(module) or (
                    isinstance(module, nn.BatchNorm2d) and _is_depthwise(before)
                ):
                    module.requires_grad_(False)
                before = module

    def run_until(self, images: Tensor, stage: str) -> tuple[Tensor, tuple[int, int]]:
        """Run the layers before a stage.

        Args:
            images: Normalized photos, (B, 3, H, W).
            stage: Name of the stage, ``blocks.0`` to ``blocks.6`` of an EfficientNet-Lite.

        Returns:
            The input of the stage, (B, L', D'), and its grid: the numbers of rows and columns.

        Raises:
            ConfigError: The encoder is not an EfficientNet-Lite, or it does not have the stage.
        """
        backbone, number = self._split(stage)
        return self.as_grid(backbone.run_until(images, number))

    def run_from(self, features: Tensor, stage: str) -> tuple[Tensor, tuple[int, int]]:
        """Run a stage and all later layers.

        Args:
            features: The input of the stage from ``run_until``, (B, L', D'), for square photos.
            stage: Name of the stage, as in ``run_until``.

        Returns:
            The features, (B, L, D), and the grid, (Gh, Gw).
        """
        backbone, number = self._split(stage)
        side = math.isqrt(features.shape[1])
        maps = features.view(len(features), side, side, -1).permute(0, 3, 1, 2)  # channels last
        return self.as_grid(backbone.run_from(maps, number))

    def state_until(self, stage: str) -> dict[str, Tensor]:
        """Return the entries of ``state_dict()`` for the layers before a stage.

        The results of ``run_until`` depend only on these entries, so they show whether cached
        features still fit the encoder.
        """
        _, number = self._split(stage)
        blocks = [f"backbone.blocks.{n}." for n in range(number)]
        before = ("backbone.conv_stem.", "backbone.bn1.", *blocks)
        return {name: value for name, value in self.state_dict().items() if name.startswith(before)}

    def _split(self, stage: str) -> tuple[EfficientNetLite, int]:
        """Return the network and the number N of a stage ``blocks.N``."""
        match, backbone = re.fullmatch(r"blocks\.(\d)", stage), self.backbone
        if match and isinstance(backbone, EfficientNetLite):
            number = int(match[1])
            if number < len(backbone.blocks):
                return backbone, number
        raise ConfigError(
            f"encoder {self.name} cannot be split at {stage!r}, so features before this stage "
            "cannot be cached; use an EfficientNet-Lite with one of the stages blocks.0 to "
            "blocks.6, or train without data.features"
        )


def _is_depthwise(module: nn.Module) -> bool:
    """Return whether a module is a convolution with one group per input channel."""
    return isinstance(module, nn.Conv2d) and 1 < module.groups == module.in_channels
