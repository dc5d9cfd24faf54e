"""Captioning of photos with trained models: loading, inference and storage."""

import os

# From version 1.32, ONNX Runtime reports its use to Microsoft and stores an id of the device in the
# home folder, as soon as it is imported. captioner promises to run offline.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
