"""Prometheus metrics of the controller's HTTP side, and the registry that /metrics prints."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_SECONDS = (0.005, 0.025, 0.1, 0.25, 1.0, 2.5, 10.0)
_METHODS = frozenset({"GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS"})


class HttpMetrics:
    """Requests by route template, never by path: labels stay bounded whatever is asked."""

    def __init__(self, registry: CollectorRegistry) -> None:
        labels = ("method", "route")
        self._requests = Counter(
            "whimbrel_http_requests_total", "Requests answered.", (*labels, "status"), registry=registry
        )
        self._seconds = Histogram(
            "whimbrel_http_request_duration_seconds", "Time to answer.", labels, buckets=_SECONDS, registry=registry
        )
        self.streams = Gauge("whimbrel_event_streams", "Open event streams.", registry=registry)

    def observe(self, method: str, route: str, status: int, seconds: float) -> None:
        """Count one answered request; status 0 means that the reader left before an answer."""
        method = method if method in _METHODS else "other"
        self._requests.labels(method, route, str(status)).inc()
        self._seconds.labels(method, route).observe(seconds)
