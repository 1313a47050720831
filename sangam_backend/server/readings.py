"""What is measured of an engine: the names and meanings of the metrics, and how they are read."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sangam_backend.engine import Engine

Read = Callable[["Engine"], float]

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
READS = {name: read for table in (GAUGES, COUNTERS) for name, (_, read) in table.items()}


def read_all(engine: Engine) -> dict[str, float]:
    return {name: float(read(engine)) for name, read in READS.items()}
