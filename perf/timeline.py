"""What each engine did over time, from the files that `sangam serve --event-log` writes.

    python perf/timeline.py EVENTS --output timeline.svg

Draws three panels for each engine process: requests in its iterations, prefills and decodes; the
deficit; KV pages and waiting requests. Engines share the time axis.
"""

from __future__ import annotations

import argparse
import csv
import sys
from pathlib import Path
from typing import Any, NamedTuple

SUFFIX = ".iterations.csv"
PANELS = 3


class Timeline(NamedTuple):
    """An engine process: its columns by name, numbers in the order of the iterations."""

    engine: str
    columns: dict[str, list[float]]


def read_timelines(directory: Path) -> list[Timeline]:
    """Engines that have run at least one iteration, by name.

    A last row that was cut off, of a process killed or a disk full, is left out.
    """
    timelines = []
    for path in sorted(directory.glob(f"*{SUFFIX}")):
        with path.open(newline="") as file:
            header, *rows = csv.reader(file)
        whole = [row for row in rows if len(row) == len(header) and row[-1]]
        columns = {
            name: [float(row[index]) for row in whole]
            for index, name in enumerate(header)
            if name != "kind"
        }
        if whole:
            timelines.append(Timeline(path.name.removesuffix(SUFFIX), columns))
    return timelines


def draw(timelines: list[Timeline]) -> Any:
    """A matplotlib figure."""
    from matplotlib.figure import Figure

    start = min(timeline.columns["time"][0] for timeline in timelines)
    figure = Figure(figsize=(12, 4.5 * len(timelines)), layout="constrained")
    axes = figure.subplots(PANELS * len(timelines), 1, sharex=True)
    for index, timeline in enumerate(timelines):
        draw_engine(axes[PANELS * index : PANELS * (index + 1)], timeline, start)
    axes[-1].set_xlabel(f"seconds after {start:.3f} (since the epoch)")
    return figure


def draw_engine(axes: Any, timeline: Timeline, start: float) -> None:
    batch, deficit, pages = axes
    columns = timeline.columns
    begins = [moment - start for moment in columns["time"]]
    batch.set_title(timeline.engine, loc="left", fontsize=9)
    draw_bars(batch, begins, columns, [0.0] * len(begins), "decodes", "tab:blue")
    draw_bars(batch, begins, columns, columns["decodes"], "prefills", "tab:orange")
    batch.set_ylabel("requests")
    batch.legend(loc="upper right")
    deficit.step(begins, columns["deficit"], where="post")
    deficit.set_ylabel("deficit, tokens")
    pages.step(begins, columns["kv_pages"], where="post")
    pages.set_ylabel("KV pages", color="tab:blue")
    waiting = pages.twinx()
    waiting.step(begins, columns["waiting"], where="post", color="tab:red")
    waiting.set_ylabel("waiting", color="tab:red")
    for each in (batch, deficit, pages, waiting):
        each.set_ylim(bottom=0, top=max(1, each.get_ylim()[1]))


def draw_bars(
    axes: Any,
    begins: list[float],
    columns: dict[str, list[float]],
    bottoms: list[float],
    name: str,
    color: str,
) -> None:
    """A bar for each iteration, as long as it took; all as one image, for there may be many."""
    from matplotlib.collections import PolyCollection

    bars = [
        [(begin, bottom), (begin + width, bottom), (begin + width, top), (begin, top)]
        for begin, width, bottom, height in zip(begins, columns["seconds"], bottoms, columns[name])
        for top in [bottom + height]
    ]
    axes.add_collection(
        PolyCollection(bars, facecolor=color, linewidth=0, label=name, rasterized=True)
    )
    axes.autoscale_view()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path, help="what --event-log named")
    parser.add_argument("--output", type=Path, default=Path("timeline.svg"))
    args = parser.parse_args()
    timelines = read_timelines(args.directory)
    if not timelines:
        sys.exit(f"{args.directory} has no iterations")
    draw(timelines).savefig(args.output)
    for engine, columns in timelines:
        count = len(columns["time"])
        print(f"{engine}: {count} iterations, {sum(columns['seconds']):.1f} s in them")


if __name__ == "__main__":
    main()
