"""Search over a step function."""
