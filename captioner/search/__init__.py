"""Caption search over a step function."""
