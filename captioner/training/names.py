"""Names of the files and folders of a run, in addition to the names in ``inference.names``."""

from captioner.inference.names import BEST, RUN_CONFIG

STATE = "state.safetensors"
"""The checkpoint: the training state, from which a run is resumed."""
METRICS = "metrics.jsonl"
"""Results of the validations, one line per epoch."""
STEPS = "steps.jsonl"
"""Training curves, one line every ``training.log_every`` steps."""
SAMPLES = "samples"
"""Folder with captions and figures of a few validation photos."""
TENSORBOARD = "tensorboard"
"""Folder with TensorBoard's files. accelerate's tracker that writes them has the same name."""

RUN_FILES = (STATE, METRICS, STEPS, RUN_CONFIG, BEST, SAMPLES, TENSORBOARD)
"""Files and folders of a run. If a folder contains any of them, a new run needs ``force``."""
