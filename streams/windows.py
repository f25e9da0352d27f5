"""Tumbling windows of engine time and how a stretch of time falls into them. Pure arithmetic on integer microseconds."""

from __future__ import annotations

from collections.abc import Iterator

LONG_STRETCH_WINDOWS = 360
"""A stretch over more whole windows than this, in which nothing happens, becomes one row instead of one per window."""


def window_start(at_us: int, window_us: int) -> int:
    """Start of the window that holds ``at_us``; windows are half-open and aligned to the epoch."""
    return at_us - at_us % window_us


def cut(start_us: int, end_us: int, window_us: int) -> Iterator[tuple[int, int, int]]:
    """[start, end) cut at window borders: (row start, row length, part of it inside), all in microseconds.

    Whole windows in the middle come one by one, or as a single longer row if there are more than
    :data:`LONG_STRETCH_WINDOWS` of them. Yields nothing for an empty stretch.
    """
    if end_us <= start_us:
        return
    first = window_start(start_us, window_us)
    if start_us > first:
        border = min(first + window_us, end_us)
        yield first, window_us, border - start_us
        first += window_us
    last = window_start(end_us, window_us)
    whole = (last - first) // window_us
    if whole > LONG_STRETCH_WINDOWS:
        yield first, last - first, last - first
    else:
        for start in range(first, last, window_us):
            yield start, window_us, window_us
    if first <= last < end_us:
        yield last, window_us, end_us - last
