"""The HTTP server with its web page, and the static site that shows the same page.

Read `app` first, which lists the modules that a request passes through. Photos and words are never
written to disk or logged.
"""
