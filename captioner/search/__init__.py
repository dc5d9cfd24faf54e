"""The search for captions: beam search, sampling, and the rules that captions follow."""
