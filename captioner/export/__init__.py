"""Exports models to ONNX: graphs that run without torch, see ``captioner.onnx_engine``."""
