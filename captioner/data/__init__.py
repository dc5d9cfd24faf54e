"""Data of runs: photos, COCO captions, cached features, and batches."""
