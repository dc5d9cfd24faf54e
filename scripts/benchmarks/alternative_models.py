"""Build the models that `alternatives.py` compares, or measure one of them in this process.

The four other models have the sizes of their published configurations, but random weights. Speed,
memory and size on disk depend on the shapes of the weights, not on their values.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from measuring import peak

BEAMS = 3
"""Number of beams of the search."""
WORDS = 10
"""Decoder steps of every caption, so that no model gains by ending early."""
SECONDS = 3.0
"""Minimum processor time of a measurement. Fast models caption the photos several times."""
PACKAGES = ("torch", "transformers", "pillow")
"""Packages that a peer (one of the four other models) needs. Its ONNX forms also need
`ONNX_PACKAGES`."""
ONNX_PACKAGES = ("optimum-onnx", "onnxruntime")
CUDA = ("nvidia", "triton", "cuda", "nccl", "cudnn", "cusparse", "nvshmem")
"""Parts of the names of packages and files that are only for GPUs. The CPU build of torch does not
contain them."""

Caption = Callable[[Path], int]
"""A function that captions a photo and returns the number of decoder steps."""

TRANSFORMER = {
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
}
"""Sizes of the transformers ViT-B and BERT-base, which three of the peers use."""
TINY = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
}
"""Small sizes for a quick test of the script."""


def vit_gpt2(tiny: bool) -> tuple[Any, Any]:
    """Build ``nlpconnect/vit-gpt2-image-captioning``: ViT-B/16 at 224 pixels, GPT-2 small."""
    import transformers as hf

    size = 32 if tiny else 224
    language = {"vocab_size": 50257, "n_embd": 768, "n_layer": 12, "n_head": 12}
    if tiny:
        language |= {"vocab_size": 300, "n_embd": 32, "n_layer": 2, "n_head": 2}
    end = language["vocab_size"] - 1
    config = hf.VisionEncoderDecoderConfig.from_encoder_decoder_configs(
        hf.ViTConfig(**(TINY if tiny else TRANSFORMER), image_size=size, patch_size=16),
        hf.GPT2Config(**language, bos_token_id=end, eos_token_id=end),
    )
    config.decoder_start_token_id = config.pad_token_id = config.eos_token_id = end
    model = hf.VisionEncoderDecoderModel(config)
    model.generation_config = hf.GenerationConfig.from_model_config(config)
    return model, hf.ViTImageProcessor(size={"height": size, "width": size})


def blip(tiny: bool) -> tuple[Any, Any]:
    """Build ``Salesforce/blip-image-captioning-base``: ViT-B/16 at 384 pixels, BERT-base."""
    import transformers as hf

    size, layers = (32, TINY) if tiny else (384, TRANSFORMER)
    config = hf.BlipConfig(
        text_config={**layers, "vocab_size": 30524, "encoder_hidden_size": layers["hidden_size"]},
        vision_config={**layers, "image_size": size, "patch_size": 16},
        projection_dim=16 if tiny else 512,
    )
    return hf.BlipForConditionalGeneration(config), hf.BlipImageProcessor(
        size={"height": size, "width": size}
    )


def git(tiny: bool) -> tuple[Any, Any]:
    """Build ``microsoft/git-base-coco``: CLIP's ViT-B/16 at 224 pixels, six text layers."""
    import transformers as hf

    size, layers = (32, TINY) if tiny else (224, TRANSFORMER)
    config = hf.GitConfig(
        **{**layers, "num_hidden_layers": 2 if tiny else 6},
        vocab_size=30522,
        vision_config={**layers, "image_size": size, "patch_size": 16},
    )
    return hf.GitForCausalLM(config), hf.CLIPImageProcessor(
        size={"shortest_edge": size}, crop_size={"height": size, "width": size}
    )


def florence2(tiny: bool) -> tuple[Any, Any]:
    """Build ``microsoft/Florence-2-base``: DaViT at 768 pixels, six encoder and decoder layers.

    The class in transformers is used, because it does not run code from the hub. This class marks
    the positions of the photo with an additional token, so the vocabulary has 51,290 instead of
    51,289 tokens.
    """
    import transformers as hf

    if not hasattr(hf, "Florence2ForConditionalGeneration"):
        raise ValueError(
            "this version of transformers has no class for Florence-2; install a newer version"
        )
    size, width, layers, heads = (64, 32, 2, 2) if tiny else (768, 768, 6, 12)
    widths = [8, 16, 32, 64] if tiny else [128, 256, 512, 1024]
    config = hf.Florence2Config(
        text_config={
            "model_type": "bart",
            "vocab_size": 51290,
            "d_model": width,
            "max_position_embeddings": 1024,
            **{f"{part}_layers": layers for part in ("encoder", "decoder")},
            **{f"{part}_attention_heads": heads for part in ("encoder", "decoder")},
            **{f"{part}_ffn_dim": 4 * width for part in ("encoder", "decoder")},
        },
        vision_config={
            "embed_dim": widths,
            "depths": [1, 1, 1, 1] if tiny else [1, 1, 9, 1],
            "num_heads": [1, 2, 4, 8] if tiny else [4, 8, 16, 32],
            "num_groups": [1, 2, 4, 8] if tiny else [4, 8, 16, 32],
            "projection_dim": width,
        },
        image_token_id=51289,
    )
    model = hf.Florence2ForConditionalGeneration(config)
    side = {"height": size, "width": size}
    return model, hf.CLIPImageProcessor(size=side, do_center_crop=False)


PEERS = {"ViT-GPT2": vit_gpt2, "GIT-base": git, "BLIP-base": blip, "Florence-2-base": florence2}
"""Functions that build a peer and its image processor, by the name of the peer.

If ``tiny`` is True, they build a tiny model, for a quick test of the script.
"""
ONNX = ("ViT-GPT2",)
"""Peers that optimum exports to ONNX. It has no exporter for the other models."""
QUESTION = (0, 2264, 473, 5, 2274, 6190, 116, 2)
"""Florence-2's question for a caption, "What does the image describe?", as tokens."""


def build(name: str, folder: Path, *, tiny: bool = False) -> None:
    """Write a model with random weights to a folder, in the format of the Hugging Face hub."""
    import torch

    torch.manual_seed(0)
    model, processor = PEERS[name](tiny)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)


def export(folder: Path, graphs: Path, int8: Path) -> None:
    """Export a model to ONNX with optimum, in float32 and in 8 bits.

    The graphs use a key-value cache, so that a step does not process the earlier words again.

    Args:
        folder: Folder of the model.
        graphs: Folder for the float32 graphs.
        int8: Folder for the 8-bit graphs.
    """
    from optimum.onnxruntime import ORTModelForVision2Seq, ORTQuantizer
    from optimum.onnxruntime.configuration import AutoQuantizationConfig

    model = ORTModelForVision2Seq.from_pretrained(folder, export=True, use_merged=True)
    model.save_pretrained(graphs)
    settings = AutoQuantizationConfig.avx512_vnni(is_static=False, per_channel=False)
    for path in sorted(graphs.glob("*.onnx")):
        ORTQuantizer.from_pretrained(graphs, file_name=path.name).quantize(
            save_dir=int8, quantization_config=settings, file_suffix=""
        )
    for target in (graphs, int8):
        for path in folder.glob("*.json"):  # the settings of the model, photos and captions
            (target / path.name).write_bytes(path.read_bytes())


def load_peer(folder: Path, form: str) -> tuple[Caption, float]:
    """Load a model from transformers, to run it on one processor thread.

    Args:
        folder: Folder of the model or of its graphs.
        form: float32, int8, ONNX float32 or ONNX int8.

    Returns:
        A function that captions a photo, and the size of the weights in MB.
    """
    import torch
    import transformers as hf

    torch.set_num_threads(1)
    if form.startswith("ONNX"):
        import onnxruntime
        from optimum.onnxruntime import ORTModelForVision2Seq

        session = onnxruntime.SessionOptions()
        session.intra_op_num_threads = session.inter_op_num_threads = 1
        model = ORTModelForVision2Seq.from_pretrained(folder, session_options=session)
        size = sum(path.stat().st_size for path in folder.glob("*.onnx*")) / 1e6
    else:
        config = hf.AutoConfig.from_pretrained(folder)
        model = getattr(hf, config.architectures[0]).from_pretrained(folder).eval()
        size = (quantize if form == "int8" else weights)(model)
    processor = hf.AutoImageProcessor.from_pretrained(folder, use_fast=False)
    given: dict[str, Any] = {}
    if model.config.model_type == "florence2":
        regions = (processor.size["height"] // 32) ** 2 + 1
        question = [model.config.image_token_id] * regions + list(QUESTION)
        given = {"input_ids": torch.tensor([question])}

    def caption(path: Path) -> int:
        """Caption a photo with exactly `WORDS` steps, and return the number of steps."""
        from PIL import Image

        with Image.open(path) as photo:
            pixels = processor(photo.convert("RGB"), return_tensors="pt").pixel_values
        with torch.inference_mode():
            tokens = model.generate(
                pixel_values=pixels, **given, num_beams=BEAMS, min_new_tokens=WORDS,
                max_new_tokens=WORDS,
            )  # fmt: skip
        return int(tokens.shape[1]) - 1  # the first token starts the caption

    return caption, size


def weights(model: Any) -> float:
    """Return the size of a model's weights in MB."""
    return sum(weight.numel() * weight.element_size() for weight in model.parameters()) / 1e6


def quantize(model: Any) -> float:
    """Quantize a model's linear layers to 8 bits in place, and return its size in MB.

    GPT-2 has its own linear layer, ``Conv1D``, with a transposed weight. PyTorch does not quantize
    this layer, so it is replaced with ``nn.Linear`` first.
    """
    import io
    import warnings

    import torch
    from torch import nn
    from transformers.pytorch_utils import Conv1D

    for parent in list(model.modules()):
        for name, layer in parent.named_children():
            if isinstance(layer, Conv1D):
                linear = nn.Linear(*layer.weight.shape)
                linear.weight, linear.bias = nn.Parameter(layer.weight.T.contiguous()), layer.bias
                setattr(parent, name, linear)
    with warnings.catch_warnings():  # deprecated, but PyTorch's own package has no other way
        warnings.simplefilter("ignore")
        torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8, inplace=True)
    stored = io.BytesIO()
    torch.save(model.state_dict(), stored)
    return stored.tell() / 1e6


def load_shipped(form: str) -> tuple[Caption, float]:
    """Load the shipped model, as 8-bit graphs (``int8``) or in PyTorch (``float32``).

    Returns:
        A function that captions a photo, and the size of the weights in MB.
    """
    import captioner
    from captioner.inference.find_model import find_model
    from captioner.inference.names import GRAPHS, WEIGHTS
    from captioner.memory import keep_freed_memory

    keep_freed_memory()  # as the command line does
    if form == "float32":
        import torch

        torch.set_num_threads(1)
    model = captioner.load(precision="fp32" if form == "float32" else "auto")
    files = (WEIGHTS,) if form == "float32" else GRAPHS
    size = sum((find_model("shipped") / name).stat().st_size for name in files) / 1e6

    def caption(path: Path) -> int:
        """Caption a photo, and return the number of steps, or 0 for a caption that is too short."""
        # Ten words, or nine and the end of the caption.
        found = model.caption(path, beam_size=BEAMS, min_length=WORDS - 1, max_length=WORDS)
        return max(WORDS, len(found.words)) if len(found.words) >= WORDS - 1 else 0

    return caption, size


def installed(names: Sequence[str]) -> float:
    """Return the size in MB of packages and all their dependencies, without files for GPUs."""
    total, waiting = 0, list(names)
    seen: set[str] = set()
    while waiting:
        name = waiting.pop().lower().replace("_", "-")
        if name in seen or name.startswith(CUDA):
            continue
        seen.add(name)
        try:
            package = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue  # a requirement of other platforms
        total += sum(_size(Path(str(file.locate()))) for file in package.files or ())
        waiting += _required(package)
    return total / 1e6


def _required(package: metadata.Distribution) -> Iterator[str]:
    """Yield the names of the packages that a package needs on this platform, without extras."""
    from packaging.requirements import Requirement

    for line in package.requires or ():
        needed = Requirement(line)
        if needed.marker is None or needed.marker.evaluate({"extra": ""}):
            yield needed.name


def _size(path: Path) -> int:
    """Return the size of a file in bytes, or 0 for a file that is only for GPUs."""
    serves_gpus = any(part in path.name for part in CUDA)
    return 0 if serves_gpus or not path.is_file() else path.stat().st_size


def main() -> None:
    """Caption photos with one model, and print the figures as JSON.

    The arguments are the name of the model, its form, its folder and the photos. The first photo is
    captioned before the measurement of the speed.
    """
    name, form, folder, *photos = sys.argv[1:]
    caption, size = load_shipped(form) if name == "captioner" else load_peer(Path(folder), form)
    steps = [caption(Path(photos[0]))]
    start = seconds = time.process_time()
    while seconds < start + SECONDS:
        steps += [caption(Path(photo)) for photo in photos[1:]]
        seconds = time.process_time()
    speed, highest = (len(steps) - 1) / (seconds - start), peak()
    needed = ("captioner",) if name == "captioner" else PACKAGES
    needed += ("torch", "torchvision") if (name, form) == ("captioner", "float32") else ()
    needed += ONNX_PACKAGES if form.startswith("ONNX") else ()
    print(
        json.dumps(
            {
                "size": size,
                "packages": installed(needed),
                "start": start,
                "peak": highest,
                "speed": speed,
                "steps": sorted(set(steps)),
            }
        )
    )


if __name__ == "__main__":
    os.environ["HF_HUB_OFFLINE"] = "1"
    main()
