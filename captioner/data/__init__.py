"""Photos and captions: reading, importing, preprocessing, batches."""
