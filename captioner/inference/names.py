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
"""All files of a model folder. Other files in the folder are not read, downloaded or pushed."""
EXPORTED = "exported"
"""Config entry of a folder with graphs: opset, precision, special tokens and ``source``, the digest
of the exported weights."""

BEST = "best"
"""Name of the folder with the best model, inside a run folder."""
RUN_CONFIG = "config.yaml"
"""Name of the file with the settings, inside a run folder."""

SHIPPED = "shipped"
"""Name of the model in the package, which is the default."""
SHIPPED_MODEL = Path(__file__).parents[1] / "pretrained"
