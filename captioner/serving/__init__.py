"""HTTP server: photos in, captions out, and a web page to explore them.

    app.py          routes and error handlers
    requests.py     query parameters -> `CaptionRequest`
    service.py      one request: admission, body, decoding, captions, timeouts
    batching.py     one thread owns the model and captions waiting requests in batches
    responses.py    response schema and errors
    connections.py  limits on the number and idle time of connections
    throughput.py   measures Retry-After
    security.py     Host and Origin checks, response headers
    keys.py         API keys and their rate limit
    lifecycle.py    draining: complete accepted requests on shutdown
    paths.py        which paths the checks apply to
    metrics.py      Prometheus metrics
    access_log.py   one line per request
    page.py         the web page
    limits.py       resource limits

Photos and words are never written to disk or logged.
"""
