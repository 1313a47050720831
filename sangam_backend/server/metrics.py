"""What Triton's /metrics endpoint says of an instance."""

from __future__ import annotations

from collections.abc import Callable

import triton_python_backend_utils as pb_utils

from sangam_backend.engine import Engine

Read = Callable[[Engine], float]

GAUGES: dict[str, tuple[str, Read]] = {
    "sangam_requests_waiting": (
        "Requests that wait for a prefill, or for pages to pull K/V into",
        lambda e: len(e.scheduler.waiting) + len(e.scheduler.arriving),
    ),
    "sangam_requests_decoding": (
        "Requests that decode a block",
        lambda e: len(e.scheduler.decoding) + len(e.scheduler.pulling),
    ),
    "sangam_requests_handed_over": (
        "Requests whose block another instance decodes",
        lambda e: len(e.scheduler.handed_over),
    ),
    "sangam_prefill_tokens_waiting": (
        "Tokens of the prefills that wait",
        lambda e: e.scheduler.waiting_tokens,
    ),
    "sangam_kv_pages_used": ("KV pages reserved by requests", lambda e: e.pages.num_used),
    "sangam_kv_pages_total": ("KV pages of the pool", lambda e: e.pages.num_pages),
    "sangam_deficit_tokens": (
        "Prefill budget carried over to the next iteration",
        lambda e: e.scheduler.deficit,
    ),
}
COUNTERS: dict[str, tuple[str, Read]] = {
    "sangam_blocks_handed_over_total": (
        "Blocks prefilled here and decoded elsewhere",
        lambda e: e.counts.handed_over,
    ),
    "sangam_prefill_overflows_total": (
        "Blocks handed over without a prefill, because too many waited",
        lambda e: e.counts.overflowed,
    ),
    "sangam_kv_pulled_bytes_total": (
        "K/V pulled from other instances",
        lambda e: e.counts.pulled_bytes,
    ),
    "sangam_prefills_repeated_total": (
        "Prefills run again because their K/V could not be pulled",
        lambda e: e.counts.repeated,
    ),
}


class Metrics:
    """Written from one thread, and only what has changed."""

    def __init__(self, labels: dict[str, str]) -> None:
        # The families must outlive their metrics, or Triton drops both.
        self._families = {
            name: pb_utils.MetricFamily(name=name, description=text, kind=kind)
            for kind, table in (
                (pb_utils.MetricFamily.GAUGE, GAUGES),
                (pb_utils.MetricFamily.COUNTER, COUNTERS),
            )
            for name, (text, _) in table.items()
        }
        self._metrics = {
            name: family.Metric(labels=labels) for name, family in self._families.items()
        }
        self._written = dict.fromkeys(self._metrics, 0.0)

    def close(self) -> None:
        """Drops what Triton must free before its shared memory is gone."""
        self._metrics.clear()
        self._families.clear()

    def update(self, engine: Engine) -> None:
        for name, (_, read) in GAUGES.items():
            if (value := float(read(engine))) != self._written[name]:
                self._metrics[name].set(value)
                self._written[name] = value
        for name, (_, read) in COUNTERS.items():
            if (value := float(read(engine))) != self._written[name]:
                self._metrics[name].increment(value - self._written[name])
                self._written[name] = value
