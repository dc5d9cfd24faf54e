"""Exports models to ONNX: graphs that run without torch (``captioner.inference.onnx_engine``)."""
