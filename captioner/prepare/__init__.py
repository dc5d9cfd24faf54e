"""What ``captioner prepare`` writes: COCO captions files, cached features and shards."""
