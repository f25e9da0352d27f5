"""Log-scaled histograms of durations: which bucket a duration falls into, and where a bucket lies. Merging two is adding counts. Pure.

Each power of two of microseconds is cut into four buckets of equal width, so a bucket is at most a quarter of its lower bound
wide. Bucket numbers grow with the duration; 0 holds what took no time (or less: clocks of one stream never go back).
"""

from __future__ import annotations

SUB_BITS = 2
"""Buckets per power of two, as a power of two."""

_SUB = 1 << SUB_BITS


def bucket(duration_us: int) -> int:
    """The bucket of ``duration_us``, a whole number of microseconds."""
    if duration_us < _SUB:
        return max(duration_us, 0)
    power = duration_us.bit_length() - 1 - SUB_BITS
    return (power << SUB_BITS) + (duration_us >> power)


def bounds(number: int) -> tuple[int, int]:
    """[from, to) of bucket ``number``, microseconds."""
    if number < 2 * _SUB:
        return number, number + 1
    power = (number >> SUB_BITS) - 1
    low = ((number & (_SUB - 1)) + _SUB) << power
    return low, low + (1 << power)
