"""HTTP server: photos in, captions out, and a web page to explore them.

    app.py          routes and error handlers
    requests.py     query parameters -> `CaptionRequest`
    service.py      one request: admission, body, decoding, captions, timeouts
    batching.py     one thread owns the model and captions waiting requests in batches
    responses.py    response schema and errors
    connections.py  limits on the number and idle time of connections
    security.py     Host and Origin checks, response headers
    metrics.py      Prometheus metrics and the access log
    page.py         the web page
    limits.py       resource limits

Photos and words are never written to disk or logged.
"""
