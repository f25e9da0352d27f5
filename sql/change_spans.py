"""Which two spans are held against each other. Pure.

Spans are whole windows. That of a deploy counts to neither side, since it holds both. Where the after side reaches beyond the newest
engine time it is cut to what has been, and the other side to the same length: an hour against ten minutes would compare nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from sql.times import iso
from sql.total_types import Span, widened

_UNITS = ((3_600_000_000, "h"), (60_000_000, "min"), (1_000_000, "s"))


@dataclass(frozen=True)
class Sides:
    """Before and after; ``notes`` say what became of the spans that were asked for."""

    before: Span
    after: Span
    notes: tuple[str, ...] = ()


def around(at_us: int, length_us: int, base_us: int, newest_us: int | None) -> Sides:
    """The spans of ``length_us`` before and after ``at_us``, both without its window; rounded up to whole windows of ``base_us``.

    ``newest_us`` is the newest engine time there is (``None``: there is none at or behind ``at_us``). ``base_us`` 0: not known.
    """
    base = max(1, base_us)
    middle, start = at_us // base * base, -(-at_us // base) * base
    length = max(base, -(-length_us // base) * base)
    reached = _reached(Span(start, start + length), base, newest_us)
    if reached is None:
        return Sides(Span(middle - length, middle), Span(start, start + length))
    length = reached - start
    return Sides(Span(middle - length, middle), Span(start, reached), (_said(reached, length),))


def two(before: Span, after: Span, base_us: int, newest_us: int | None) -> Sides:
    """Any two spans, widened to whole windows. A side that is cut keeps its beginning, and so does the other, cut to the same length."""
    base = max(1, base_us)
    wide = [_widened(side, base) for side in (before, after)]
    ends = [_reached(side, base, newest_us) for side in wide]
    cut = [end - side.start_us for side, end in zip(wide, ends, strict=True) if end is not None]
    if not cut:
        return Sides(wide[0], wide[1])
    length = min(cut)
    reached = max(end for end in ends if end is not None)
    first, second = (Span(side.start_us, min(side.end_us, side.start_us + length)) for side in wide)
    return Sides(first, second, (_said(reached, length),))


def _widened(side: Span, base: int) -> Span:
    since, until = widened(side.start_us, side.end_us, base)
    assert since is not None
    assert until is not None
    return Span(since, until)


def _reached(side: Span, base: int, newest_us: int | None) -> int | None:
    """Where ``side`` has to end for the whole windows that have been; ``None`` if it is over, or has not seen one whole window."""
    if newest_us is None:
        return None
    border = newest_us // base * base
    return border if side.start_us < border < side.end_us else None


def _said(reached_us: int, length_us: int) -> str:
    return f"not over yet: engine time has reached {iso(reached_us)}, so both sides are cut to {duration(length_us)}"


def duration(us: int) -> str:
    """A length of time in the largest unit that leaves a whole number or one decimal."""
    for unit, name in _UNITS:
        if us >= unit and us * 10 % unit == 0:
            return f"{us / unit:g} {name}"
    return f"{us / 1e6:g} s"
