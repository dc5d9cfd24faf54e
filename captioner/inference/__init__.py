"""Captioning of photos with trained models: loading, inference and storage."""

import os

# Recent versions of ONNX Runtime report their use to Microsoft and store an id of the device in the
# home folder, as soon as they are imported (seen in 1.32). captioner promises to run offline.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
