"""What Triton's /metrics endpoint says of an instance."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import Any

import triton_python_backend_utils as pb_utils

from sangam_backend.server.readings import COUNTERS, GAUGES, HOST_GAUGES, UPTIME, Series

ENGINE_GAUGES = {name: text for name, (text, _) in GAUGES.items()}


class Metrics:
    """Any thread may write."""

    def __init__(self, labels: dict[str, str]) -> None:
        self._labels = labels
        self._lock = threading.Lock()
        self._started = time.monotonic()
        # The families must outlive their metrics, or Triton drops both.
        self._families = {
            name: pb_utils.MetricFamily(name=name, description=text, kind=kind)
            for kind, table in (
                (pb_utils.MetricFamily.GAUGE, HOST_GAUGES | ENGINE_GAUGES),
                (pb_utils.MetricFamily.COUNTER, COUNTERS),
            )
            for name, text in table.items()
        }
        self._metrics: dict[Series, Any] = {}
        self._counted: dict[Series, float] = {}
        """By the engine process of the moment, which counts from 0."""

    def write(self, values: Mapping[Series, float]) -> None:
        """Takes over what the engine process has read."""
        with self._lock:
            for series, value in values.items():
                metric = self._metric(series)
                if series.name in GAUGES:
                    metric.set(value)
                else:
                    metric.increment(value - self._counted.get(series, 0.0))
                    self._counted[series] = value

    def beat(self) -> None:
        """The sign of life that the launcher looks for."""
        with self._lock:
            self._metric(UPTIME).set(time.monotonic() - self._started)

    def count(self, series: Series) -> None:
        """Counts one on top of what the engine process has read."""
        with self._lock:
            self._metric(series).increment(1.0)

    def restart(self) -> None:
        """The engine process has ended."""
        with self._lock:
            self._counted.clear()
            for series, metric in self._metrics.items():
                if series.name in GAUGES:
                    metric.set(0.0)

    def close(self) -> None:
        """Drops what Triton must free before its shared memory is gone."""
        self._metrics.clear()
        self._families.clear()

    def _metric(self, series: Series) -> Any:
        if series not in self._metrics:
            labels = self._labels | dict([series.label] if series.label else [])
            self._metrics[series] = self._families[series.name].Metric(labels=labels)
        return self._metrics[series]
