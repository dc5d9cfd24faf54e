"""What is only fast: each module computes a formula of the model in less time."""
