"""What runs read: photos, COCO captions, cached features, and batches of them."""
