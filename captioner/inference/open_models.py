"""Selection of the engine for a model: ONNX Runtime for its graphs, or torch for its weights."""

from __future__ import annotations

from collections.abc import Sequence

from captioner.errors import ConfigError
from captioner.hardware import Precision, has_gpu
from captioner.inference.engine import Ensemble
from captioner.inference.stored_model import StoredModel


def open_models(models: Sequence[StoredModel], device: str, precision: Precision) -> Ensemble:
    """Prepare one or several models with the same vocabulary for inference, with ONNX or torch.

    For ``device``, ``precision`` and errors see ``captioner.load``.
    """
    for number, other in enumerate(models[1:], 2):
        if other.vocabulary != models[0].vocabulary:
            mine, theirs = (
                f"{len(each)} words, styles {', '.join(each.styles) or 'none'}"
                for each in (models[0].vocabulary, other.vocabulary)
            )
            raise ConfigError(
                f"the vocabularies of model 1 ({mine}) and model {number} ({theirs}) differ; use "
                "models that were trained with the same words and styles"
            )
    if all(runs_graphs(one, device, precision) for one in models):
        from captioner.inference.onnx_engine import OnnxEngine

        return Ensemble([OnnxEngine(one, device, precision) for one in models])
    if len(models) > 1 and not all(one.has_weights for one in models):
        raise ConfigError(
            "the models of an ensemble must all have weights or must all be exported; leave out "
            "--precision and --device, or use the folders that the models were exported from"
        )
    for one in models:
        one.require_weights(f"precision {precision!r} on device {device!r}")
    from captioner.inference.torch_engine import TorchEngine

    return Ensemble([TorchEngine(one.model, device, precision) for one in models])


def runs_graphs(stored: StoredModel, device: str, precision: str) -> bool:
    """Return whether a model is run from its graphs instead of its weights.

    If a model has both graphs and weights, its graphs are run only on a CPU and with the precision
    ``auto``.
    """
    if not (stored.has_graphs and stored.has_weights):
        return stored.has_graphs
    return precision == "auto" and (device == "cpu" or (device == "auto" and not has_gpu()))
