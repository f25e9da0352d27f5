"""Which rows of an insert are at fault: found, left out and named, however many; and when it is not the rows."""

from __future__ import annotations

from typing import Any

import pytest
from clickhouse_connect.driver.exceptions import DatabaseError, DataError

from schemas.records import Deploy
from sql.database import Database, StoreError, StoreUnavailable, store_error
from sql.result_rows import DeployColumns, RankWindowColumns
from streams.sink_rows import Inserter, column_kinds
from streams.sink_trouble import SchemaChanged, Waiting, advice, may_pass, of_values
from streams.sink_values import misfits
from tests.sql_records import START_US, WINDOW_US, group, rank_window

GOOD, BAD, ODD = 1, -1, "\ud800"
"""Versions that fit and do not; a label that no column takes, which nobody can tell without asking."""


def windows(*versions: int, instance: str) -> RankWindowColumns:
    rows = RankWindowColumns()
    for number, version in enumerate(versions):
        rows.add(rank_window(instance_id=instance, version=version, window_start_us=START_US + number * WINDOW_US))
    return rows


def standing(store: Database, instance: str) -> int:
    question = "SELECT count() FROM rank_windows WHERE instance_id = {instance:String}"
    return int(store.query(question, {"instance": instance}, final=True).rows[0][0])


@pytest.mark.parametrize(
    ("kind", "good", "bad", "said"),
    [
        ("UInt64", 2**64 - 1, -1, "v: -1 lies outside 0 to 18446744073709551615"),
        ("Int8", -128, 128, "v: 128 lies outside -128 to 127"),
        ("Nullable(Int32)", None, 2**31, "v: 2147483648 lies outside -2147483648 to 2147483647"),
        ("Int64", True, "x", "v: 'x' is no whole number"),
        ("Array(Nullable(Int32))", [1, None], [1, 2**40], "v: 1099511627776 lies outside -2147483648 to 2147483647"),
        ("Array(Array(Int64))", [[1], []], [1], "v: 1 is no list"),
        ("FixedString(16)", b"x" * 16, b"x" * 17, "v: 17 bytes where 16 fit"),
        ("Nullable(FixedString(16))", None, 3, "v: 3 is no bytes"),
        ("DateTime64(6, 'UTC')", -5, 2**63, "v: 9223372036854775808 lies outside -9223372036854775808 to 9223372036854775807"),
        ("LowCardinality(Nullable(Int16))", 5, 2**15, "v: 32768 lies outside -32768 to 32767"),
    ],
)
def test_what_does_not_fit_its_column(kind: str, good: Any, bad: Any, said: str) -> None:
    assert misfits(["v"], [[good, bad, good]], {"v": kind}) == {1: said}


def test_what_fits_or_cannot_be_told() -> None:
    for kind in ("String", "Map(String, Int64)", "Bool", "Nullable(Float64)", ""):
        assert misfits(["v"], [["x", None, 3]], {"v": kind}) == {}


def test_rows_at_fault_are_left_out_and_the_others_written(module_store: Database) -> None:
    inserter = Inserter(module_store, column_kinds(module_store))
    refused = inserter.insert(windows(GOOD, BAD, GOOD, BAD, GOOD, instance="some"))
    assert refused == [(row, "insert into rank_windows: version: -1 lies outside 0 to 18446744073709551615") for row in (1, 3)]
    assert standing(module_store, "some") == 3
    wide = RankWindowColumns()
    for start in range(3):
        wide.add(rank_window(instance_id="wide", window_start_us=START_US + start, groups=[group(stored_tokens=2**62 * (1 + start))]))
    assert [row for row, _ in inserter.insert(wide)] == [1, 2]
    assert standing(module_store, "wide") == 1


def test_of_a_stretch_only_its_rows_are_written_and_named(module_store: Database) -> None:
    rows = windows(GOOD, BAD, GOOD, GOOD, BAD, GOOD, instance="stretch")
    assert [row for row, _ in Inserter(module_store, column_kinds(module_store)).insert(rows, 2, 5)] == [4]
    assert standing(module_store, "stretch") == 2


def test_what_only_the_store_can_tell_is_found_half_by_half(module_store: Database) -> None:
    breaths: list[int] = []
    rows = DeployColumns()
    for number in range(20):
        rows.add(Deploy(f"odd-{number}", 1, ODD if number in (3, 11) else "plain", START_US))
    refused = Inserter(module_store, column_kinds(module_store), lambda: breaths.append(1)).insert(rows)
    assert [row for row, _ in refused] == [3, 11]
    assert len(breaths) > 5
    assert module_store.query("SELECT count() FROM deploys WHERE deploy_id LIKE 'odd-%'", final=True).rows == [(18,)]


def test_a_producer_of_nothing_but_nonsense_stops_nobody(module_store: Database) -> None:
    refused = Inserter(module_store, column_kinds(module_store)).insert(windows(*[BAD] * 500, instance="nonsense"))
    assert len(refused) == 500
    assert standing(module_store, "nonsense") == 0


def test_where_the_columns_have_changed_and_no_row_is_taken_the_rows_are_not_at_fault(module_store: Database) -> None:
    kinds = column_kinds(module_store)
    before = {**kinds, "rank_windows": {**kinds["rank_windows"], "version": "Int64"}}
    inserter = Inserter(module_store, before)
    with pytest.raises(SchemaChanged, match=r"no row is taken, and the table has changed: version is UInt64, was Int64") as caught:
        inserter.insert(windows(BAD, BAD, instance="changed"))
    assert advice(caught.value) == "restore the schema, or start the worker again"
    assert not may_pass(caught.value)
    # One that is taken shows that the others are at fault.
    assert [row for row, _ in inserter.insert(windows(BAD, GOOD, instance="changed"))] == [0]


def test_whether_rows_or_store_are_at_fault() -> None:
    def told(error: Exception) -> StoreError:
        try:
            raise store_error(error, "insert", "there") from error
        except StoreError as raised:
            return raised

    assert of_values(told(DataError("Unable to create native array")))
    assert of_values(told(DatabaseError("Code: 53. DB::Exception: no (TYPE_MISMATCH)", code=53)))
    assert of_values(told(DatabaseError("HTTP driver received HTTP status 413, server response: too large")))
    for error in (
        DatabaseError("HTTP driver received HTTP status 502, server response: Bad Gateway"),
        DatabaseError("HTTP driver received HTTP status 401"),
        DatabaseError("Code: 243. DB::Exception: full (NOT_ENOUGH_SPACE)", code=243),
        DatabaseError("Code: 16. DB::Exception: no such column (NO_SUCH_COLUMN_IN_TABLE)", code=16),
        ConnectionRefusedError(),
    ):
        assert not of_values(told(error)), error
    assert may_pass(told(ConnectionRefusedError()))
    assert may_pass(StoreError("busy", 202))
    assert not may_pass(StoreError("who?", 516))
    assert advice(StoreUnavailable("gone")) == "see whether ClickHouse runs and can be reached from here"
    assert advice(StoreError("odd", 12345)) == "see the log of ClickHouse"


def test_what_is_waited_for_is_said_once_for_each_cause() -> None:
    waiting = Waiting()
    assert waiting.end(0) is None
    assert waiting.begin(StoreError("full at 1", 243), 10)
    assert not waiting.begin(StoreError("full at 2", 243), 11)
    assert waiting.cause == "full at 2"
    assert waiting.begin(StoreUnavailable("gone"), 12)
    assert waiting.begin("letters", 13)
    assert waiting.since == 10
    assert waiting.end(25) == 15
    assert waiting.begin(StoreUnavailable("gone"), 30)
