"""Our metrics, read from the text of Triton's /metrics."""

from __future__ import annotations

import re
from urllib.request import urlopen

HELD_REQUESTS = (
    "sangam_requests_waiting",
    "sangam_requests_decoding",
    "sangam_requests_handed_over",
)
"""All 0 when no request is in any instance."""


def read_metrics(url: str, timeout: float = 10.0) -> dict[str, float]:
    """See `sum_metrics`. Raises OSError."""
    with urlopen(url, timeout=timeout) as response:
        return sum_metrics(response.read().decode())


def sum_metrics(text: str) -> dict[str, float]:
    """Each of our metrics by its name, the sum over all labels."""
    sums: dict[str, float] = {}
    for line in text.splitlines():
        if line.startswith("sangam_"):
            name, value = re.split("[{ ]", line)[0], line.split()[-1]
            sums[name] = sums.get(name, 0.0) + float(value)
    return sums
