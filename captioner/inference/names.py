"""Names of the files in a model folder and a run folder, and of the model in the package."""

from pathlib import Path

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
TOKENIZER = "tokenizer.json"
CONFIDENCE = "confidence.safetensors"
GRAMMAR = "grammar.safetensors"
FREQUENCIES = "document_frequencies.json.gz"
CARD = "README.md"
ENCODER_GRAPH, DECODER_GRAPH = GRAPHS = ("encoder.onnx", "decoder.onnx")
MODEL_FILES = (CONFIG, WEIGHTS, *GRAPHS, TOKENIZER, FREQUENCIES, CONFIDENCE, GRAMMAR, CARD)
"""All files of a model folder. Nothing else is read from it, downloaded or pushed."""
EXPORTED = "exported"
"""Entry of the config of a folder with graphs: opset, precision, special tokens and source, the
digest of the weights that were exported."""

BEST = "best"
"""In a run folder, the folder of its best model."""
RUN_CONFIG = "config.yaml"
"""In a run folder, its settings."""

SHIPPED = "shipped"
"""Name of the model that is included, the default."""
SHIPPED_MODEL = Path(__file__).parents[1] / "pretrained"
