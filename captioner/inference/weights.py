"""Functions that read and write a model's weights, and build its network in torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from captioner.errors import ConfigError, ModelError
from captioner.geometry import Geometry
from captioner.inference.names import CONFIG
from captioner.inference.reading import READING, ReadingWords
from captioner.messages import counted
from captioner.model.backbones import ENCODERS
from captioner.model.build import DECODERS, SCORERS
from captioner.model.caption_model import CaptionModel
from captioner.model.encoder import Encoder
from captioner.model.preprocessing import Preprocessing
from captioner.model.reading import PhotoReading
from captioner.model.registry import Registry, what_is_missing
from captioner.options import DecoderConfig
from captioner.text.vocabulary import Vocabulary

_RANDOM = {"kaiming_uniform_", "uniform_", "normal_", "erfinv_"}
"""Names of slow functions of ``torch.nn.init`` and ``Tensor`` that initialize a tensor in place."""


def to_bytes(model: CaptionModel) -> bytes:
    """Return a model's weights, as float16 if possible, as the bytes of ``model.safetensors``."""
    return save(unshared({n: to_float16(tensor) for n, tensor in model.state_dict().items()}))


def unshared(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copy tensors to the CPU, each into its own memory.

    If a module is used in two places, its tensors share memory. safetensors cannot save such
    tensors.
    """
    places: set[int] = set()
    found = {}
    for name, tensor in tensors.items():
        held = tensor.detach().cpu().contiguous()
        place = held.untyped_storage().data_ptr()
        found[name] = held.clone() if place in places else held
        places.add(place)
    return found


def to_float16(tensor: Tensor) -> Tensor:
    """Convert a tensor of floats to float16, unless one of its values would overflow."""
    half = tensor.half() if tensor.is_floating_point() else tensor
    return half if bool(half.isfinite().all()) else tensor


def required_packages(model: CaptionModel, decoder: DecoderConfig) -> dict[str, Any]:
    """Return a config entry that names the model's scorer and encoder if they are not built in.

    A scorer computes the attention scores of the regions. The entry ``requires`` has one record for
    each of the two. Without such parts, the result is empty.
    """
    records = ENCODERS.provider(model.encoder.name), SCORERS.provider(decoder.attention)
    required = [record for record in records if record is not None]
    return {"requires": required} if required else {}


def read_network(
    path: Path,
    config: Mapping[str, Any],
    decoder: DecoderConfig,
    vocabulary: Vocabulary,
    reading: ReadingWords | None,
) -> CaptionModel:
    """Build the network that a model's config describes, and read its weights as float32.

    The network is returned on the CPU and in eval mode.

    Args:
        path: The file ``model.safetensors`` in a model folder.
        config: The content of the folder's ``config.json``.
        decoder: The architecture of the decoder.
        vocabulary: The vocabulary of the model. It determines the size of the output layer.
        reading: The words that the model can recognize in a photo, or None if the network has no
            part that recognizes words.

    Raises:
        ModelError: The file does not fit the config, or is damaged. Or the model's encoder or
            decoder, or the scorer that computes its attention scores, is not available.
    """
    preprocessing = Preprocessing.from_dict(config["preprocessing"])
    registries: dict[str, Registry[Any]] = {"encoder": ENCODERS, "scorer": SCORERS}
    for record in config.get("requires", ()):
        try:
            registries[record["kind"]][record["name"]]
        except KeyError:
            raise ModelError(f"{path.parent} needs {what_is_missing(record)}") from None
        except ConfigError as error:
            raise ModelError(f"cannot load {path.parent}: {error}") from error
    if decoder.order not in DECODERS:
        raise ModelError(
            f"{path.parent} needs the decoder {decoder.order!r}, but DECODERS in "
            "captioner/model/build.py does not contain it; use the code that trained the model"
        )
    name, geometry = config["encoder"]["name"], Geometry.from_dict(config["encoder"]["geometry"])
    tensors = _read(path)
    words, hidden = 0, 0
    if reading is not None:
        words, hidden = len(reading.stems), config[READING]["hidden"]
    # Check sizes before memory is allocated. No layer can be larger than the whole file.
    largest = decoder.hidden_dim**2, decoder.embed_dim * len(vocabulary), words * hidden, hidden
    if max(largest) > path.stat().st_size:
        raise _mismatch(path, "the layer sizes differ")
    with _WithoutInitialWeights():
        encoder = Encoder(name, image_size=preprocessing.image_size)
        sizes = len(vocabulary), len(vocabulary.styles)
        network = CaptionModel(encoder, decoder, preprocessing, *sizes, initialize=False)
        if reading is not None:
            network.reading = PhotoReading(network.feature_dim, words, hidden)
    own = network.state_dict()
    wrong = sorted(own.keys() ^ tensors.keys()) or [
        name for name in own if own[name].shape != tensors[name].shape
    ]
    if wrong:
        raise _mismatch(path, f"{counted(len(wrong), 'tensor')} differ, such as {wrong[0]}")
    tensors = {name: tensor.to(own[name].dtype, copy=True) for name, tensor in tensors.items()}
    network.load_state_dict(tensors, assign=True)
    network.geometry = geometry
    return network.eval()


class _WithoutInitialWeights(TorchFunctionMode):
    """A context manager in which new layers of this thread get uninitialized parameters.

    Drawing random weights takes longer than captioning a photo, and the weights from the file
    replace them anyway. Buffers are still initialized, because the file may lack them. Patching
    ``torch.nn.init`` instead would also affect layers that other threads create at the same time.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Call a function of torch unless it initializes a parameter."""
        del types
        options = kwargs or {}
        if getattr(func, "__name__", "") in _RANDOM:
            tensor = args[0] if args else options.get("tensor")
            if isinstance(tensor, nn.Parameter):
                return tensor
        return func(*args, **options)


def _read(path: Path) -> dict[str, Tensor]:
    try:
        tensors = load_file(path)
    except (SafetensorError, OSError) as error:
        raise ModelError(
            f"{path} is damaged or not a safetensors file ({error}); copy the whole folder again"
        ) from error
    if not all(bool(tensor.isfinite().all()) for tensor in tensors.values()):
        raise ModelError(f"{path} contains NaN or infinite weights; train the model again")
    return tensors


def _mismatch(path: Path, what: str) -> ModelError:
    return ModelError(
        f"{path} does not match its {CONFIG} ({what}); copy both files from the same model, or "
        "use the code that trained the model"
    )
