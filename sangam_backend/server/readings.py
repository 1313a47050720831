"""What is measured of an instance: names and meanings of the metrics, and how they are read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from sangam_backend.histogram import Histogram

if TYPE_CHECKING:
    from sangam_backend.engine import Engine


class Series(NamedTuple):
    """One line of /metrics."""

    name: str
    label: tuple[str, str] | None = None


Read = Callable[["Engine"], float]

WAITING = Series("sangam_requests_waiting")
UPTIME = Series("sangam_uptime_seconds")
HOST_GAUGES = {UPTIME.name: "Since the instance has been loaded, written every second"}
"""What needs no engine."""

GAUGES: dict[str, tuple[str, Read]] = {
    WAITING.name: (
        "Requests that wait to be taken in, for a prefill, or for pages to pull K/V into",
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
ENGINE_COUNTERS: dict[str, tuple[str, Read]] = {
    "sangam_iteration_tokens_total": (
        "Tokens that went through the model",
        lambda e: e.counts.tokens,
    ),
    "sangam_blocks_finished_total": ("Blocks committed here", lambda e: e.counts.blocks),
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
    "sangam_kv_pull_seconds_total": (
        "From the launch of pulls to when they were found done",
        lambda e: e.counts.pull_seconds,
    ),
    "sangam_prefills_repeated_total": (
        "Prefills run again because their K/V could not be pulled",
        lambda e: e.counts.repeated,
    ),
}
LABELLED_COUNTERS = {
    "sangam_iterations_total": ("Iterations, by what they hold", "kind"),
    "sangam_forwards_total": ("Forwards of one block, prefills and decodes", "kind"),
    "sangam_requests_total": ("Requests that have ended, by outcome", "outcome"),
}
TOKEN_COUNTERS = {
    "sangam_prompt_tokens_total": "Tokens of the prompts taken in",
    "sangam_generated_tokens_total": "Tokens sent to clients",
}
HISTOGRAMS = {
    "sangam_queue_seconds": "From the arrival of a request to its first prefill",
    "sangam_first_text_seconds": "From the arrival of a request to its first tokens",
    "sangam_between_commits_seconds": "Between tokens that became known together and the next",
    "sangam_request_seconds": "From the arrival of a request to its end",
    "sangam_batch_size": "Requests of an iteration",
}
# Triton 24.10 gives Python models no histograms, so each is counters under the names that
# Prometheus looks for.
COUNTERS: dict[str, str] = {
    **{name: text for name, (text, _) in (*ENGINE_COUNTERS.items(), *LABELLED_COUNTERS.items())},
    **TOKEN_COUNTERS,
    **{
        f"{name}_{part}": text
        for name, text in HISTOGRAMS.items()
        for part in ("bucket", "sum", "count")
    },
}


def outcome_series(outcome: str) -> Series:
    return Series("sangam_requests_total", ("outcome", outcome))


class Tally:
    """What an instance counts of its clients."""

    def __init__(self) -> None:
        self.queued = 0
        """Requests that wait to be accepted."""
        self.tokens: Counter[str] = Counter()
        self.outcomes: Counter[str] = Counter()
        """Of requests that have not failed; failures are for the host to count."""
        self.first_text = Histogram()
        self.between_commits = Histogram()
        self.whole = Histogram()


def read_all(engine: Engine, tally: Tally) -> dict[Series, float]:
    values: dict[Series, float] = {
        Series(name): float(read(engine))
        for table in (GAUGES, ENGINE_COUNTERS)
        for name, (_, read) in table.items()
    }
    values[WAITING] += tally.queued
    for name, counted in (
        ("sangam_iterations_total", engine.counts.iterations),
        ("sangam_forwards_total", engine.counts.forwards),
    ):
        label = LABELLED_COUNTERS[name][1]
        values |= {Series(name, (label, value)): count for value, count in dict(counted).items()}
    values |= {outcome_series(value): count for value, count in dict(tally.outcomes).items()}
    values |= {Series(name): tally.tokens[name] for name in TOKEN_COUNTERS}
    for name, histogram in (
        ("sangam_queue_seconds", engine.counts.queue),
        ("sangam_first_text_seconds", tally.first_text),
        ("sangam_between_commits_seconds", tally.between_commits),
        ("sangam_request_seconds", tally.whole),
        ("sangam_batch_size", engine.counts.batch),
    ):
        values |= dict(_read_histogram(name, histogram))
    return values


def _read_histogram(name: str, histogram: Histogram) -> Iterator[tuple[Series, float]]:
    counts = histogram.cumulative()
    for bound, count in zip((*map(str, histogram.bounds), "+Inf"), counts):
        yield Series(f"{name}_bucket", ("le", bound)), count
    yield Series(f"{name}_sum"), histogram.sum
    yield Series(f"{name}_count"), counts[-1]
