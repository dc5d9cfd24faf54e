"""Jobs for millions of photos, divided into parts that are each processed exactly once."""
