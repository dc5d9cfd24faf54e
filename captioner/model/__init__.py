"""The neural network: encoder, attention and decoder, and the model that joins them."""
