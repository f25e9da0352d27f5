"""What follows from runs, counters, gaps and refused identities; and the coverage that ``kvcensus show`` prints of a store."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from rich.console import Console

from console.commands.show import show
from console.coverage_tables import render_coverage
from schemas.records import (
    Batch,
    Breach,
    DeadLetter,
    Declaration,
    IdentityRefused,
    Lifecycle,
    Loss,
    Op,
    RankMessage,
    Refusal,
)
from sql import migrate, store
from sql.figures import assemble
from sql.observation import (
    Drop,
    Gap,
    Observation,
    RefusedIdentity,
    Run,
    Stretch,
    absence,
    counted,
    counted_share,
    explained,
    holder_register,
    liveness,
    merged,
    share,
    unwatched,
    without,
)
from sql.observation_document import coverage_document
from sql.observation_load import load_observation
from sql.rows import TableRows
from sql.totals import totals_from_records
from tests.segments import heartbeat
from tests.sql_records import START_US, WINDOW_US, group, rank_window, write

T = START_US // 1_000
ID, OTHER = b"\x01" * 16, b"\x02" * 16


def run(first: int, last: int, incarnation: str = "run", **fields: Any) -> Run:
    return Run("i0", 0, incarnation, first, last, **fields)


def gap(**fields: Any) -> Gap:
    values: dict[str, Any] = {"instance_id": "i0", "dp_rank": 0, "life_id": "life", "incarnation": "run", "kind": "lost", "reason": "lost"}
    return Gap(**(values | fields))


# -- runs


def test_silence_counts_up_to_what_the_stream_knows_and_beyond_the_declared_bound() -> None:
    silent = run(0, 100, staleness_ms=1_000)
    assert [liveness(silent, horizon) for horizon in (100, 1_100, 1_101)] == ["live", "live", "unexplained"]
    assert liveness(replace(silent, stopped=True), 10**9) == "departed"
    undeclared = replace(silent, staleness_ms=0)
    assert (liveness(undeclared, 60_100), liveness(undeclared, 60_101)) == ("live", "unexplained")


def test_nobody_watched_between_runs_and_only_there() -> None:
    assert unwatched([]) == []
    assert unwatched([run(50, 90), run(0, 10), run(10, 20), run(5, 8)]) == [(20, 50)]


stretches = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)).map(lambda pair: (min(pair), max(pair))), max_size=6)


def covered(found: list[Stretch]) -> set[int]:
    return {at for start, end in found for at in range(start, end)}


@given(stretches, stretches)
def test_stretches_are_sets_of_moments(some: list[Stretch], holes: list[Stretch]) -> None:
    union = merged(some)
    assert covered(union) == covered(some)
    assert all(before[1] < after[0] for before, after in itertools.pairwise(union))
    assert covered(without(union, holes)) == covered(some) - covered(holes)
    assert share(union, (0, 30)) == len(covered(some)) / 30


def test_what_counters_and_gaps_tell_of_is_not_counted() -> None:
    drops = (Drop(10, 20, lost=1), Drop(30, 40, unknown_events=2), Drop(60, 70, spooled=1))
    whole = run(0, 100, drops=drops)
    assert counted([whole]) == [(0, 10), (20, 60), (70, 100)]
    assert counted([whole], unknown_events=True) == [(0, 10), (20, 30), (40, 60), (70, 100)]
    missing = [gap(kind="refused", from_ms=80, to_ms=90, observed_ms=85), gap(from_ms=0, to_ms=99, incarnation="another")]
    assert counted([whole], missing) == [(0, 10), (20, 60), (70, 80), (90, 100)]
    assert counted([whole, run(5, 25, "beside")], missing)[0] == (0, 60), "another run counted what this one missed"


def test_absence_is_exact_only_where_every_rank_was_counted_throughout() -> None:
    both = Observation(runs=[run(0, 100), replace(run(0, 100), dp_rank=1)])
    assert absence(both, (0, 100)) == "exact"
    assert absence(both, (0, 101)) == "lower_bound"
    unknown = Observation(runs=[run(0, 100), replace(run(0, 100, drops=(Drop(10, 20, unknown_events=1),)), dp_rank=1)])
    assert absence(unknown, (0, 100)) == "lower_bound", "nobody knows what those events said"
    assert counted_share(unknown, (0, 100)) == 1, "but they came"
    assert absence(Observation(), (0, 100)) == "lower_bound"


# -- gaps


def test_a_counter_is_explained_by_ranges_noticed_between_the_same_life_signs() -> None:
    one = run(0, 100, drops=(Drop(10, 20, lost=3),))
    ranged = [gap(batches=2, from_ms=10, to_ms=20, observed_ms=15), gap(batches=1, from_ms=20, to_ms=30, observed_ms=20)]
    assert explained(ranged, [one]) == ranged, "what is noticed at a life sign may belong before it"
    elsewhere = [gap(batches=3, from_ms=40, to_ms=50, observed_ms=45)]
    (kept, dropped) = explained(elsewhere, [one])
    assert (kept, dropped.kind, dropped.batches, dropped.from_ms, dropped.to_ms) == (elsewhere[0], "dropped", 3, 10, 20)
    assert not dropped.narrowed
    assert (dropped.from_us, dropped.to_us) == (None, None)


def test_refusals_that_stand_for_a_counter_give_it_its_extent() -> None:
    one = run(0, 100, drops=(Drop(10, 20, lost=1),))
    vague = [
        gap(kind="refused", reason="messages were dropped", from_us=1, to_us=4, from_ms=10, to_ms=20, observed_ms=10),
        gap(kind="refused", reason="messages were dropped", from_us=4, to_us=9, from_ms=20, to_ms=None, observed_ms=20),
        gap(kind="refused", reason="segments are missing: 1 to 1", from_us=9, to_us=12, from_ms=10, to_ms=20, observed_ms=10),
    ]
    kept, dropped = explained(vague, [one])
    assert kept is vague[2]
    assert (dropped.batches, dropped.from_us, dropped.to_us) == (1, 1, 9)


def test_a_refused_identity_touches_its_holder_in_its_window_only() -> None:
    refused = [RefusedIdentity("i0", 0, 1, 5, 100, 200)]
    assert holder_register(refused, ("i0", 0), 1, (200, 300)) == "lower_bound"
    for rank, index, span in ((("i0", 1), 1, (100, 200)), (("i0", 0), 0, (100, 200)), (("i0", 0), 1, (201, 300)), (("i1", 0), 1, (0, 999))):
        assert holder_register(refused, rank, index, span) is None


# -- a store


def message(seq: int, at_us: int, dp_rank: int = 0, observed_ms: int | None = None, **said: Any) -> RankMessage:
    return RankMessage("i0", dp_rank, "life", seq, at_us, at_us // 1_000 if observed_ms is None else observed_ms, "run", **said)


def stored(content: bytes = ID) -> Batch:
    return Batch([Op("STORE", 0, "GPU", None, 16, ID, content, "ROOT")])


def sign(at_ms: int, **fields: Any) -> Lifecycle:
    return structs.replace(heartbeat(at_ms), **fields)


FACTS: list[RankMessage | Lifecycle] = [
    message(0, START_US, declaration=Declaration("none", "per_copy", canary="c0", staleness_ms=5_000)),
    message(0, START_US, dp_rank=1, declaration=Declaration("none", "per_copy", model="m", canary="c1")),
    sign(T, kind="start"),
    message(0, START_US, batch=stored()),
    sign(T + 1_000),
    message(4, START_US, observed_ms=T + 2_000, loss=Loss(1, 3, "the engine's buffer had dropped them")),
    message(4, START_US + 2_000_000, batch=Batch([])),
    message(5, START_US + 2_000_000, refusal=Refusal("no batch", 7)),
    sign(T + 3_000, lost=3, refused=1),
    message(6, START_US + 4_000_000, batch=Batch([Op("REMOVE", 0, "GPU", block_ids=ID, content_ids=OTHER)])),
    message(7, START_US + 4_000_000, identity_refused=IdentityRefused(0, 5, START_US, START_US + 1_000_000)),
    sign(T + 5_000, lost=5, refused=1),
    sign(T + 60_000, dp_rank=1, incarnation="run-1"),
    sign(T + 61_000, kind="stop", dp_rank=1, incarnation="run-1", reason="SIGTERM"),
    sign(T + 90_000, dp_rank=1, incarnation="run-2"),
]
BREACH = Breach("cached_over_pool", START_US + 3_000_000, T + 3_000, 120, 100)
WINDOWS = [
    rank_window(
        instance_id="i0",
        life_id="life",
        model=None,
        observed_us=WINDOW_US // 2,
        lost_batches=3,
        refused_batches=1,
        reasons=["lost", "refused", "undeclared_gap"],
        groups=[group(stored_blocks=1, stored_tokens=16, resolved_tokens=16)],
        breaches=[BREACH],
        breaches_found=12,
    ),
    rank_window(instance_id="i0", dp_rank=1, life_id="life", canary="c1", groups=[group(stored_blocks=1, stored_tokens=16)]),
]
LETTER = DeadLetter("kvcensus.batches", 2, 17, "holder", "no Avro\x1b[2J", b"i0/0", b"?", 1)


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A store of facts in which something of everything went wrong."""
    folder = tmp_path_factory.mktemp("data")
    rows = TableRows()
    for offset, fact in enumerate(FACTS):
        rows.add(fact, 0, offset)
    for window in WINDOWS:
        rows.add(window)
    rows.add(LETTER)
    with store.connect(None, folder, own=True) as database:
        migrate.apply(database)
        write(database, rows)
        yield folder


def shown(data_dir: Path, *arguments: str) -> str:
    result = CliRunner().invoke(show, ["coverage", *arguments, "--data-dir", str(data_dir)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_everything_that_went_wrong_is_in_the_document(data_dir: Path) -> None:
    document = json.loads(shown(data_dir, "--json"))
    worst, other = document["ranks"]
    assert (worst["rank"], worst["gaps"], worst["breaches"], worst["forwarder"], worst["lost_batches"]) == ("i0/0", 4, 1, "unexplained", 3)
    assert (other["rank"], other["forwarder"], other["forwarder_runs"], other["unwatched_ms"]) == ("i0/1", "live", 2, 29_000)
    gaps = document["gaps"]
    assert (gaps["clock"], gaps["found"]) == ("engine", 4)
    told = {entry["reason"]: entry for entry in gaps["entries"]}
    lost = told["the engine's buffer had dropped them"]
    assert (lost["batches"], lost["from"][17:23], lost["to"][17:23], lost["narrowed"]) == (3, "20.000", "22.000", True)
    assert (told["no batch"]["batches"], told["no batch"]["to"][17:23], told["no batch"]["narrowed"]) == (1, "24.000", True)
    dropped = told["messages were dropped"]
    assert (dropped["batches"], dropped["from"], dropped["narrowed"]) == (2, None, False)
    assert (dropped["forwarder_from"][17:23], dropped["forwarder_to"][17:23]) == ("23.000", "25.000")
    assert told["undeclared_gap"]["kind"] == "undeclared"
    assert document["forwarders"]["clock"] == document["unwatched"]["clock"] == "forwarder"
    assert [(entry["state"], entry["stop_reason"]) for entry in document["forwarders"]["entries"]] == [
        ("unexplained", None),
        ("departed", "SIGTERM"),
        ("live", None),
    ]
    assert [(entry["rank"], entry["ms"]) for entry in document["unwatched"]["entries"]] == [("i0/1", 29_000)]
    assert [(entry["group_idx"], entry["refused"]) for entry in document["identity_refused"]["entries"]] == [(0, 5)]
    assert [(space["canary"], space["ranks"]) for space in document["key_spaces"]] == [("c0", ["i0/0"]), ("c1", ["i0/1"])]
    assert document["models_undeclared"] == ["i0/0"]
    breaches = document["breaches"]
    assert (breaches["found"], breaches["entries"][0]["found"], breaches["entries"][0]["bound"]) == (12, 120, 100)
    assert [(each["audited"], each["mismatched"]) for each in document["audit"]] == [(1, 1)]
    assert document["parent_conflicts"] == {"contents": 0, "sampled": 1}
    assert document["dead_letters"]["entries"][0]["offset"] == 17


def test_tables_fit_and_show_nothing_that_moves_a_cursor(data_dir: Path) -> None:
    with store.connect(None, data_dir) as database:
        document = coverage_document(assemble(totals_from_records(WINDOWS, [])), load_observation(database))
    console = Console(width=100, highlight=False, markup=False, record=True, force_terminal=False)
    with console.capture() as captured:
        render_coverage(document, console)
    output = captured.get()
    assert max(map(len, output.splitlines())) <= 100
    assert "\x1b" not in output
    assert output.index("i0/0") < output.index("i0/1")
    for said in (
        "Ranks, least covered first",
        "Gaps (engine time): 4",
        "(the forwarders' clock): 3",
        "12, of which 1 here",
        "no Avro\\x1b[2J",
    ):
        assert said in output
    assert "Coverage 75.00%" in output


def test_a_span_is_applied_to_each_list_by_its_own_clock(data_dir: Path) -> None:
    until = (START_US + 30_000_000) / 1e6
    document = json.loads(shown(data_dir, "--json", "--until", f"{until:.6f}"))
    assert [entry["rank"] for entry in document["forwarders"]["entries"]] == ["i0/0"]
    after = json.loads(shown(data_dir, "--json", "--since", f"{until:.6f}"))
    assert after["gaps"]["entries"] == []
    assert {entry["incarnation"] for entry in after["forwarders"]["entries"]} == {"run-1", "run-2"}


def test_a_window_that_only_touches_the_span_is_none_of_its(data_dir: Path) -> None:
    with store.connect(None, data_dir) as database:
        before = load_observation(database, until_us=START_US)
        inside = load_observation(database, since_us=START_US + WINDOW_US - 1)
        after = load_observation(database, since_us=START_US + WINDOW_US)
    assert (before.breaches, before.breaches_found, before.key_spaces) == ([], 0, [])
    assert (len(inside.breaches), inside.breaches_found, len(inside.key_spaces)) == (1, 12, 2)
    assert (after.breaches, after.breaches_found, after.key_spaces) == ([], 0, [])


def test_an_empty_place_says_so(tmp_path: Path) -> None:
    assert "No figures yet: there is no store" in shown(tmp_path)
    document = json.loads(shown(tmp_path, "--json"))
    assert document["ranks"] == document["gaps"]["entries"] == []
