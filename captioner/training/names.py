"""Names of the files and folders of a run, besides those that ``inference.names`` has."""

from captioner.inference.names import BEST, RUN_CONFIG

STATE = "state.safetensors"
METRICS = "metrics.jsonl"
STEPS = "steps.jsonl"
SAMPLES = "samples"
TENSORBOARD = "tensorboard"
"""Also the name of the tracker that writes it."""

RUN_FILES = (STATE, METRICS, STEPS, RUN_CONFIG, BEST, SAMPLES, TENSORBOARD)
"""Everything in a run folder that ``force`` replaces."""
