"""Gauges on Triton's /metrics endpoint."""

from __future__ import annotations

import triton_python_backend_utils as pb_utils

from sangam_backend.engine import Engine

GAUGES = {
    "sangam_requests_waiting": "Requests that wait for a prefill",
    "sangam_requests_decoding": "Requests that decode a block",
    "sangam_kv_pages_used": "KV pages reserved by requests",
    "sangam_kv_pages_total": "KV pages of the pool",
    "sangam_deficit_tokens": "Prefill budget carried over to the next iteration",
}


class Gauges:
    """Written from one thread, and only what has changed."""

    def __init__(self, labels: dict[str, str]) -> None:
        # The families must outlive their metrics, or Triton drops both.
        self._families = {
            name: pb_utils.MetricFamily(
                name=name, description=text, kind=pb_utils.MetricFamily.GAUGE
            )
            for name, text in GAUGES.items()
        }
        self._gauges = {
            name: family.Metric(labels=labels) for name, family in self._families.items()
        }
        self._written: dict[str, float] = {}

    def close(self) -> None:
        """Drops what Triton must free before its shared memory is gone."""
        self._gauges.clear()
        self._families.clear()

    def update(self, engine: Engine) -> None:
        scheduler = engine.scheduler
        values = {
            "sangam_requests_waiting": len(scheduler.waiting),
            "sangam_requests_decoding": len(scheduler.decoding),
            "sangam_kv_pages_used": engine.pages.num_used,
            "sangam_kv_pages_total": engine.pages.num_pages,
            "sangam_deficit_tokens": scheduler.deficit,
        }
        for name, value in values.items():
            if self._written.get(name) != value:
                self._gauges[name].set(float(value))
                self._written[name] = value
