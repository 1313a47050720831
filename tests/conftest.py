"""Settings of all tests."""

from __future__ import annotations

import os

# Tiny models gain nothing from threads, and lose much where two processes spin on two cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
