"""The web server: photos come in over HTTP, captions go out, a page shows them.

    app.py       the routes and what each answers
    asks.py      query parameters to what is asked of the model
    service.py   a request's way: admission, body, decoding, captions; its limits
    batching.py  one thread owns the model; requests that wait are captioned together
    answers.py   the answers' schema, refusals
    connections.py  how many, and how long without a word of use
    security.py  who may ask (Host, Origin), headers on every answer
    metrics.py   what is counted and logged
    front.py     the page

Nothing that is sent is written to disk or logged.
"""
