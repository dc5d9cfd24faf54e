"""The static site that captions photos in the browser."""
