"""`sangam health`: whether a server answers, or at least works."""

from __future__ import annotations

import time
from typing import Any

from sangam_client import Client, SangamError

from sangam_backend.scrape import read_metrics

PROMPT = [0]
"""A token id of every vocabulary."""
SAMPLING: dict[str, Any] = {"max_tokens": 1, "unmasking": "threshold", "confidence_threshold": 0.0}
"""One forward."""
WORK = ("sangam_iterations_total", "sangam_blocks_handed_over_total")


def check(client: Client, metrics_url: str, deadline: float) -> tuple[bool, str]:
    """Asks for one token, and says whether the server is well, and why.

    A server that is too busy to answer within the deadline is well as long as it gets on.

    Args:
        deadline: in seconds, for the answer; reading the metrics may take as long again.
    """
    started, before = time.monotonic(), _work_done(metrics_url, deadline)
    try:
        client.generate(PROMPT, timeout=deadline, **SAMPLING)
    except SangamError as error:
        work = _work_done(metrics_url, deadline) - before
        if work > 0:
            return True, f"busy, with {work:.0f} iterations since it was asked: {error}"
        return False, f"no answer: {error}"
    return True, f"answered in {time.monotonic() - started:.2f} s"


def _work_done(metrics_url: str, timeout: float) -> float:
    try:
        metrics = read_metrics(metrics_url, timeout)
    except OSError:
        return 0.0
    return sum(metrics.get(name, 0.0) for name in WORK)
