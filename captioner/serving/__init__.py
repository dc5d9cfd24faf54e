"""HTTP server: photos in, captions out, and a web page to explore them.

    app.py          the application: routes, error handlers, the checks around them
    server.py       runs it: limits on connections, signals, draining
    options.py      options of the command, limits
    security.py     Host and Origin checks, response headers
    keys.py         API keys and their rate limit
    photos.py       body of a request -> photos and options: JSON, bytes, and forms (forms.py)
    requests.py     options -> `CaptionRequest`
    service.py      one request: admission, body, decoding, captions, timeouts
    bulk.py         many photos in one request
    batching.py     one thread owns the model and captions waiting requests in batches
    outputs.py      captions -> JSON, pictures, raw maps
    responses.py    response schema and errors
    observe.py      metrics and the access log
    page.py         the web page
    api_docs.py     request bodies in the OpenAPI schema, /docs and /redoc
    client.py       a client
    site/           the static site that captions in the browser

Photos and words are never written to disk or logged.
"""
