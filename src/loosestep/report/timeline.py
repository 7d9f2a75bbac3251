"""A run's events in the Trace Event Format, for https://ui.perfetto.dev and chrome://tracing.

A node is a process, a rank two threads of it: what it does, and the exchanges in its background.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from loosestep.report.spans import Activity, Span, merged
from loosestep.runfolder.config import write_whole

MOST_SPANS = 100_000


def write_timeline(path: Path, activities: Sequence[Activity], node_of: Mapping[int, int]) -> None:
    """One file of complete events, times in microseconds since the first one."""
    first = min((activity.span[0] for activity in activities), default=0.0)
    events = [
        event
        for activity in activities
        for event in _events(activity, node_of.get(activity.rank, 0), first)
    ]
    write_whole(
        path, [json.dumps({"displayTimeUnit": "ms", "traceEvents": events}, separators=(",", ":"))]
    )


def _events(activity: Activity, node: int, first: float) -> list[dict[str, Any]]:
    does = 2 * activity.rank
    exchanges = 2 * activity.rank + 1
    names = [
        _name("process_name", f"node {node}", node, does),
        _name("thread_name", f"rank {activity.rank}", node, does),
        _name("thread_name", f"rank {activity.rank}: exchanges", node, exchanges),
    ]
    kinds: list[tuple[str, int, list[Span]]] = [
        ("compute", does, list(activity.computes())),
        ("wait", does, merged(activity.waits)),
        ("evaluate or save", does, activity.pauses),
        ("exchange", exchanges, activity.exchanges),
    ]
    return names + [
        {
            "name": name, "ph": "X", "pid": node, "tid": thread,
            "ts": round(1e6 * (start - first), 1), "dur": round(1e6 * (end - start), 1),
        }
        for name, thread, spans in kinds
        for start, end in spans[-MOST_SPANS:]
    ]  # fmt: skip


def _name(kind: str, name: str, node: int, thread: int) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": node, "tid": thread, "args": {"name": name}}
