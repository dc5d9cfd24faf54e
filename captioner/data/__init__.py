"""What runs read: photos, COCO captions, cached features, shards, and batches of them."""
