"""Stages of an encoder: fine-tune the later ones, or run an EfficientNet-Lite in two parts.

The output of the frozen part can be cached as features.

Notation: B, L, D, H, W, Gh and Gw as in ``encoder``. A stage's input has L' positions of size D'.
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
    backbone: nn.Module

    def as_grid(self, features: Any) -> tuple[Tensor, tuple[int, int]]:
        """See `Encoder`."""
        raise NotImplementedError

    def stages(self) -> list[str]:
        """Return the stage names that ``finetune_from`` accepts, in the order of the layers."""
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
        """Make the parameters from ``stage`` on trainable and freeze the others, or all for None.

        Some backbones have layers after the grid. These layers stay frozen, because they do not get
        a gradient, and distributed training would wait for it.

        Args:
            stage: One of ``stages()``, or None.
            image_size: Height and width of the photos (pixels).
            freeze_depthwise: Keep depthwise convolutions and their norms frozen too.

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
            for module in self.modules():  # a norm follows its convolution
                if _is_depthwise(module) or (
                    isinstance(module, nn.BatchNorm2d) and _is_depthwise(before)
                ):
                    module.requires_grad_(False)
                before = module

    def run_until(self, images: Tensor, stage: str) -> tuple[Tensor, tuple[int, int]]:
        """Encode normalized photos (B, 3, H, W) up to a stage, ``blocks.N`` of EfficientNet-Lite.

        Returns:
            The stage's input as rows, (B, L', D'), and its grid.
        """
        backbone, number = self._split(stage)
        return self.as_grid(backbone.run_until(images, number))

    def run_from(self, features: Tensor, stage: str) -> tuple[Tensor, tuple[int, int]]:
        """Run the rest of the encoder on the output of ``run_until`` for square photos.

        Returns:
            The features, (B, L, D), and the grid, (Gh, Gw).
        """
        backbone, number = self._split(stage)
        side = math.isqrt(features.shape[1])
        maps = features.view(len(features), side, side, -1).permute(0, 3, 1, 2)  # channels last
        return self.as_grid(backbone.run_from(maps, number))

    def state_until(self, stage: str) -> dict[str, Tensor]:
        """Return the entries of ``state_dict()`` that ``run_until`` depends on."""
        _, number = self._split(stage)
        blocks = [f"backbone.blocks.{n}." for n in range(number)]
        before = ("backbone.conv_stem.", "backbone.bn1.", *blocks)
        return {name: value for name, value in self.state_dict().items() if name.startswith(before)}

    def _split(self, stage: str) -> tuple[EfficientNetLite, int]:
        match, backbone = re.fullmatch(r"blocks\.(\d)", stage), self.backbone
        if match and isinstance(backbone, EfficientNetLite):
            number = int(match[1])
            if number < len(backbone.blocks):
                return backbone, number
        raise ConfigError(
            f"encoder {self.name} cannot be split at {stage!r}; cached features of a partly "
            "trained encoder need EfficientNet-Lite and one of blocks.0 to blocks.6; or train "
            "without data.features"
        )


def _is_depthwise(module: nn.Module) -> bool:
    return isinstance(module, nn.Conv2d) and 1 < module.groups == module.in_channels
