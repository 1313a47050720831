"""What Triton's /metrics endpoint says of an instance."""

from __future__ import annotations

from collections.abc import Mapping

import triton_python_backend_utils as pb_utils

from sangam_backend.server.readings import COUNTERS, GAUGES


class Metrics:
    """Written from one thread."""

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
        self._counted = dict.fromkeys(COUNTERS, 0.0)
        """By the engine process of the moment, which counts from 0."""

    def write(self, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            if name in GAUGES:
                self._metrics[name].set(value)
            else:
                self._metrics[name].increment(value - self._counted[name])
                self._counted[name] = value

    def restart(self) -> None:
        """The engine process has ended."""
        self._counted = dict.fromkeys(COUNTERS, 0.0)
        for name in GAUGES:
            self._metrics[name].set(0.0)

    def close(self) -> None:
        """Drops what Triton must free before its shared memory is gone."""
        self._metrics.clear()
        self._families.clear()
