"""Records become the columns that the tables have, and come back as they were."""

from __future__ import annotations

import datetime
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.errors import KvcensusError
from schemas.records import (
    Batch,
    Declaration,
    HolderReset,
    Lifecycle,
    Loss,
    Op,
    RankMessage,
    Recompute,
    Refusal,
)
from sql import migrate
from sql.database import Database
from sql.rows import GROUP_FIELDS, TableRows
from sql.store import connect
from tests.sql_records import START_US, duplicate_window, group, rank_window

A, B, C, D = (bytes([n]) * 16 for n in (1, 2, 3, 4))
NONE = bytes(16)
Record = RankMessage | Recompute | Lifecycle


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Database]:
    with connect(None, tmp_path_factory.mktemp("store")) as database:
        migrate.apply(database)
        yield database


@pytest.fixture
def database(engine: Database) -> Database:
    for table in ("rank_windows", "recomputes", "duplicate_windows", "lifecycle", "block_events", "rank_events"):
        engine.command(f"TRUNCATE TABLE {table}")
    return engine


def insert(database: Database, rows: TableRows) -> None:
    for batch in rows.batches():
        database.insert(batch.table, batch.column_names, batch.columns)


def message(seq: int = 7, at_us: int = START_US, **what: object) -> RankMessage:
    fields = {"instance_id": "a", "dp_rank": 1, "life_id": "l", "observed_at_ms": START_US // 1000 + 5, "incarnation": "f1"}
    return RankMessage(seq=seq, at_us=at_us, **fields, **what)  # type: ignore[arg-type]


BATCH = Batch(
    [
        Op("STORE", block_size=16, block_ids=A + B + C, content_ids=D + NONE + C, parent_state="ROOT", spec_kind="full_attention"),
        Op("STORE", block_size=16, block_ids=D, content_ids=B, parent_state="CONTENT", parent_content_id=D, lora_name="x", reused=True),
        Op("STORE", group_idx=1, tier="CPU", locality="REMOTE", block_ids=A),
        Op("STORE", block_size=16),
        Op("REMOVE", block_ids=A + B),
        Op("CLEAR", group_idx=None, tier=None),
    ]
)


def test_a_batch_is_one_row_per_block(database: Database) -> None:
    rows = TableRows()
    rows.add(message(batch=BATCH))
    assert len(rows) == 8
    insert(database, rows)
    insert(database, rows)  # a delivery that is repeated
    found = database.query(
        "SELECT event_index, block_index, kind, group_idx, tier, locality, block_size, block_id, content_id, parent_state, "
        "parent_content_id, spec_kind, lora_name, reused FROM block_events FINAL ORDER BY event_index, block_index"
    ).rows
    assert found == [
        (0, 0, "STORE", 0, "GPU", None, 16, A, D, "ROOT", None, "full_attention", None, False),
        (0, 1, "STORE", 0, "GPU", None, 16, B, None, "CONTENT", D, "full_attention", None, False),
        (0, 2, "STORE", 0, "GPU", None, 16, C, C, "CONTENT", None, "full_attention", None, False),
        (1, 0, "STORE", 0, "GPU", None, 16, D, B, "CONTENT", D, None, "x", True),
        (2, 0, "STORE", 1, "CPU", "REMOTE", 0, A, None, "UNKNOWN", None, None, None, False),
        (4, 0, "REMOVE", 0, "GPU", None, 0, A, None, "UNKNOWN", None, None, None, False),
        (4, 1, "REMOVE", 0, "GPU", None, 0, B, None, "UNKNOWN", None, None, None, False),
        (5, 0, "CLEAR", None, None, None, 0, NONE, None, "UNKNOWN", None, None, None, False),
    ]
    identity = "SELECT DISTINCT instance_id, dp_rank, life_id, seq, toUnixTimestamp64Micro(at), toUnixTimestamp64Milli(observed_at)"
    assert database.query(f"{identity} FROM block_events").rows == [("a", 1, "l", 7, START_US, START_US // 1000 + 5)]


ids = st.sampled_from([A, B, C, D, NONE])
ops = st.builds(
    Op,
    kind=st.sampled_from(["STORE", "REMOVE", "CLEAR"]),
    group_idx=st.sampled_from([0, 1, None]),
    tier=st.sampled_from(["GPU", "CPU", None]),
    block_size=st.sampled_from([0, 16]),
    block_ids=st.lists(ids, max_size=3).map(b"".join),
    parent_state=st.sampled_from(["ROOT", "CONTENT", "UNKNOWN"]),
    parent_content_id=ids,
    spec_kind=st.sampled_from([None, "mamba"]),
    reused=st.booleans(),
)


@given(st.lists(st.tuples(ops, st.lists(ids, min_size=3, max_size=3), st.booleans()), max_size=8))
def test_columns_are_those_of_rows_built_one_by_one(drawn: list[tuple[Op, list[bytes], bool]]) -> None:
    batch = Batch([])
    expected: list[tuple[object, ...]] = []
    for index, (op, contents, resolved) in enumerate(drawn):
        op.content_ids = b"".join(contents)[: len(op.block_ids)] if resolved else b""
        batch.ops.append(op)
        blocks = len(op.block_ids) // 16
        known = [content if resolved and content != NONE else None for content in contents]
        for block in range(1 if op.kind == "CLEAR" else blocks):
            first = block == 0
            if op.kind == "CLEAR":
                identity: tuple[object, ...] = (NONE, None, "UNKNOWN", None)
            else:
                state = op.parent_state if first or op.parent_state == "UNKNOWN" else "CONTENT"
                above = op.parent_content_id if first else known[block - 1]
                identity = (op.block_ids[16 * block : 16 * block + 16], known[block], state, above if state == "CONTENT" else None)
            expected.append(
                (index, block, op.kind, op.group_idx, op.tier, op.locality, op.block_size, *identity, op.spec_kind, op.lora_name, op.reused)
            )
    rows = TableRows()
    rows.add(message(batch=batch))
    columns = dict(zip(rows.block_events.column_names, rows.block_events.columns, strict=True))
    names = list(rows.block_events.column_names)[6:]
    assert list(zip(*(columns[name] for name in names), strict=True)) == expected
    assert {len(column) for column in rows.block_events.columns} == {len(expected)}


@pytest.mark.parametrize("op", [Op("STORE", block_ids=A[:-1]), Op("STORE", block_ids=A + B, content_ids=A)])
def test_ids_that_are_not_whole_add_nothing(op: Op) -> None:
    rows = TableRows()
    rows.add(message(batch=BATCH))
    with pytest.raises(KvcensusError, match="a/1 life l seq 8"):
        rows.add(message(8, batch=Batch([BATCH.ops[0], op])))
    assert {len(column) for column in rows.block_events.columns} == {8}


def test_old_and_coming_facts_are_kept(database: Database) -> None:
    """Captures carry the engine time of their day: retention counts from the insertion."""
    rows = TableRows()
    years = [datetime.datetime(year, 6, 1, tzinfo=datetime.UTC) for year in range(1971, 2100)]
    for year in years:
        rows.add(message(at_us=int(year.timestamp()) * 1_000_000, batch=Batch([Op("REMOVE", block_ids=A)])))
    insert(database, rows)
    database.command("OPTIMIZE TABLE block_events FINAL")
    assert database.query("SELECT at FROM block_events ORDER BY at").rows == [(year,) for year in years]


def test_facts_older_than_their_retention_go(database: Database) -> None:
    rows = TableRows()
    rows.add(message(batch=BATCH))
    batch = rows.block_events
    old = int(datetime.datetime.now(tz=datetime.UTC).timestamp()) - 15 * 86400
    database.insert(batch.table, (*batch.column_names, "inserted_at"), [*batch.columns, [old] * len(batch)])
    database.command("OPTIMIZE TABLE block_events FINAL")
    assert database.query("SELECT count() FROM block_events").rows == [(0,)]


def test_what_interrupts_a_stream_is_one_row_each(database: Database) -> None:
    declaration = Declaration("labelled", "per_copy", "chat", None, "offload", 3, "c", "0.1", {"zone": "a"})
    rows = TableRows()
    for number, what in enumerate(
        (
            {"declaration": declaration},
            {"loss": Loss(3, 6, "replay had it no more")},
            {"refusal": Refusal("not msgpack", 12)},
            {"holder_reset": HolderReset(START_US + 1, "sequence went back")},
        )
    ):
        rows.add(message(number, **what))  # type: ignore[arg-type]
    rows.add(message(0, declaration=declaration))  # the very same message once more
    insert(database, rows)
    found = database.query(
        "SELECT kind, seq, reason, toUnixTimestamp64Micro(boundary), first_seq, last_seq, payload_bytes, reuse_reporting, removals, "
        "workload, model, kv_connector, key_epoch, canary, forwarder_version, labels, incarnation FROM rank_events FINAL ORDER BY seq"
    ).rows
    nothing: tuple[object, ...] = (*[None] * 8, {}, "f1")
    assert found == [
        (
            "declaration",
            0,
            None,
            None,
            None,
            None,
            None,
            "labelled",
            "per_copy",
            "chat",
            None,
            "offload",
            3,
            "c",
            "0.1",
            {"zone": "a"},
            "f1",
        ),
        ("loss", 1, "replay had it no more", None, 3, 6, None, *nothing),
        ("refusal", 2, "not msgpack", None, None, None, 12, *nothing),
        ("holder_reset", 3, "sequence went back", START_US + 1, None, None, None, *nothing),
    ]


def test_recomputes_and_lifecycle_come_back(database: Database) -> None:
    first = Recompute("a", 1, 0, "l", 7, 2, 1, 4, "evicted", A, B, 16, START_US - 9, START_US - 5, START_US, 5)
    better = Recompute("a", 1, 0, "l", 7, 2, 1, 5, "cleared", A, None, 16, START_US - 9, START_US - 5, START_US, 5)
    beat = Lifecycle("heartbeat", "a", 1, "l", "f1", START_US // 1000, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, "c", 11, "why")
    rows = TableRows()
    for record in (better, first, beat, beat):
        rows.add(record)
    insert(database, rows)
    names = ", ".join(name for name in rows.recomputes.column_names if not name.endswith("_at"))
    times = ", ".join(f"toUnixTimestamp64Micro({name})" for name in ("stored_at", "lost_at", "back_at"))
    assert database.query(f"SELECT {names}, {times} FROM recomputes FINAL").rows == [
        ("a", 1, 0, "l", 7, 2, 1, 5, "cleared", A, None, 16, 5, START_US - 9, START_US - 5, START_US)
    ]
    names = ", ".join(rows.lifecycle.column_names).replace("at,", "toUnixTimestamp64Milli(at),", 1)
    found = database.query(f"SELECT {names} FROM lifecycle FINAL").rows
    assert found == [tuple(getattr(beat, name) for name in Lifecycle.__struct_fields__)]


def test_windows_come_back(database: Database) -> None:
    groups = [group(**{name: n for n, name in enumerate(GROUP_FIELDS[3:])}), group(group_idx=2, gpu=False, spec_kind="mamba")]
    record = rank_window(
        groups=groups, reasons=["lost", "restarted"], workload="chat", first_batch_us=START_US + 1, version=2**63, warmup=True
    )
    rows = TableRows()
    rows.add(rank_window(version=3, groups=[group(group_idx=n) for n in range(5)]))
    rows.add(record)
    rows.add(duplicate_window(inside_token_us=2**62, scope="workload"))
    insert(database, rows)
    batch = rows.rank_windows
    found = database.query(f"SELECT {', '.join(f'`{name}`' for name in batch.column_names)} FROM rank_windows FINAL").rows
    as_inserted = dict(zip(batch.column_names, (column[1] for column in batch.columns), strict=True))
    back = dict(zip(batch.column_names, found[0], strict=True))
    for name in ("window_start", "first_batch", "last_batch"):
        at = back[name]
        back[name] = (at - datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)) // datetime.timedelta(microseconds=1)
    assert len(found) == 1
    assert back == as_inserted
    ends = "SELECT window_end = window_start + toIntervalMicrosecond(window_us) FROM"
    assert database.query(f"{ends} rank_windows UNION ALL {ends} duplicate_windows").rows == [(1,), (1,)]
    assert database.query("SELECT inside_token_us, scope_key FROM duplicate_windows").rows == [(2**62, "")]


def test_columns_handed_out_stay_when_the_batch_is_cleared() -> None:
    rows = TableRows()
    rows.add(rank_window())
    handed = rows.rank_windows.columns
    rows.clear()
    assert len(rows) == 0
    assert list(rows.batches()) == []
    assert {len(column) for column in handed} == {1}


def test_every_column_is_filled_or_has_a_default(engine: Database) -> None:
    for batch in TableRows().tables:
        described = engine.query(f"DESCRIBE TABLE {batch.table}").rows
        left = {row[0] for row in described if row[2] != "DEFAULT"} - set(batch.column_names)
        assert not left, f"{batch.table}: nothing fills {left}"
        assert set(batch.column_names) <= {row[0] for row in described}
