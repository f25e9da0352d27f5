"""Columns as other programs can read them: every type that the engine would hand out as what it is stored as."""

from __future__ import annotations

from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import pytest

from sql.database import Database
from sql.readable import readable, select_list


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("toDateTime(1.0, 'UTC')", datetime.fromtimestamp(1, UTC)),
        ("toDateTime64('1970-01-01 01:00:01.5', 3, 'Europe/Berlin')", datetime.fromtimestamp(1.5, UTC)),
        ("toInt128('-170000000000000000000000000000000000')", Decimal(-17 * 10**34)),
        ("toUInt256(7)", "7"),
        ("CAST('b', 'Enum8(''a,('' = 1, ''b'' = 2)')", "b"),
        ("toIPv4('1.2.3.4')", "1.2.3.4"),
        ("toUUID('00112233-4455-6677-8899-aabbccddeeff')", "00112233-4455-6677-8899-aabbccddeeff"),
        ("toIntervalSecond(3)", 3),
        ("toFixedString(unhex('00ff'), 2)", "00ff"),
        ("[toNullable(toFixedString('ab', 2)), NULL]", ["6162", None]),
        ("[[toDateTime(1, 'UTC')]]", [[datetime.fromtimestamp(1, UTC)]]),
        ("map('k', toDateTime(1, 'UTC'))", [("k", datetime.fromtimestamp(1, UTC))]),
        ("map('k', toInt64(1))", [("k", 1)]),
        ("CAST((toDateTime(1, 'UTC'), 'x'), 'Tuple(at DateTime(''UTC''), `a b` String)')", {"1": datetime.fromtimestamp(1, UTC), "2": "x"}),
        ("CAST([(1, 'a')], 'Nested(x Int64, y String)')", [{"x": 1, "y": "a"}]),
        ("toLowCardinality(toNullable('a'))", "a"),
        ("18446744073709551615", 2**64 - 1),
        ("NULL", None),
        ("initializeAggregation('sumState', toInt64(5))", 5),
        ("CAST(true, 'SimpleAggregateFunction(max, Bool)')", True),
    ],
)
def test_a_value_of_each_type(module_store: Database, expression: str, expected: Any) -> None:
    kind = module_store.query(f"DESCRIBE TABLE (SELECT {expression} AS `v ``x`)").rows[0][1]
    listed, _ = select_list([("v `x", kind)], "hex")
    assert module_store.query_arrow(f"SELECT {listed} FROM (SELECT {expression} AS `v ``x`)").to_pylist() == [{"v `x": expected}]


def test_what_is_readable_already_stays_as_it_is() -> None:
    for kind in (
        "String",
        "Array(LowCardinality(Nullable(String)))",
        "DateTime64(6, 'UTC')",
        "Map(String, Int64)",
        "Tuple(a Int8, b Date)",
    ):
        assert readable("`x`", kind, "hex") == "`x`"
        assert select_list([("x", kind)], "hex") == ("`x`", False)
    assert readable("`x`", "Nullable(FixedString(16))", "binary") == "`x`"
