"""Jobs too large for one run: inputs divided into parts, and parts processed exactly once."""
