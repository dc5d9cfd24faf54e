"""HTTP server: photos in, captions out, and a web page to explore them; a static site.

`app` describes the way of a request. Photos and words are never written to disk or logged.
"""
