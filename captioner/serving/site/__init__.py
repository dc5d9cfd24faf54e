"""A static site that captions photos in the browser."""
