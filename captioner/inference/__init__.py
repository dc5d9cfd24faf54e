"""A trained model in use: photos in, captions out."""
