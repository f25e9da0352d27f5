"""Tumbling windows of engine time and how a stretch of time falls into them. Pure arithmetic on integer microseconds."""

from __future__ import annotations

from collections.abc import Iterator

LONG_STRETCH_WINDOWS = 360
"""So many whole windows in which nothing happens become one row: few rows over a long silence, and sums that stay far from 2^63."""


def window_start(at_us: int, window_us: int) -> int:
    """Start of the window that holds ``at_us``; windows are half-open and aligned to the epoch."""
    return at_us - at_us % window_us


def cut(start_us: int, end_us: int, window_us: int) -> Iterator[tuple[int, int, int]]:
    """[start, end) cut at window borders: (row start, row length, part of it inside), all in microseconds.

    Whole windows in the middle come one by one, or :data:`LONG_STRETCH_WINDOWS` of them at a time where there are more than that. The
    first comes by itself, also where the stretch begins with it: it holds what happened at its start.
    Yields nothing for an empty stretch.
    """
    if end_us <= start_us:
        return
    first = window_start(start_us, window_us)
    yield first, window_us, min(first + window_us, end_us) - start_us
    first += window_us
    last = window_start(end_us, window_us)
    long = LONG_STRETCH_WINDOWS * window_us
    while last - first > long:
        yield first, long, long
        first += long
    for start in range(first, last, window_us):
        yield start, window_us, window_us
    if first <= last < end_us:
        yield last, window_us, end_us - last
