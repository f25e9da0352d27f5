"""Records become the columns that the tables have, and come back as they were."""

from __future__ import annotations

import datetime
import io
import math
from collections.abc import Sequence
from typing import Any

import fastavro
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas import codec
from schemas.errors import KvcensusError
from schemas.records import (
    Batch,
    Breach,
    DeadLetter,
    Declaration,
    Declared,
    Departure,
    EngineMetrics,
    Histogram,
    HolderReset,
    IdentityRefused,
    Lifecycle,
    Loss,
    Op,
    RankMessage,
    Recompute,
    Refusal,
    Scrape,
    SharedPrefix,
)
from sql.columns import ColumnBatch
from sql.database import Database
from sql.result_rows import GROUP_FIELDS, GROUP_STATES, GROUP_SUMS, HISTOGRAMS
from sql.rows import TableRows
from tests.sql_records import START_US, WINDOW_US, duplicate_window, group, rank_window, write

A, B, C, D = (bytes([n]) * 16 for n in (1, 2, 3, 4))
NONE = bytes(16)


@pytest.fixture
def database(module_store: Database) -> Database:
    for table in (batch.table for batch in TableRows().tables):
        module_store.command(f"TRUNCATE TABLE {table}")
    return module_store


def message(seq: int = 7, at_us: int = START_US, **what: object) -> RankMessage:
    fields = {"instance_id": "a", "dp_rank": 1, "life_id": "l", "observed_at_ms": START_US // 1000 + 5, "incarnation": "f1"}
    return RankMessage(seq=seq, at_us=at_us, **fields, **what)  # type: ignore[arg-type]


BATCH = Batch(
    [
        Op("STORE", block_size=16, block_ids=A + B + C, content_ids=D + NONE + C, parent_state="ROOT", spec_kind="full_attention"),
        Op(
            "STORE",
            block_size=16,
            block_ids=D,
            content_ids=B,
            parent_state="CONTENT",
            parent_content_id=D,
            parent_block_id=C,
            lora_name="x",
            reused=True,
        ),
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
    write(database, rows)
    write(database, rows)  # a delivery that is repeated
    found = database.query(
        "SELECT event_index, block_index, kind, group_idx, tier, locality, n_tokens, block_id, content_id, parent_id, parent_unknown, "
        "parent_content_id, spec_kind, lora_name, reused FROM block_events FINAL ORDER BY event_index, block_index"
    ).rows
    assert found == [
        (0, 0, "store", 0, "GPU", None, 16, A, D, None, False, None, "full_attention", None, False),
        (0, 1, "store", 0, "GPU", None, 16, B, None, A, False, D, "full_attention", None, False),
        (0, 2, "store", 0, "GPU", None, 16, C, C, B, False, None, "full_attention", None, False),
        (1, 0, "store", 0, "GPU", None, 16, D, B, C, False, D, None, "x", True),
        (2, 0, "store", 1, "CPU", "REMOTE", 0, A, None, None, True, None, None, None, False),
        (4, 0, "evict", 0, "GPU", None, 0, A, None, None, False, None, None, None, False),
        (4, 1, "evict", 0, "GPU", None, 0, B, None, None, False, None, None, None, False),
        (5, 0, "clear", None, None, None, 0, NONE, None, None, False, None, None, None, False),
    ]
    rare = "SELECT DISTINCT spec_sliding_window, lora_id, extra_keys, session_id, ownership FROM block_events"
    assert database.query(rare).rows == [(None, None, [], None, None)]
    identity = "SELECT DISTINCT instance_id, dp_rank, life_id, seq, toUnixTimestamp64Micro(at), toUnixTimestamp64Milli(observed_at)"
    assert database.query(f"{identity} FROM block_events").rows == [("a", 1, "l", 7, START_US, START_US // 1000 + 5)]


def test_what_few_batches_carry_is_there_for_its_rows_alone(database: Database) -> None:
    rows = TableRows()
    plain = Batch([Op("REMOVE", block_ids=A + B)])
    rows.add(message(1, batch=plain))
    assert set(rows.block_events.column_names).isdisjoint(rows.block_events.rare_columns)
    op = Op("STORE", block_ids=A + B, extra_keys=[C + D, b""], session_id=D, lora_id=2**63 - 1, spec_sliding_window=4096, ownership="OWNED")
    rows.add(message(2, batch=Batch([*plain.ops, op, Op("STORE", block_ids=C, extra_keys=[D])])))
    rows.add(message(3, batch=plain))
    assert {len(column) for column in rows.block_events.columns} == {9}
    write(database, rows)
    found = database.query(
        "SELECT seq, event_index, extra_keys, session_id, lora_id, spec_sliding_window, ownership FROM block_events FINAL "
        "ORDER BY seq, event_index, block_index"
    ).rows
    nothing: tuple[object, ...] = ([], None, None, None, None)
    assert found == [
        *[(1, 0, *nothing)] * 2,
        *[(2, 0, *nothing)] * 2,
        (2, 1, [C, D], D, 2**63 - 1, 4096, "OWNED"),
        (2, 1, [], D, 2**63 - 1, 4096, "OWNED"),
        (2, 2, [D], None, None, None, None),
        *[(3, 0, *nothing)] * 2,
    ]
    rows.clear()
    rows.add(message(1, batch=plain))
    assert len(rows.block_events.column_names) == len(rows.block_events.columns)
    assert set(rows.block_events.column_names).isdisjoint(rows.block_events.rare_columns)


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
    parent_block_id=st.one_of(st.none(), ids),
    spec_kind=st.sampled_from([None, "mamba"]),
    reused=st.booleans(),
    lora_id=st.sampled_from([None, None, 0, 7]),
    session_id=st.one_of(st.none(), ids),
)
KINDS = {"STORE": "store", "REMOVE": "evict", "CLEAR": "clear"}


def above(op: Op, block: int, known: list[bytes | None]) -> tuple[object, ...]:
    """parent_id, parent_unknown and parent_content_id of one block of a store."""
    lost = op.parent_state == "UNKNOWN" and op.parent_block_id is None
    parent_id = None if lost else op.parent_block_id if block == 0 else op.block_ids[16 * block - 16 : 16 * block]
    unknown = lost or (block == 0 and op.parent_block_id is None and op.parent_state != "ROOT")
    if op.parent_state == "UNKNOWN" or (block == 0 and op.parent_state == "ROOT"):
        return parent_id, unknown, None
    return parent_id, unknown, op.parent_content_id if block == 0 else known[block - 1]


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
            own = (NONE, None) if op.kind == "CLEAR" else (op.block_ids[16 * block : 16 * block + 16], known[block])
            parent = above(op, block, known) if op.kind == "STORE" else (None, False, None)
            scope = (op.group_idx, op.tier, op.locality, op.block_size)
            rest = (op.spec_kind, op.lora_name, op.reused, op.lora_id, op.session_id)
            expected.append((index, block, KINDS[op.kind], *scope, *own, *parent, *rest))
    rows = TableRows()
    rows.add(message(batch=batch))
    columns = dict(zip(rows.block_events.column_names, rows.block_events.columns, strict=True))
    for name in rows.block_events.rare_columns:  # the table fills them in where no row has them
        columns.setdefault(name, [None] * len(expected))
    names = [*type(rows.block_events).column_names[6:], "lora_id", "session_id"]
    assert list(zip(*(columns[name] for name in names), strict=True)) == expected
    assert {len(column) for column in rows.block_events.columns} == {len(expected)}


def test_messages_of_the_first_version_still_land(database: Database) -> None:
    """As they lie on a topic: without the fields that came later."""
    ((release, schema),) = [each for each in codec.released_schemas("RankMessage") if each[0] == "0.1.0"]
    assert release
    op = {"group_idx": 0, "tier": "GPU", "locality": None, "block_size": 16, "spec_kind": None, "lora_name": None, "reused": False}
    kinds = (("STORE", "CONTENT", A), ("STORE", "UNKNOWN", None), ("REMOVE", "UNKNOWN", None))
    stored = [{**op, "kind": kind, "block_ids": A + B, "content_ids": C + D, "parent_state": state, "parent_content_id": parent}
              for kind, state, parent in kinds]  # fmt: skip
    empty = {"batch": None, "holder_reset": None, "loss": None, "refusal": None, "declaration": None}
    who = {"instance_id": "a", "dp_rank": 1, "life_id": "l", "at_us": START_US, "observed_at_ms": 1, "incarnation": "f1"}
    rows = TableRows()
    for seq, what in enumerate(
        (
            {"batch": {"ops": stored, "unknown_events": 0, "unresolved_blocks": 0}},
            {"holder_reset": {"boundary_us": 5, "reason": "went back"}},
        )
    ):
        body = io.BytesIO()
        fastavro.schemaless_writer(body, fastavro.parse_schema(schema), {**who, **empty, "seq": seq, **what})
        sent = b"\xc3\x01" + codec.schema_fingerprint(schema) + body.getvalue()
        rows.add(codec.decode(sent, RankMessage))
    write(database, rows)
    found = database.query(
        "SELECT kind, n_tokens, parent_id, parent_unknown, parent_content_id FROM block_events FINAL ORDER BY event_index, block_index"
    ).rows
    assert found == [
        # The engine's own parent was not on the message: not told, which is no root.
        ("store", 16, None, True, A),
        ("store", 16, A, False, C),
        *[("store", 16, None, True, None)] * 2,
        *[("evict", 16, None, False, None)] * 2,
    ]
    assert database.query("SELECT kind, cause FROM rank_events FINAL").rows == [("holder_reset", "restarted")]


@pytest.mark.parametrize(
    "op",
    [
        Op("STORE", block_ids=A[:-1]),
        Op("STORE", block_ids=A + B, content_ids=A),
        Op("STORE", block_ids=A + B, extra_keys=[C]),
        Op("STORE", block_ids=A, extra_keys=[C[:-1]]),
    ],
)
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
    write(database, rows)
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
    declaration = Declaration(
        "labelled",
        "per_copy",
        "chat",
        None,
        "offload",
        3,
        "c",
        "0.1",
        {"zone": "a"},
        "sglang",
        0.5,
        131_072,
        9_000.5,
        5_000,
        60_000,
        1 << 24,
        {"0": 100_000, "1": 31_072},
    )
    rows = TableRows()
    for number, what in enumerate(
        (
            {"declaration": declaration},
            {"loss": Loss(3, 6, "replay had it no more")},
            {"refusal": Refusal("not msgpack", 12)},
            {"holder_reset": HolderReset(START_US + 1, "sequence went back")},
            {"holder_reset": HolderReset(START_US + 2, "another key", "rekeyed")},
            {"departure": Departure("asked to stop")},
            {"scrape": Scrape(START_US // 1000)},  # is in engine_metrics in full
        )
    ):
        rows.add(message(number, **what))  # type: ignore[arg-type]
    rows.add(message(0, declaration=declaration))  # the very same message once more
    for index in (0, 2):  # two groups in one moment
        rows.add(message(9, identity_refused=IdentityRefused(index, 5 + index, START_US, START_US + 7)))
    write(database, rows)
    found = database.query(
        "SELECT kind, seq, reason, toUnixTimestamp64Micro(boundary), cause, first_seq, last_seq, payload_bytes, group_idx, refused, "
        "toUnixTimestamp64Micro(window_start), toUnixTimestamp64Micro(window_end), incarnation FROM rank_events FINAL "
        "ORDER BY seq, group_idx"
    ).rows
    assert found == [
        ("declaration", 0, *[None] * 6, 0, None, None, None, "f1"),
        ("loss", 1, "replay had it no more", None, None, 3, 6, None, 0, None, None, None, "f1"),
        ("refusal", 2, "not msgpack", None, None, None, None, 12, 0, None, None, None, "f1"),
        ("holder_reset", 3, "sequence went back", START_US + 1, "restarted", None, None, None, 0, None, None, None, "f1"),
        ("holder_reset", 4, "another key", START_US + 2, "rekeyed", None, None, None, 0, None, None, None, "f1"),
        ("departure", 5, "asked to stop", *[None] * 5, 0, None, None, None, "f1"),
        ("identity_refused", 9, *[None] * 6, 0, 5, START_US, START_US + 7, "f1"),
        ("identity_refused", 9, *[None] * 6, 2, 7, START_US, START_US + 7, "f1"),
    ]
    names = Declaration.__struct_fields__
    said = database.query(f"SELECT {', '.join(names)} FROM rank_events FINAL ORDER BY seq").rows
    assert said[0] == tuple(getattr(declaration, name) for name in names)
    nothing = tuple(repr({} if n in ("labels", "kv_bytes_by_group") else None) for n in names)
    assert {tuple(row) for row in (map(repr, row) for row in said[1:])} == {nothing}


def test_recomputes_come_back(database: Database) -> None:
    first = Recompute("a", 1, 0, "l", 7, 2, 1, 4, "evicted", A, B, 16, START_US - 9, START_US - 5, START_US, 5)
    better = Recompute("a", 1, 0, "l", 7, 2, 1, 5, "cleared", A, None, 16, START_US - 9, START_US - 5, START_US, 5, C, D, 1234)
    rows = TableRows()
    for record in (better, first):
        rows.add(record)
    write(database, rows)
    names = ", ".join(name for name in rows.recomputes.column_names if not name.endswith("_at"))
    times = ", ".join(f"toUnixTimestamp64Micro({name})" for name in ("stored_at", "lost_at", "back_at"))
    assert database.query(f"SELECT {names}, {times} FROM recomputes FINAL").rows == [
        ("a", 1, 0, "l", 7, 2, 1, 5, "cleared", A, None, 16, 5, C, D, 1234, START_US - 9, START_US - 5, START_US)
    ]


def test_a_recomputed_block_is_read_as_the_window_in_which_it_came_back(database: Database) -> None:
    said: dict[str, Any] = {"dp_rank": 1, "life_id": "l", "workload": "chat", "register": "lower_bound"}
    earlier = rank_window(**said, window_start_us=START_US - WINDOW_US, observed_us=0)
    window = rank_window(**said, observed_us=WINDOW_US // 4, reasons=["lost"])
    rows = TableRows()
    for record in (
        Recompute("a", 1, 0, "l", 7, 2, 1, 4, "evicted", A, B, 16, START_US - 9, START_US - 5, START_US, 5),
        Recompute("a", 1, 0, "l", 8, 0, 1, 4, "evicted", A, B, 16, START_US - 9, START_US - 5, START_US + WINDOW_US - 1, 5),
        Recompute("a", 1, 0, "of no window", 9, 0, 1, 4, "cleared", A, B, 16, 0, 0, START_US, 5),
        earlier,
        window,
    ):
        rows.add(record)
    write(database, rows)
    columns = "seq, cause, workload, coverage, register, reasons, tokens, is_final"
    assert database.query(f"SELECT {columns} FROM recomputed_blocks ORDER BY seq").rows == [
        (7, "evicted", "chat", 0.25, "lower_bound", ["lost"], 16, True),
        (8, "evicted", "chat", 0.25, "lower_bound", ["lost"], 16, True),
        (9, "cleared", None, 0.0, "indeterminate", [], 16, False),
    ]


def micros(at: datetime.datetime) -> int:
    return (at - datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)) // datetime.timedelta(microseconds=1)


def came_back(database: Database, table: str, names: Sequence[str]) -> list[dict[str, object]]:
    """The rows of ``table``, times as microseconds."""
    found = database.query(f"SELECT {', '.join(f'`{name}`' for name in names)} FROM {table} FINAL ORDER BY at").rows
    plain = [[micros(value) if isinstance(value, datetime.datetime) else value for value in row] for row in found]
    return [dict(zip(names, row, strict=True)) for row in plain]


def lifecycle(**fields: Any) -> Lifecycle:
    record = Lifecycle("heartbeat", "a", 1, "l", "f1", START_US // 1000, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, "c", 11, "why")
    return msgspec.structs.replace(record, **fields)


def test_lifecycle_comes_back(database: Database) -> None:
    beat = lifecycle(forwarder_version="0.2", endpoint="tcp://h:1", last_message_at_ms=START_US // 1000 + 3, declared_more=5)
    for number, name in enumerate(("msgs_seen", "oversized", "spool_bytes", "spool_dropped", "rss_bytes", "staleness_ms")):
        setattr(beat, name, number + 100)
    beat.declared = [Declared("loss", "l", 3, 6, START_US + 1, "gone"), Declared("declaration", "l", 7, 7, START_US + 2)]
    # As a forwarder of the version before sent it.
    old = lifecycle(at_ms=START_US // 1000 + 9)
    rows = TableRows()
    for record in (beat, beat, old):
        rows.add(record)
    write(database, rows)
    found = came_back(database, "lifecycle", rows.lifecycle.column_names)
    assert len(found) == 2
    for row, record in zip(found, (beat, old), strict=True):
        for name in Lifecycle.__struct_fields__:
            if name == "at_ms":
                assert row["at"] == record.at_ms * 1000
            elif name == "last_message_at_ms":
                assert row["last_message_at"] == (None if record.last_message_at_ms is None else record.last_message_at_ms * 1000)
            elif name != "declared":
                assert row[name] == getattr(record, name), name
        assert row["declared.kind"] == [each.kind for each in record.declared]
        assert row["declared.reason"] == [each.reason for each in record.declared]
        assert row["declared.last_seq"] == [each.last_seq for each in record.declared]
        at = row["declared.at"]
        assert isinstance(at, list)
        assert [micros(each) for each in at] == [each.at_us for each in record.declared]


def test_engine_metrics_come_back(database: Database) -> None:
    histograms = {"time_to_first_token": Histogram([0.5, math.inf], [1, 3], 2.25), "request_prefill_time": Histogram([math.inf], [0], 0.0)}
    full = EngineMetrics("a", 1, "l", "f1", START_US // 1000, START_US - 5, "m", 0.25, 100, 16, histograms=histograms)
    for number, name in enumerate(EngineMetrics.__struct_fields__[10:-1]):
        setattr(full, name, number)
    empty = EngineMetrics("a", 1, "l", "f1", START_US // 1000 + 1)
    rows = TableRows()
    for record in (full, empty, full):
        rows.add(record)
    write(database, rows)
    found = came_back(database, "engine_metrics", rows.engine_metrics.column_names)
    assert len(found) == 2
    for row, record in zip(found, (full, empty), strict=True):
        assert row["at"] == record.at_ms * 1000
        assert row["process_started"] == record.process_started_us
        for name in EngineMetrics.__struct_fields__:
            if name not in ("at_ms", "process_started_us", "histograms"):
                assert row[name] == getattr(record, name), name
    assert found[0]["histograms.name"] == ["request_prefill_time", "time_to_first_token"]
    assert found[0]["histograms.bounds"] == [[math.inf], [0.5, math.inf]]
    assert found[0]["histograms.counts"] == [[0], [1, 3]]
    assert found[0]["histograms.sum"] == [0.0, 2.25]
    assert found[1]["histograms.name"] == []


def plain_times(row: dict[str, Any]) -> dict[str, Any]:
    """Times as they are inserted: microseconds, but for the forwarder's clock."""

    def plain(name: str, value: Any) -> Any:
        if isinstance(value, list):
            return [plain(name, each) for each in value]
        if isinstance(value, datetime.datetime):
            return micros(value) // 1000 if name == "breaches.scraped_at" else micros(value)
        return value

    return {name: plain(name, value) for name, value in row.items()}


def last_of(batch: ColumnBatch) -> dict[str, Any]:
    """The row that was added last."""
    return dict(zip(batch.column_names, (column[-1] for column in batch.columns), strict=True))


def only_row(database: Database, batch: ColumnBatch) -> dict[str, Any]:
    """The one row of the table, as it is inserted."""
    (found,) = database.query(f"SELECT {', '.join(f'`{name}`' for name in batch.column_names)} FROM {batch.table} FINAL").rows
    return plain_times(dict(zip(batch.column_names, found, strict=True)))


def test_windows_come_back(database: Database) -> None:
    counted = {name: n for n, name in enumerate((*GROUP_SUMS, *GROUP_STATES))}
    buckets = {f"{name}_{part}": [n, n + 2] for n, name in enumerate(HISTOGRAMS) for part in ("buckets", "counts")}
    groups = [group(**counted, **buckets), group(group_idx=2, gpu=False, spec_kind="mamba")]
    breaches = [Breach("cached_over_pool", START_US, START_US // 1000, 7, 5), Breach("in_use_over_cached", START_US + 1, 3, 9, 8)]
    record = rank_window(
        groups=groups,
        reasons=["lost", "restarted"],
        workload="chat",
        first_batch_us=START_US + 1,
        version=2**63,
        warmup=True,
        register="lower_bound",
        prefill_rate=9000.5,
        prefill_rate_source="measured",
        gpus_per_rank=2.0,
        pool_blocks=5,
        scrapes=3,
        breaches=breaches,
        breaches_found=11,
        departed=True,
    )
    rows = TableRows()
    rows.add(rank_window(version=3, groups=[group(group_idx=n) for n in range(5)]))
    rows.add(record)
    rows.add(duplicate_window(inside_token_us=2**62, scope="workload", reasons=["lost"], register="exact", extra_bytes_max=2**62))
    write(database, rows)
    assert only_row(database, rows.rank_windows) == last_of(rows.rank_windows)
    assert only_row(database, rows.duplicate_windows) == last_of(rows.duplicate_windows)
    ends = "SELECT window_end = window_start + toIntervalMicrosecond(window_us) FROM"
    assert database.query(f"{ends} rank_windows UNION ALL {ends} duplicate_windows").rows == [(1,), (1,)]


def test_a_window_without_what_came_later_reads_as_nothing_told(database: Database) -> None:
    """As a worker of the version before inserts it, which knows none of the columns of its groups that were added."""
    rows = TableRows()
    rows.add(rank_window(groups=[group(), group(group_idx=1)], register="exact"))
    rows.add(duplicate_window(register="exact"))
    later = {"register", "prefill_rate", "prefill_rate_source", "gpus_per_rank", "pool_blocks", "scrapes", "breaches_found", "departed"}
    later |= {name for name in rows.rank_windows.column_names if name.startswith("breaches.")}
    later |= {f"groups.{name}" for name in GROUP_FIELDS[GROUP_FIELDS.index("resident_copies") :]}
    later |= set(rows.duplicate_windows.column_names[27:])
    for batch in rows.batches():
        known = [number for number, name in enumerate(batch.column_names) if name not in later]
        database.insert(batch.table, [batch.column_names[n] for n in known], [batch.columns[n] for n in known])
    back = only_row(database, rows.rank_windows)
    assert back["groups.unreused_tokens"] == [0, 0]
    assert back["groups.kv_bytes_per_token"] == [None, None]
    assert back["groups.lifetime_counts"] == [[], []]
    assert (back["register"], back["prefill_rate"], back["breaches.kind"], back["departed"]) == ("indeterminate", None, [], False)
    back = only_row(database, rows.duplicate_windows)
    assert (back["register"], back["reasons"], back["inside_byte_ms"], back["expected_ranks"]) == ("indeterminate", [], None, 0)


def test_shared_prefixes_come_back(database: Database) -> None:
    record = SharedPrefix(
        START_US, 1, 7, 1, A, B, None, 3, 48, None, 2, 2, 3, 48, 2**40, ["a/0", "b/0"], ["", "chat"], ["m"], START_US - 9, 0.5,
        "lower_bound", ["lost"],
    )  # fmt: skip
    rows = TableRows()
    for each in (record, msgspec.structs.replace(record, version=6, tokens=1), record):
        rows.add(each)
    rows.add(record)
    write(database, rows)
    assert only_row(database, rows.shared_prefixes) == last_of(rows.shared_prefixes)


def test_dead_letters_come_back(database: Database) -> None:
    """Bytes that are no text among them."""
    rows = TableRows()
    for offset, key, payload in ((5, b"a/0", b"\xff\x00\xc3("), (6, None, b""), (7, b"\xfe\xff", b"text")):
        rows.add(DeadLetter("kvcensus.batches", 3, offset, "holder", "not Avro", key, payload, len(payload)))
    write(database, rows)
    write(database, rows)
    names = ("topic", "partition", "offset", "reader", "reason", "hex(key)", "hex(payload)", "payload_bytes")
    found = database.query(f"SELECT {', '.join(names)} FROM dead_letters FINAL ORDER BY offset").rows
    where = ("kvcensus.batches", 3)
    assert found == [
        (*where, 5, "holder", "not Avro", "612F30", "FF00C328", 4),
        (*where, 6, "holder", "not Avro", None, "", 0),
        (*where, 7, "holder", "not Avro", "FEFF", "74657874", 4),
    ]


def test_columns_handed_out_stay_when_the_batch_is_cleared() -> None:
    rows = TableRows()
    rows.add(rank_window())
    handed = rows.rank_windows.columns
    rows.clear()
    assert len(rows) == 0
    assert list(rows.batches()) == []
    assert {len(column) for column in handed} == {1}


def test_every_column_is_filled_or_has_a_default(module_store: Database) -> None:
    for batch in TableRows().tables:
        described = module_store.query(f"DESCRIBE TABLE {batch.table}").rows
        filled = {*batch.column_names, *batch.rare_columns}
        earlier = {"parent_state"} if batch.table == "block_events" else set()
        left = {row[0] for row in described if row[2] != "DEFAULT"} - filled - earlier
        assert not left, f"{batch.table}: nothing fills {left}"
        assert filled <= {row[0] for row in described}
