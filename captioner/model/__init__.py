"""Encoder, attention, decoder, and the model they make."""
