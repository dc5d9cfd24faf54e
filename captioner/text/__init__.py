"""Words and tokens."""
