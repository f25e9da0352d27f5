"""The conformance data for readers of the record contract: every fixture, through ingest, counting and store, answered by the product.

What is here translates words: a fixture's question into the function that answers it, and the answer into the fixture's word for it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from producers.segments.foreign import MISSING_SEGMENTS, SEGMENTS_DROPPED
from schemas.records import DuplicateWindow, Lifecycle, RankMessage, RankWindow, Recompute
from sql import migrate, store
from sql.database import Database
from sql.figures import assemble, load
from sql.observation import Gap, Observation, absence, by_rank, counted_share, holder_register, liveness, unwatched
from sql.observation_figures import insertions, residual
from sql.observation_load import load_observation
from sql.rows import TableRows
from streams.offline import count
from tests.segments import CORPUS, ingested, write_lines
from tests.shared_data import shared_folder, shared_path

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
            assert counts.pop("sampled") == 1
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
    for batch in rows.batches():
        database.insert(batch.table, batch.column_names, batch.columns)


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
