"""HTTP server: photos in, captions out, and a web page to explore them.

    app.py          the application and its error handlers
    routes.py       the endpoints that take photos
    uploads.py      body of a request -> photos and options: forms, JSON, bytes
    requests.py     options -> `CaptionRequest`
    service.py      one request: admission, body, decoding, captions, timeouts
    bulk.py         many photos in one request
    overlays.py     pictures of where the model looked
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
    api_pages.py    /docs and /redoc
    limits.py       resource limits
    api_description.py  request bodies in the OpenAPI schema

Photos and words are never written to disk or logged.
"""
