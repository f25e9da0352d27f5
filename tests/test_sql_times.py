"""Times as people write them."""

from __future__ import annotations

import pytest

from schemas.errors import KvcensusError
from sql.times import iso, parse

NOW_US = 1_800_000_000_000_000


@pytest.mark.parametrize(
    ("text", "us"),
    [
        ("now", NOW_US),
        ("15m", NOW_US - 900_000_000),
        ("2h", NOW_US - 7_200_000_000),
        ("1.5d", NOW_US - 129_600_000_000),
        ("30s ago", NOW_US - 30_000_000),
        ("1700000000", 1_700_000_000_000_000),
        ("1700000000.123457", 1_700_000_000_123_457),
        ("2023-11-14T22:13:20Z", 1_700_000_000_000_000),
        ("2023-11-14 22:13:20.5", 1_700_000_000_500_000),
        ("2023-11-14T23:13:20+01:00", 1_700_000_000_000_000),
        ("2023-11-14", 1_699_920_000_000_000),
    ],
)
def test_parse(text: str, us: int) -> None:
    assert parse(text, NOW_US) == us


@pytest.mark.parametrize("text", ["", "yesterday", "15", "m15", "-5m", "2023-13-01", "1e9"])
def test_what_is_no_time_is_refused_or_taken_as_seconds(text: str) -> None:
    if text == "15":
        assert parse(text, NOW_US) == 15_000_000
    else:
        with pytest.raises(KvcensusError, match="is no time"):
            parse(text, NOW_US)


def test_iso() -> None:
    assert iso(1_700_000_000_123_456) == "2023-11-14T22:13:20.123456Z"
    assert iso(0) == "1970-01-01T00:00:00.000000Z"
    assert parse(iso(1_700_000_000_123_456), NOW_US) == 1_700_000_000_123_456
    assert iso(2**62) == f"@{2**62 // 1_000_000}"
