"""The views of a counted fleet (the sample: simulated and recorded engines) say what ``kvcensus show`` says of the same hour."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime
from functools import cache
from typing import Any

import pytest

from sql.database import Database
from sql.figures import CAUSES, By, Document, assemble
from sql.load import load
from sql.store import connect
from tests.test_sql_views import reads
from tests.tools.make_sample import START_US, fill

HOUR_US = 3_600_000_000
HOURS = (START_US, START_US + HOUR_US)
WHOLE = START_US + HOUR_US
"""The hour in which every expected rank was there from beginning to end."""

BYS: tuple[By, ...] = ("workload", "model", "rank")


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Database]:
    with connect(None, tmp_path_factory.mktemp("sample")) as database:
        fill(database)
        yield database


@cache
def shown(database: Database, start_us: int, by: By | None = None) -> Document:
    """The document of one hour."""
    return assemble(load(database, start_us, start_us + HOUR_US, by))


def rows(database: Database, view: str, start_us: int, more: str = "") -> list[dict[str, Any]]:
    """Rows of one window of a view, by column."""
    found = database.query(f"SELECT * FROM {view} WHERE window_start = fromUnixTimestamp64Micro(toInt64({start_us}), 'UTC') {more}")
    return [dict(zip(found.column_names, row, strict=True)) for row in found.rows]


def by_key(documents: list[Document]) -> dict[str | None, Document]:
    """Entries of a cut. One of which there was no rank stands there for its place in the other figure."""
    return {each["key"]: each for each in documents if "no_ranks" not in each["reasons"]}


def assert_same_repeat_compute(row: dict[str, Any], expected: Document, *, whole: bool) -> None:
    for cause in CAUSES:
        told = expected[cause]
        if told is None:
            assert row[f"{cause}_tokens"] is row[f"{cause}_blocks"] is row[f"{cause}_gpu_seconds"] is None
            continue
        assert (row[f"{cause}_tokens"], row[f"{cause}_blocks"]) == (told["tokens"], told["blocks"])
        assert row[f"{cause}_gpu_seconds"] == (None if told["gpu_seconds"] is None else pytest.approx(told["gpu_seconds"]))
    if whole:
        assert row["coverage"] == pytest.approx(expected["coverage"])
        assert row["register"] == expected["register"]
    assert {reason for reason in expected["reasons"] if reason not in ("coverage", "identity")} == set(row["reasons"]) - {"identity"}


@pytest.mark.parametrize("hour", HOURS)
def test_repeat_compute_is_that_of_the_figures(sample: Database, hour: int) -> None:
    (fleet,) = rows(sample, "repeat_compute_fleet_1h", hour)
    assert_same_repeat_compute(fleet, shown(sample, hour)["repeat_compute"], whole=hour == WHOLE)
    assert fleet["unrated_tokens"] == sum(
        told["tokens"] - told["rated_tokens"] for cause in CAUSES if (told := shown(sample, hour)["repeat_compute"][cause])
    )
    for by, view in (("workload", "repeat_compute_by_workload_1h"), ("model", "repeat_compute_by_model_1h")):
        expected = by_key(shown(sample, hour, by)["repeat_compute"])
        found = {row[by]: row for row in rows(sample, view, hour)}
        assert found.keys() == expected.keys()
        for key, row in found.items():
            assert_same_repeat_compute(row, expected[key], whole=hour == WHOLE)
            assert row["ranks_measured"] == expected[key]["measurable_ranks"]["measurable"]
            assert row["ranks_telling_concurrent"] == expected[key]["concurrent_ranks"]["telling"]
            assert row["ranks"] == expected[key]["measurable_ranks"]["of"]
    if hour == START_US:  # of one rank nobody knows the rate, and one workload's streams do not tell copies
        assert fleet["unrated_tokens"] > 0
        assert (
            next(row for row in rows(sample, "repeat_compute_by_workload_1h", hour) if row["workload"] == "recorded")["concurrent_tokens"]
            is None
        )


@pytest.mark.parametrize("hour", HOURS)
def test_repeat_compute_of_a_rank_is_that_of_the_figures(sample: Database, hour: int) -> None:
    """Over its lives: the figures tell one rank at once."""
    found: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for row in sorted(rows(sample, "repeat_compute_1h", hour), key=lambda row: str(row["life_id"])):
        found.setdefault((row["instance_id"], row["dp_rank"]), []).append(row)
    ranks = {(rank["instance_id"], rank["dp_rank"]): rank for rank in shown(sample, hour)["ranks"]}
    assert found.keys() == ranks.keys()
    assert any(len(lives) == 2 for lives in found.values()) or hour == WHOLE
    for key, lives in found.items():
        rank = ranks[key]
        for cause in CAUSES:
            told = rank["repeat_compute"][cause]
            tokens = [row[f"{cause}_tokens"] for row in lives]
            assert (tokens == [None] * len(lives)) if told is None else sum(tokens) == told["tokens"]
        assert (lives[0]["stored_tokens"] is None) == (rank["stored_tokens"] is None)
        if rank["stored_tokens"] is not None:
            assert sum(row["stored_tokens"] for row in lives) == rank["stored_tokens"]
        assert sum(row["removed_tokens"] for row in lives) == rank["evicted_tokens"]
        assert sum(row["unreused_tokens"] for row in lives) == rank["unreused_tokens"]
        assert (lives[-1]["resident_tokens"], lives[-1]["resident_blocks"]) == (rank["resident_tokens"], rank["resident_blocks"])


@pytest.mark.parametrize("hour", HOURS)
def test_gpu_time_has_the_same_seconds_by_cause(sample: Database, hour: int) -> None:
    expected = by_key(shown(sample, hour, "workload")["repeat_compute"])
    found = rows(sample, "gpu_time_1h", hour)
    assert len(found) == 5 * len(expected)
    for row in found:
        told = expected[row["workload"]][row["cause"]]
        if told is None:
            assert row["gpu_seconds"] is row["tokens"] is None
        else:
            assert row["tokens"] == told["tokens"]
            assert row["gpu_seconds"] == (None if told["gpu_seconds"] is None else pytest.approx(told["gpu_seconds"]))
    assert any(row["gpu_seconds"] is None and row["tokens"] for row in found), "no rate is known of the workload code"


@pytest.mark.parametrize("hour", HOURS)
def test_return_times_are_the_histograms_of_the_figures(sample: Database, hour: int) -> None:
    expected = by_key(shown(sample, hour, "workload")["repeat_compute"])
    found: dict[tuple[str, str], list[list[int]]] = {}
    for row in sorted(rows(sample, "return_times_1h", hour), key=lambda row: int(row["from_us"])):
        found.setdefault((row["workload"], row["what"]), []).append([row["from_us"], row["to_us"], row["blocks"]])
    for workload, document in expected.items():
        assert workload is not None
        for cause in ("evicted", "cleared", "restarted"):
            assert found.get((workload, cause), []) == document[cause]["elapsed"]["histogram"]
    lifetimes: dict[str, Counter[tuple[int, int]]] = {}
    for rank in shown(sample, hour)["ranks"]:
        for from_us, to_us, blocks in rank["lifetime"]["histogram"]:
            lifetimes.setdefault(rank["workload"], Counter())[from_us, to_us] += blocks
    for workload, counted in lifetimes.items():
        assert {(a, b): n for a, b, n in found[workload, "lifetime"]} == counted
    # The windows themselves hold the same.
    inside = f"window_start >= toDateTime({hour // 10**6}, 'UTC') AND window_start < toDateTime({(hour + HOUR_US) // 10**6}, 'UTC')"
    question = f"SELECT workload, what, from_us, to_us, sum(blocks) AS n FROM {{}} WHERE {inside} GROUP BY ALL ORDER BY ALL"
    assert sample.query(question.format("return_times")).rows == sample.query(question.format("return_times_1h")).rows


@pytest.mark.parametrize("hour", HOURS)
def test_the_footprint_is_that_of_the_figures(sample: Database, hour: int) -> None:
    by_scope: dict[tuple[str, str | None], Document] = {("fleet", None): shown(sample, hour)["duplicate_footprint"]}
    for by in BYS:
        by_scope |= {(by, key): each for key, each in by_key(shown(sample, hour, by)["duplicate_footprint"]).items()}
    found = {(row["scope"], row["scope_key"]): row for row in rows(sample, "duplicate_footprint_1h", hour, "AND tier = 'GPU'")}
    assert len(found) > 10
    for scope, row in found.items():
        covered = row["covered_us"] / HOUR_US  # a scope is told of from its first rank on
        assert covered == 1 or row["scope"] != "fleet"
        if scope not in by_scope:  # ranks that have departed go on having rows that say nothing
            assert row["extra_tokens_max"] in (0, 96)
            continue
        told = by_scope[scope]
        for unit in ("tokens", "blocks", "bytes"):
            extra = told[f"extra_{unit}"]
            assert row[f"extra_{unit}_mean"] * covered == pytest.approx(extra["mean"])
            assert (row[f"extra_{unit}_max"], row[f"extra_{unit}_end"]) == (extra["max"], extra["end"])
            for place in ("inside", "between"):
                assert row[f"{place}_{unit}_mean"] * covered == pytest.approx(told[f"{place}_instances"][f"extra_{unit}"]["mean"])
        for place in ("inside", "between"):
            part = told[f"{place}_instances"]["extra_tokens"]
            assert (row[f"{place}_tokens_max"], row[f"{place}_tokens_end"]) == (part["max"], part["end"])
        if hour == WHOLE:
            assert row["coverage"] == pytest.approx(told["coverage"])
            assert row["register"] == told["register"]
    assert any(row["extra_tokens_max"] for row in found.values())


@pytest.mark.parametrize("hour", HOURS)
def test_pairs_of_workloads_are_those_of_the_figures(sample: Database, hour: int) -> None:
    expected = {(*pair["key"], pair["tier"]): pair for pair in shown(sample, hour)["workload_pairs"]}
    found = rows(sample, "workload_pairs_1h", hour)
    assert {(row["workload_a"], row["workload_b"], row["tier"]) for row in found} == expected.keys() != set()
    for row in found:
        pair = expected[row["workload_a"], row["workload_b"], row["tier"]]
        for unit in ("tokens", "blocks"):
            mean = row[f"shared_{unit}_mean"] * row["covered_us"] / HOUR_US  # told of from the first block shared on
            told = {"mean": mean, "max": row[f"shared_{unit}_max"], "end": row[f"shared_{unit}_end"]}
            assert told == pytest.approx(pair[unit])
            assert told["max"] > 0


def test_the_footprint_of_single_windows_agrees_with_a_span_of_one(sample: Database) -> None:
    start, window = START_US + 30 * 60_000_000, 10_000_000
    told = assemble(load(sample, start, start + window))["duplicate_footprint"]
    (row,) = rows(sample, "duplicate_footprint", start, "AND scope = 'fleet' AND tier = 'GPU'")
    assert row["extra_tokens_mean"] == pytest.approx(told["extra_tokens"]["mean"])
    assert (row["extra_tokens_max"], row["extra_tokens_end"]) == (told["extra_tokens"]["max"], told["extra_tokens"]["end"])
    assert row["extra_bytes_max"] == told["extra_bytes"]["max"] > 0


@pytest.mark.parametrize("hour", HOURS)
def test_rank_health_is_that_of_the_figures(sample: Database, hour: int) -> None:
    ranks = {(rank["instance_id"], rank["dp_rank"]): rank for rank in shown(sample, hour)["ranks"]}
    found = {(row["instance_id"], row["dp_rank"]): row for row in rows(sample, "rank_health_1h", hour)}
    assert found.keys() == ranks.keys()
    for key, row in found.items():
        rank = ranks[key]
        same = ("workload", "model", "batches", "lost_batches", "refused_batches", "lives", "scrapes", "departed", "pool_blocks")
        assert {name: row[name] for name in same} == {name: rank[name] for name in same}
        assert row["breaches_found"] == rank["breaches"]["count"]
        assert row["resident_blocks"] == rank["resident_blocks"], "these engines have one cache group"
        assert row["identity_coverage"] == pytest.approx(rank["identity_coverage"])
        last_batch = datetime.fromisoformat(rank["last_batch"])
        assert row["last_batch"] == last_batch
        if row["departed"]:
            assert row["lag_seconds"] is None
        else:
            ends = datetime.fromtimestamp((hour + HOUR_US) / 1e6, UTC)
            assert row["lag_seconds"] == pytest.approx((ends - last_batch).total_seconds())
        if hour == WHOLE:
            assert row["coverage"] == pytest.approx(rank["coverage"])
            assert row["register"] == rank["register"]
    assert {key: row["restarts"] for key, row in found.items() if row["restarts"]} == ({("agents-a", 0): 1} if hour == START_US else {})


def test_what_interrupted_the_sample_is_listed(sample: Database) -> None:
    found = sample.query("SELECT kind, instance_id, reason, batches_lost > 0, payload_bytes > 0 FROM interruptions ORDER BY ALL").rows
    assert [row[:2] for row in found] == [
        ("departure", "capture-a_shared_prefix"),
        ("departure", "capture-g_dp2"),
        ("departure", "capture-g_dp2"),
        ("holder_reset", "agents-a"),
        ("loss", "agents-b"),
        ("refusal", "code-a"),
    ]
    assert [row[2] for row in found if row[0] == "holder_reset"] == ["restarted"]
    assert [row[3] for row in found if row[0] == "loss"] == [True]
    assert [row[4] for row in found if row[0] == "refusal"] == [True]


def test_the_newest_shared_prefixes_are_those_of_the_figures(sample: Database) -> None:
    trunks = load(sample, prefixes=100).prefixes
    found = sample.query("SELECT place, content, extra_tokens, ranks, register FROM top_shared_prefixes ORDER BY place").rows
    assert found == [(each.place, each.content_id.hex(), each.extra_tokens, each.ranks, each.register) for each in trunks]
    assert found


def test_one_day_holds_it_all(sample: Database) -> None:
    document = assemble(load(sample))
    day = START_US - START_US % (24 * HOUR_US)
    (fleet,) = rows(sample, "repeat_compute_fleet_1d", day)
    for cause in ("evicted", "cleared", "restarted", "concurrent"):
        assert fleet[f"{cause}_tokens"] == document["repeat_compute"][cause]["tokens"]
    (footprint,) = rows(sample, "duplicate_footprint_1d", day, "AND scope = 'fleet' AND tier = 'GPU'")
    assert (footprint["extra_tokens_max"], footprint["extra_tokens_end"]) == (
        document["duplicate_footprint"]["extra_tokens"]["max"],
        document["duplicate_footprint"]["extra_tokens"]["end"],
    )
    assert (fleet["is_final"], footprint["is_final"]) == (False, False), "the day is not over"
    (hour,) = rows(sample, "repeat_compute_fleet_1h", START_US)
    assert hour["is_final"] is True, "ranks that have departed leave nothing open"


def test_recomputed_blocks_of_a_span_are_those_of_the_whole_view(sample: Database) -> None:
    since, until = (f"toDateTime({(START_US + minutes * 60_000_000) // 10**6}, 'UTC')" for minutes in (30, 45))
    asked = f"recomputed_blocks_between(since = {since}, until = {until})"
    found = sample.query(f"SELECT * FROM {asked} ORDER BY ALL").rows
    assert found == sample.query(f"SELECT * FROM recomputed_blocks WHERE back_at >= {since} AND back_at < {until} ORDER BY ALL").rows
    assert len(found) > 100
    before = asked.replace(since, "toDateTime('2026-11-02 00:00:00', 'UTC')").replace(until, "toDateTime('2026-11-02 01:00:00', 'UTC')")
    read = reads(sample, f"SELECT * FROM {before}")
    assert {table: indexes[-1]["Selected Granules"] for table, indexes in read.items()} == {"recomputes": 0, "rank_windows": 0}
