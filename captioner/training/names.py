"""Names of the files and folders of a run, in addition to the names in ``inference.names``."""

from captioner.inference.names import BEST, RUN_CONFIG

STATE = "state.safetensors"
METRICS = "metrics.jsonl"
STEPS = "steps.jsonl"
SAMPLES = "samples"
TENSORBOARD = "tensorboard"
"""Name of the folder, and of the tracker that writes it."""

RUN_FILES = (STATE, METRICS, STEPS, RUN_CONFIG, BEST, SAMPLES, TENSORBOARD)
"""Files and folders in a run folder that ``force`` replaces."""
