"""HTTP server: photos in, captions out, and a web page to explore them; a static site.

A request passes `server` (connections), `observe` (log), `security` (hosts, origins, keys), `app`
(routes), `service` or `bulk`, `photos` (its body) and `lanes` (the model). Photos and words are
never written to disk or logged.
"""
