"""Caption metrics."""
