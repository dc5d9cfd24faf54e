"""An HTTP server with a web page for captioning, and a static site with the same page.

`app` describes the path of a request. Photos and words are never written to disk or logged.
"""
