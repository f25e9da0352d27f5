"""Times as people write and read them; inside, everything is integer microseconds since the Unix epoch, UTC. Pure."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from decimal import Decimal

from schemas.errors import KvcensusError

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_UNITS_US = {"s": 1_000_000, "m": 60_000_000, "h": 3_600_000_000, "d": 86_400_000_000}
_RELATIVE = re.compile(r"(\d+(?:\.\d+)?)\s*([smhd])(?:\s+ago)?")
_NUMBER = re.compile(r"\d+(?:\.\d+)?")


def iso(us: int) -> str:
    """``us`` as ISO 8601 in UTC, to the microsecond. A time that no calendar holds comes back as ``@SECONDS``."""
    try:
        return (_EPOCH + timedelta(microseconds=us)).isoformat(timespec="microseconds").replace("+00:00", "Z")
    except OverflowError:
        return f"@{us // 1_000_000}"


def parse(text: str, now_us: int) -> int:
    """``text`` as microseconds: ``now``, an age before it (``15m``, ``2h``, ``1.5d``), epoch seconds, or ISO 8601 (UTC unless it says).

    Raises :class:`KvcensusError` with the forms that are understood.
    """
    given = text.strip()
    if given == "now":
        return now_us
    if match := _RELATIVE.fullmatch(given):
        return now_us - int(Decimal(match.group(1)) * _UNITS_US[match.group(2)])
    if _NUMBER.fullmatch(given):
        return int(Decimal(given) * 1_000_000)
    try:
        at = datetime.fromisoformat(given)
    except ValueError:
        raise KvcensusError(f"{text!r} is no time: use 2026-01-31T12:00:00Z, epoch seconds, an age such as 15m, 2h or 1d, or now") from None
    if at.tzinfo is None:
        at = at.replace(tzinfo=UTC)
    return (at - _EPOCH) // timedelta(microseconds=1)
