"""Captioning of photos with trained models: loading, inference and storage."""
