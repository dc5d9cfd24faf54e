"""Evaluation of captions, attention and confidence."""
