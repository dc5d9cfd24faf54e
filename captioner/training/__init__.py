"""The loop, its state, its run folder."""
