"""Training: data, model, optimizer and objective, the loop that connects them, the run folder."""
