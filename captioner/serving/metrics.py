"""Prometheus metrics: counts, durations and sizes, never request contents."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_PHOTOS = (1, 2, 4, 8, 16, 32, 64, 128)


class Metrics:
    """The metrics of one application, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        self.requests = Counter(
            "captioner_requests", "Requests served.", ["route", "status"], registry=registry
        )
        self.seconds = Histogram(
            "captioner_request_seconds",
            "Seconds from the request headers to the end of the response.",
            ["route"],
            buckets=_SECONDS,
            registry=registry,
        )
        self.photos = Counter("captioner_photos_captioned", "Photos captioned.", registry=registry)
        self.batches = Histogram(
            "captioner_batch_photos", "Photos per batch.", buckets=_PHOTOS, registry=registry
        )
        self.refused = Counter(
            "captioner_refused", "Requests refused, by reason.", ["reason"], registry=registry
        )

    def on_batch(self, photos: int) -> None:
        """Count a batch."""
        self.photos.inc(photos)
        self.batches.observe(photos)

    def watch(self, waiting: Callable[[], int], in_flight: Callable[[], int]) -> None:
        """Export the queue lengths: photos waiting for the model and requests in flight."""
        for name, text, value in (
            ("captioner_waiting_photos", "Photos waiting for the model.", waiting),
            ("captioner_held_requests", "Requests in flight.", in_flight),
        ):
            Gauge(name, text, registry=self.registry).set_function(value)
