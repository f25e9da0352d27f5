"""The duplicate footprint by a sweep over intervals: the reference, over one whole span."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise
from typing import Any

from .identity import Contents
from .rank import Rank

Intervals = list[tuple[int, int | None]]


def counts_over_time(intervals: Intervals) -> list[tuple[int, int]]:
    """[(time, how many are open from then on)], after netting everything that happens at one time."""
    changes: dict[int, int] = defaultdict(int)
    for start, end in intervals:
        changes[start] += 1
        if end is not None:
            changes[end] -= 1
    out, n = [], 0
    for time in sorted(changes):
        if changes[time]:
            n += changes[time]
            out.append((time, n))
    return out


def spans_above_zero(counts: list[tuple[int, int]]) -> Intervals:
    out: Intervals = []
    since: int | None = None
    for time, n in counts:
        if n > 0 and since is None:
            since = time
        elif n == 0 and since is not None:
            out.append((since, time))
            since = None
    if since is not None:
        out.append((since, None))
    return out


class Steps:
    """A step function of time given by its changes."""

    def __init__(self) -> None:
        self.tokens: dict[int, int] = defaultdict(int)
        self.blocks: dict[int, int] = defaultdict(int)

    def add_excess(self, counts: list[tuple[int, int]], size: int) -> None:
        """max(0, count - 1) blocks of `size` tokens."""
        before = 0
        for time, n in counts:
            now = max(0, n - 1)
            self.blocks[time] += now - before
            self.tokens[time] += (now - before) * size
            before = now


def summary(changes: list[dict[int, int]], span: tuple[int, int]) -> dict[str, Any]:
    start, end = span
    merged: dict[int, int] = defaultdict(int)
    for part in changes:
        for time, change in part.items():
            merged[time] += change
    instants = sorted({start, end} | {t for t in merged if start < t < end})
    value = sum(change for time, change in merged.items() if time <= start)
    area, highest = 0, 0
    for here, there in pairwise(instants):
        if here != start:
            value += merged.get(here, 0)
        area += value * (there - here)
        highest = max(highest, value)
    final = sum(change for time, change in merged.items() if time <= end)
    return {"mean": (area, end - start) if end > start else (0, 1), "max": max(highest, final), "end": final}


def footprint(ranks: list[Rank], tier: str, span: tuple[int, int], skew_us: int, contents: Contents) -> dict[str, Any]:
    held: dict[int, dict[str, Intervals]] = defaultdict(lambda: defaultdict(list))  # content -> instance -> its ranks' intervals
    for rank in ranks:
        for (where, content), intervals in rank.intervals.items():
            if where == tier:
                held[content][rank.given.instance_id].extend(intervals)
    inside, between = Steps(), Steps()
    for content, instances in held.items():
        matured: Intervals = []
        for intervals in instances.values():
            counts = counts_over_time(intervals)
            inside.add_excess(counts, contents.size[content])
            for opened, ended in spans_above_zero(counts):
                if ended is None or opened + skew_us < ended:
                    matured.append((opened + skew_us, ended))
        between.add_excess(counts_over_time(matured), contents.size[content])

    def figures_of(*steps: Steps) -> dict[str, Any]:
        return {
            "extra_tokens": summary([s.tokens for s in steps], span),
            "extra_blocks": summary([s.blocks for s in steps], span),
        }

    return {**figures_of(inside, between), "inside_instances": figures_of(inside), "between_instances": figures_of(between)}
