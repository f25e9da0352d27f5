"""The conformance data for readers of the record contract: every fixture, through ingest, counting and store, answered by the product.

What is here translates words: a fixture's question into the function that answers it, and the answer into the fixture's word for it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from producers.segments.foreign import MISSING_SEGMENTS, SEGMENTS_DROPPED, foreign_id
from schemas.records import ID_BYTES, DuplicateWindow, Lifecycle, RankMessage, RankWindow, Recompute
from sql import migrate, store
from sql.database import Database
from sql.figures import assemble, load
from sql.observation import Gap, Observation, absence, by_rank, counted_share, holder_register, liveness, unwatched
from sql.observation_document import coverage_document
from sql.observation_figures import insertions, residual
from sql.observation_load import load_observation
from sql.rows import TableRows
from streams.offline import count
from tests.command import kvcensus
from tests.kafka import Kafka
from tests.pipeline import SETTLE_SECONDS, pipeline
from tests.segments import CORPUS, ingested, write_lines, write_ranks
from tests.segments import by_rank as by_rank_of
from tests.shared_data import shared_folder, shared_path
from tests.sql_records import write
from tests.test_segments_contract import TELEMETRY, corpus, told

FIXTURES = 41
FILLED = "SELECT name FROM system.tables WHERE database = currentDatabase() AND engine LIKE '%MergeTree' AND name != 'schema_migrations'"


def _names() -> list[str]:
    folder = shared_folder()
    return sorted(path.stem for path in (folder / CORPUS / "reader").glob("*.json")) if folder is not None else []


class Answers:
    """What the product says of one store, in the fixtures' words."""

    def __init__(self, database: Database) -> None:
        self.seen: Observation = load_observation(database)
        self.document = assemble(load(database))

    def attribution(self, asked: list[dict[str, Any]], segments: list[list[dict[str, Any]]]) -> Any:
        found = []
        for question in asked:
            run = segments[question["segment"]][0]["incarnation"]
            declared = next(each for each in self.seen.declared if each.incarnation == run)
            bounds = {"heartbeat_secs": declared.heartbeat_ms // 1_000, "max_segment_secs": declared.staleness_ms // 1_000}
            provenance = dict(declared.labels) | {name: seconds for name, seconds in bounds.items() if seconds}
            found.append({"segment": question["segment"], "provenance": provenance, "workload_class": declared.workload})
        return found

    def gap_degraded(self) -> Any:
        return sorted({_gap_word(gap) for gap in self.seen.gaps})

    def gap_span(self) -> Any:
        (gap,) = self.seen.gaps
        if not gap.narrowed:
            return {"narrowed": False}
        assert gap.from_us is not None
        assert gap.to_us is not None
        return {"narrowed": True, "start_ms": gap.from_us / 1_000, "end_ms": gap.to_us / 1_000}

    def insertions(self) -> Any:
        found = insertions(self.document)
        return {"countable": found.countable, "records": found.blocks, "tokens": found.tokens}

    def first_insertion(self) -> Any:
        found = insertions(self.document)
        return {"countable": found.countable, "records": found.first_blocks, "tokens": found.first_tokens}

    def absence(self, asked: dict[str, Any]) -> Any:
        return asked | {"register": absence(self.seen, _span_ms(asked))}

    def coverage(self, asked: dict[str, Any]) -> Any:
        return asked | {"verdict": "complete" if counted_share(self.seen, _span_ms(asked)) == 1 else "reduced"}

    def audit(self) -> Any:
        found = {}
        for audit in self.seen.audit:
            counts = asdict(audit)
            assert (counts.pop("sampled"), counts.pop("unclaimed")) == (1, 0)
            instance = counts.pop("instance_id")
            found[instance] = {"audited": audit.audited} | counts
        return found

    def residual_zero(self) -> Any:
        return residual(self.document, self.seen)

    def staleness(self) -> Any:
        assert self.seen.horizon_ms is not None
        found: dict[str, set[str]] = {}
        for run in self.seen.runs:
            found.setdefault(run.incarnation, set()).add(liveness(run, self.seen.horizon_ms))
        return {incarnation: words.pop() for incarnation, words in found.items() if len(words) == 1}

    def parent_conflicts(self) -> Any:
        return self.seen.parent_conflicts

    def holder_register(self, asked: list[dict[str, Any]]) -> Any:
        return [
            question
            | {
                "register": holder_register(
                    self.seen.refused_identities, (question["instance"], question["dp_rank"]), question["group_idx"], _span_us(question)
                )
                or "none"
            }
            for question in asked
        ]

    def uncovered(self) -> Any:
        return {rank[0]: [[float(start), float(end)] for start, end in unwatched(runs)] for rank, runs in by_rank(self.seen.runs).items()}

    def to(self, key: str, expected: Any, segments: list[list[dict[str, Any]]]) -> Any:
        """The answer to one key of a fixture's ``expect``; one that nobody knows is a KeyError."""
        plain: dict[str, Callable[[], Any]] = {
            name: getattr(self, name)
            for name in (
                "gap_degraded",
                "gap_span",
                "insertions",
                "first_insertion",
                "audit",
                "residual_zero",
                "staleness",
                "parent_conflicts",
                "uncovered",
            )
        }
        if key in plain:
            return plain[key]()
        if key == "attribution":
            return self.attribution(expected, segments)
        asking: dict[str, Callable[[Any], Any]] = {
            "absence": self.absence,
            "coverage": self.coverage,
            "holder_register": self.holder_register,
        }
        return asking[key](expected)


def _gap_word(gap: Gap) -> str:
    words = {MISSING_SEGMENTS: "missing_segment_seq", SEGMENTS_DROPPED: "segments_dropped"}
    return next((word for reason, word in words.items() if gap.reason.startswith(reason)), "dropped_delta")


def _span_ms(asked: dict[str, Any]) -> tuple[int, int]:
    start, end = asked["span_ms"]
    return int(start), int(end)


def _span_us(asked: dict[str, Any]) -> tuple[int, int]:
    start, end = asked["span_ms"]
    return round(start * 1_000), round(end * 1_000)


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Database]:
    with store.connect(None, tmp_path_factory.mktemp("store"), own=True) as opened:
        migrate.apply(opened)
        yield opened


def counted_into(database: Database, folder: Path) -> None:
    """The tables as the worker would leave them behind everything in ``folder``."""
    for (table,) in database.query(FILLED).rows:
        database.command(f"TRUNCATE TABLE `{table}`")
    facts, ingest = ingested(folder)
    assert ingest.tally.refused_files == []
    rows = TableRows()
    counted = count(fact for fact in facts if isinstance(fact, RankMessage))
    records: list[RankWindow | Recompute | DuplicateWindow] = [*counted.rank_windows, *counted.recomputes, *counted.duplicate_windows]
    for record in records:
        rows.add(record)
    for offset, fact in enumerate(facts):
        assert isinstance(fact, RankMessage | Lifecycle)
        rows.add(fact, 0, offset)
    write(database, rows)


def test_the_fixtures_are_all_here() -> None:
    shared_path(f"{CORPUS}/reader")
    assert len(_names()) == FIXTURES


@pytest.mark.parametrize("name", _names())
def test_a_reader_fixture_is_answered_by_the_product(name: str, database: Database, tmp_path: Path) -> None:
    fixture = json.loads(shared_path(f"{CORPUS}/reader/{name}.json").read_text(encoding="utf-8"))
    assert set(fixture) == {"fixture_version", "name", "note", "segments", "expect"}
    counted_into(database, write_lines(tmp_path, fixture["segments"]))
    answers = Answers(database)
    assert {key: answers.to(key, expected, fixture["segments"]) for key, expected in fixture["expect"].items()} == fixture["expect"]


# -- what a producer has to write, read again


@pytest.mark.parametrize("name", TELEMETRY)
def test_a_telemetry_fixture_comes_back_from_our_segments(name: str, tmp_path: Path) -> None:
    """The events of a fixture as our facts, through the writer's Parquet and ingest: the same facts."""
    ranks: dict[tuple[str, int], list[RankMessage]] = {}
    for number, event in enumerate(corpus(f"telemetry/{name}.json")["events"]):
        message = told(event)
        message.seq = event.get("seq", number)
        ranks.setdefault((message.instance_id, message.dp_rank), []).append(message)
    write_ranks(tmp_path, ranks.values())
    facts, ingest = ingested(tmp_path)
    assert (ingest.tally.refused_files, ingest.tally.unknown_kinds) == ([], 0)
    found = by_rank_of(facts)
    assert {rank: [message for message in messages if message.loss is None] for rank, messages in found.items()} == ranks


@pytest.mark.parametrize("name", TELEMETRY)
def test_the_records_of_a_telemetry_fixture_are_the_facts_of_its_events(name: str, tmp_path: Path) -> None:
    """The records that the contract asks for, as another producer's segment: ingest gives what the events say, block by block."""
    fixture = corpus(f"telemetry/{name}.json")
    header = {"kind": "segment_open", "at_ms": 0.0, "contract_version": "1.10", "incarnation": "1-1", "segment_seq": 0}
    facts, _ = ingested(write_lines(tmp_path, [[header, *fixture["expect"]["records"]]]))
    messages = [fact for fact in facts if isinstance(fact, RankMessage)]
    said = [(message.instance_id, message.dp_rank, message.at_us, op) for message in messages if message.batch for op in message.batch.ops]
    blocks = [
        (instance, rank, at_us, op.kind, op.group_idx, op.tier, op.block_ids[at : at + ID_BYTES], op.kind == "STORE" and op.block_size)
        for instance, rank, at_us, op in said
        for at in range(0, len(op.block_ids) or 1, ID_BYTES)
    ]
    ranks = {(event["source"], event.get("dp_rank", 0)) for event in fixture["events"]}
    expected = [
        _block(event, dp_rank)
        for event in fixture["events"]
        if event["type"] != "HolderReset"
        for source, dp_rank in ranks
        # A clear that names no rank is one of every rank of its instance.
        if source == event["source"] and (dp_rank == event.get("dp_rank", 0) or (event["type"] == "Cleared" and "dp_rank" not in event))
    ]
    assert sorted(blocks, key=str) == sorted(expected, key=str)
    resets = [event for event in fixture["events"] if event["type"] == "HolderReset"]
    assert [message.holder_reset.boundary_us for message in messages if message.holder_reset] == [
        round(event["boundary_ms"] * 1_000) for event in resets
    ]


_KINDS = {"Stored": "STORE", "Removed": "REMOVE", "Cleared": "CLEAR"}


def _block(event: dict[str, Any], dp_rank: int) -> tuple[Any, ...]:
    cleared = event["type"] == "Cleared"
    tier = event.get("medium")
    return (
        event["source"],
        dp_rank,
        round(event["at_ms"] * 1_000),
        _KINDS[event["type"]],
        event.get("group_idx", None if cleared else 0),
        tier.upper() if tier else None,
        b"" if cleared else foreign_id(str(event["block_hash"])),
        event["type"] == "Stored" and event["block_size"],
    )


# -- the whole way

TOGETHER = (
    "audit_contradiction_alarms_naming_the_instance",
    "gap_a_declared_drop_overlapping_the_window_degrades_it",
    "refused_degrades_exactly_the_named_holder_over_its_window",
    "seq_narrows_the_degraded_span_to_its_bracket",
    "staleness_a_stop_makes_the_same_silence_a_departure",
    "uncovered_the_bracket_runs_stop_to_start",
)
LISTS = ("gaps", "forwarders", "unwatched", "identity_refused", "key_spaces", "models_undeclared", "breaches", "audit", "parent_conflicts")


def renamed(record: dict[str, Any], name: str, number: int) -> dict[str, Any]:
    """A record of a fixture whose instances and runs are its own, so that several can lie in one store."""
    found = dict(record)
    if "instance_id" in found:
        found["instance_id"] = f"{name}.{found['instance_id']}"
    if "incarnation" in found:
        found["incarnation"] = f"{found['incarnation']}{number}"
    if "endpoints" in found:
        found["endpoints"] = [endpoint | {"source": f"{name}.{endpoint['source']}"} for endpoint in found["endpoints"]]
    return found


def test_fixtures_through_the_command_kafka_worker_and_store(kafka: Kafka, database: Database, tmp_path: Path) -> None:
    """`kvcensus ingest`, a broker, a worker and its store say of several fixtures at once what the same code says in one process."""
    for number, name in enumerate(TOGETHER):
        fixture = json.loads(shared_path(f"{CORPUS}/reader/{name}.json").read_text(encoding="utf-8"))
        segments = [[renamed(record, name, number) for record in segment] for segment in fixture["segments"]]
        write_lines(tmp_path / "segments" / name, segments)
    counted_into(database, tmp_path / "segments")
    wanted = coverage_document(assemble(load(database)), load_observation(database))
    ranks = [(rank["rank"], rank["coverage"], rank["gaps"], rank["forwarder"], rank["lost_batches"]) for rank in wanted["ranks"]]
    assert kvcensus("migrate", "--data-dir", str(tmp_path / "data")).returncode == 0
    with pipeline(kafka.bootstrap_servers, tmp_path / "data") as running:
        done = kvcensus("ingest", str(tmp_path / "segments"), "--bootstrap-servers", kafka.bootstrap_servers)
        assert done.returncode == 0, done.stderr
        deadline = time.monotonic() + SETTLE_SECONDS
        while True:
            assert running.worker is not None
            assert running.worker.poll() is None, running.log()
            found = running.show("coverage")
            told = [(rank["rank"], rank["coverage"], rank["gaps"], rank["forwarder"], rank["lost_batches"]) for rank in found["ranks"]]
            if told == ranks and all(found[name] == wanted[name] for name in LISTS):
                break
            assert time.monotonic() < deadline, ({name for name in LISTS if found[name] != wanted[name]}, told, ranks, running.log())
            time.sleep(0.3)
    assert {gap["rank"].split(".")[0] for gap in found["gaps"]["entries"]} == {TOGETHER[1], TOGETHER[3]}
    assert {run["state"] for run in found["forwarders"]["entries"]} == {"live", "departed", "unexplained"}
