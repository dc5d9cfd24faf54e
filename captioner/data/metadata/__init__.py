"""Descriptions where photo software looks for them: XMP packets, JPEG and PNG files."""
