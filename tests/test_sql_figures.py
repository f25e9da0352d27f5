"""What the figures say of known totals: sums, coverage, registers and their reasons."""

from __future__ import annotations

import json
from fractions import Fraction
from typing import Any

import msgspec
import pytest

from schemas.histogram import bounds
from schemas.records import Breach, DuplicateWindow, GroupCounters, RankWindow
from sql.figures import REASONS, assemble, primary_group, reason_text
from sql.known import KnownRank
from sql.observation_figures import Insertions, insertions
from sql.times import iso
from sql.total_types import BREACHES_KEPT, listed_breaches, settle_span
from sql.totals import By, Span, totals_from_records
from tests.sql_records import START_US, WINDOW_US, duplicate_window, group, rank_window, shared_prefix

END_US = START_US + WINDOW_US
HOLDING = {"stored_blocks": 4, "stored_tokens": 64, "resolved_tokens": 64, "resident_blocks": 4, "resident_tokens": 64}


def figures(ranks: list[RankWindow], duplicates: list[DuplicateWindow] | None = None, by: By | None = None) -> dict[str, Any]:
    return assemble(totals_from_records(ranks, duplicates or [], Span(START_US, END_US), by=by))


def holder(**fields: Any) -> RankWindow:
    """A rank that was observed throughout, declared in full, and holds resolved content."""
    return rank_window(**({"groups": [group(**HOLDING)], "model": "m", "workload": "chat"} | fields))


def counts(cause: dict[str, Any]) -> dict[str, Any]:
    return {unit: cause[unit] for unit in ("tokens", "blocks")}


EXTRA = duplicate_window(
    inside_token_us=3 * WINDOW_US,
    between_token_us=WINDOW_US,
    inside_block_us=WINDOW_US,
    extra_tokens_max=6,
    inside_tokens_max=5,
    between_tokens_max=2,
    extra_blocks_max=3,
    inside_tokens_end=1,
    between_tokens_end=1,
    inside_blocks_end=1,
)


@pytest.mark.parametrize(
    ("groups", "chosen"),
    [
        ([], None),
        ([(3, None, True), (1, None, True)], 1),
        ([(0, "sliding_window", True), (1, "full_attention", True), (2, "full_attention", True)], 1),
        ([(0, "mamba", True), (1, "sink_full_attention", True), (2, None, True)], 1),
        ([(0, "full_attention", False), (1, "mla_attention", True)], 1),
        ([(0, None, False), (2, "sliding_window", True), (1, "mamba", True)], 1),
        ([(2, "full_attention", False), (1, "mamba", False)], 1),
    ],
)
def test_the_primary_group(groups: list[tuple[int, str | None, bool]], chosen: int | None) -> None:
    found = primary_group([GroupCounters(index, kind, gpu) for index, kind, gpu in groups])
    assert (found and found.group_idx) == chosen


def test_causes_come_from_the_primary_group_alone() -> None:
    counted = {f"recompute_{cause}_{unit}": n for n, (cause, unit) in enumerate((c, u) for c in _CAUSES for u in ("tokens", "blocks"))}
    document = figures([holder(groups=[group(**HOLDING, **counted), group(group_idx=1, **HOLDING, **counted)]), holder(dp_rank=1)])
    core = document["repeat_compute"]
    for number, cause in enumerate(("evicted", "cleared", "restarted", "concurrent", "ambiguous_reload")):
        assert counts(core[cause]) == {"tokens": 2 * number, "blocks": 2 * number + 1}
    rank = document["ranks"][0]
    assert rank["repeat_compute"] == {cause: core[cause] for cause in rank["repeat_compute"]}
    assert (rank["stored_tokens"], rank["resident_tokens"], rank["evicted_tokens"]) == (64, 64, 0)
    assert core["register"] == "lower_bound"
    assert core["reasons"] == ["ambiguous_reload"]


_CAUSES = ("evicted", "cleared", "restarted", "concurrent", "ambiguous")


def test_everything_seen_is_exact() -> None:
    document = figures([holder(), holder(dp_rank=1)], [EXTRA])
    assert document["repeat_compute"]["register"] == "exact"
    assert document["repeat_compute"]["coverage"] == 1.0
    assert document["repeat_compute"]["identity_coverage"] == 1.0
    footprint = document["duplicate_footprint"]
    assert footprint["register"] == "exact"
    assert footprint["extra_tokens"] == {"mean": 4.0, "max": 6, "end": 2}
    assert footprint["extra_blocks"] == {"mean": 1.0, "max": 3, "end": 1}
    assert footprint["inside_instances"]["extra_tokens"] == {"mean": 3.0, "max": 5, "end": 1}
    assert footprint["between_instances"]["extra_tokens"] == {"mean": 1.0, "max": 2, "end": 1}
    assert document["provisional"] is False
    assert document["warnings"] == []


def test_each_count_of_a_rank_stands_under_its_own_name() -> None:
    """Every count another number: none may stand for another, or be left out."""
    names = ("evicted", "cleared", "unreused", "stored")
    of_group = {f"{name}_{unit}": n for n, (name, unit) in enumerate(((x, y) for x in names for y in ("tokens", "blocks")), 100)}
    of_group |= {"reloaded_tokens": 120, "reloaded_blocks": 121, "resident_tokens": 122, "resident_blocks": 123}
    other = group(group_idx=1, spec_kind="sliding_window", forgotten_blocks=3, unjoined_evicts=4, **of_group)
    first = holder(
        groups=[group(**of_group, forgotten_blocks=130, unjoined_evicts=131), other],
        **{"batches": 140, "lost_batches": 141, "refused_batches": 142, "unresolved_blocks": 143, "scrapes": 144},
    )
    again = holder(
        groups=[], window_start_us=START_US + 1, window_us=9, observed_us=0, batches=1, canary="c1", departed=True, pool_blocks=9
    )
    entry = figures([first, again])["ranks"][0]
    apart = {name: value for name, value in of_group.items() if not name.startswith("resident")}
    assert {name: entry[name] for name in apart} == apart
    wanted = {"forgotten_blocks": 133, "unjoined_evicts": 135, "batches": 141, "lost_batches": 141, "refused_batches": 142}
    wanted |= {"unresolved_blocks": 143, "scrapes": 144, "lives": 1, "pool_blocks": 9}
    assert {name: entry[name] for name in wanted} == wanted
    assert entry["departed"] is True
    assert figures([first])["ranks"][0]["resident_blocks"] == 123


def test_where_nothing_was_stored_no_share_of_it_has_an_identity() -> None:
    assert figures([holder(groups=[group(resident_blocks=1)])])["repeat_compute"]["identity_coverage"] is None


def test_a_row_that_is_not_final_makes_the_document_provisional() -> None:
    assert figures([holder(final=False), holder(dp_rank=1)], [EXTRA])["provisional"] is True


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"observed_us": WINDOW_US - 1}, "coverage"),
        ({"reuse_reporting": "unlabelled"}, "unlabelled"),
        ({"warmup": True}, "warmup"),
        ({"groups": [group(**(HOLDING | {"resolved_tokens": 63}))]}, "identity"),
        ({"groups": [group(**HOLDING, recompute_ambiguous_blocks=1, recompute_ambiguous_tokens=16)]}, "ambiguous_reload"),
    ],
)
def test_what_makes_a_figure_a_lower_bound(fields: dict[str, Any], reason: str) -> None:
    document = figures([holder(**fields), holder(dp_rank=1)], [EXTRA])
    for core in (document["repeat_compute"], document["duplicate_footprint"], document["ranks"][0]):
        assert core["register"] == "lower_bound"
        assert core["reasons"] == [reason]
    assert document["ranks"][1]["register"] == "exact"


def test_an_unresolved_block_of_any_group_spoils_only_the_duplicates() -> None:
    other = group(group_idx=1, spec_kind="sliding_window", stored_blocks=1, stored_tokens=16)
    document = figures([holder(groups=[group(**HOLDING), other]), holder(dp_rank=1)], [EXTRA])
    assert document["repeat_compute"]["register"] == "exact"
    assert document["duplicate_footprint"]["register"] == "lower_bound"
    assert document["duplicate_footprint"]["reasons"] == ["identity"]


def test_nothing_observed_says_nothing() -> None:
    document = figures([holder(observed_us=0), holder(dp_rank=1, observed_us=0)], [EXTRA])
    for core in (document["repeat_compute"], document["duplicate_footprint"]):
        assert core["register"] == "indeterminate"
        assert "not_observed" in core["reasons"]
        assert core["coverage"] == 0.0


def test_an_empty_document_has_the_whole_core() -> None:
    document = assemble(totals_from_records([], []))
    core = document["repeat_compute"]
    zero = {"tokens": 0, "blocks": 0}
    assert [counts(core[cause]) for cause in ("evicted", "cleared", "restarted", "ambiguous_reload")] == [zero] * 4
    assert document["shared_prefixes"] == {"as_of": None, "as_of_us": None, "trunks": []}
    assert document["workload_pairs"] == []
    assert core["concurrent"] is None
    assert (core["coverage"], core["register"], core["reasons"]) == (0.0, "indeterminate", ["no_ranks"])
    footprint = document["duplicate_footprint"]
    assert footprint["extra_tokens"] == {"mean": 0.0, "max": 0, "end": 0}
    assert (footprint["coverage"], footprint["register"], footprint["reasons"]) == (0.0, "indeterminate", ["no_ranks"])
    assert document["ranks"] == []
    assert document["span"]["since"] is None
    assert document["semantics_version"] is None


def test_concurrent_is_of_the_ranks_that_can_tell() -> None:
    counted = group(**HOLDING, recompute_concurrent_tokens=16, recompute_concurrent_blocks=1)
    none, labelled, unlabelled = (
        holder(dp_rank=n, reuse_reporting=reporting, groups=[counted]) for n, reporting in enumerate(("none", "labelled", "unlabelled"))
    )
    core = figures([none, labelled, unlabelled])["repeat_compute"]
    assert counts(core["concurrent"]) == {"tokens": 32, "blocks": 2}
    assert core["concurrent_ranks"] == {"telling": 2, "of": 3}
    document = figures([unlabelled])
    assert document["repeat_compute"]["concurrent"] is None
    assert document["ranks"][0]["repeat_compute"]["concurrent"] is None
    assert document["ranks"][0]["stored_tokens"] is None
    assert document["ranks"][0]["stored_blocks"] is None
    assert document["ranks"][0]["resident_tokens"] == 64


def test_a_rank_with_a_connector_is_not_measured() -> None:
    counted = group(**HOLDING, recompute_evicted_tokens=16, recompute_evicted_blocks=1)
    loaded, plain = holder(kv_connector="offload", groups=[counted]), holder(dp_rank=1, groups=[counted])
    document = figures([loaded, plain])
    assert counts(document["repeat_compute"]["evicted"]) == {"tokens": 16, "blocks": 1}
    assert document["repeat_compute"]["register"] == "lower_bound"
    assert document["repeat_compute"]["reasons"] == ["kv_connector"]
    assert document["repeat_compute"]["measurable_ranks"] == {"measurable": 1, "of": 2}
    rank = document["ranks"][0]
    assert rank["repeat_compute"] is None
    assert (rank["register"], rank["reasons"]) == ("indeterminate", ["kv_connector"])
    assert rank["stored_tokens"] == 64
    core = figures([loaded])["repeat_compute"]
    assert [core[cause] for cause in ("evicted", "cleared", "restarted", "concurrent", "ambiguous_reload")] == [None] * 5
    assert core["register"] == "indeterminate"


def test_between_needs_declared_models() -> None:
    document = figures([holder(model=None), holder(instance_id="b")], [EXTRA])
    footprint = document["duplicate_footprint"]
    assert footprint["inside_instances"]["register"] == "exact"
    assert footprint["between_instances"]["register"] == "indeterminate"
    assert footprint["register"] == "indeterminate"
    assert footprint["reasons"] == ["model_undeclared"]
    assert len(footprint["warnings"]) == 1
    one = figures([holder(model=None), holder(model=None, dp_rank=1)], [EXTRA])["duplicate_footprint"]
    assert one["register"] == "exact", "inside one instance there is one model"


@pytest.mark.parametrize("other", [{"canary": "c9"}, {"key_epoch": 9}])
def test_ranks_keyed_differently_are_not_comparable(other: dict[str, Any]) -> None:
    footprint = figures([holder(), holder(instance_id="b", **other)], [EXTRA])["duplicate_footprint"]
    assert footprint["between_instances"]["register"] == "indeterminate"
    assert footprint["inside_instances"]["register"] == "exact"
    assert footprint["reasons"] == ["key_change"]
    assert "keyed differently" in footprint["warnings"][0]
    footprint = figures([holder(), holder(dp_rank=1, **other)], [EXTRA])["duplicate_footprint"]
    assert footprint["inside_instances"]["register"] == "indeterminate"


def test_a_new_key_epoch_in_the_span_is_warned_of() -> None:
    first = holder(observed_us=WINDOW_US // 2)
    second = holder(life_id="life-2", key_epoch=1, observed_us=WINDOW_US // 2)
    document = figures([first, second])
    assert document["warnings"] == ["key epochs 0, 1 in this span: content ids of different epochs cannot be compared"]
    assert document["repeat_compute"]["coverage"] == 1.0
    assert (document["repeat_compute"]["register"], document["repeat_compute"]["reasons"]) == ("lower_bound", ["key_change"])


@pytest.mark.parametrize(
    "ranks",
    [
        [holder()],
        [holder(), holder(dp_rank=1, groups=[])],
        [holder(), holder(dp_rank=1, groups=[group(**(HOLDING | {"resolved_tokens": 0}))])],
    ],
)
def test_zero_with_a_single_holder_is_not_measured(ranks: list[RankWindow]) -> None:
    footprint = figures(ranks, [duplicate_window()])["duplicate_footprint"]
    assert footprint["register"] == "indeterminate"
    assert "single_holder" in footprint["reasons"]
    assert footprint["extra_tokens"]["mean"] == 0.0
    measured = figures([holder(), holder(dp_rank=1)], [duplicate_window()])["duplicate_footprint"]
    assert (measured["register"], measured["reasons"]) == ("exact", [])


def test_duplicates_that_are_not_all_counted_yet() -> None:
    ranks = [holder(), holder(dp_rank=1)]

    def read(*windows: DuplicateWindow) -> tuple[str, list[str]]:
        footprint = figures(ranks, list(windows))["duplicate_footprint"]
        return footprint["register"], footprint["reasons"]

    assert read() == ("indeterminate", ["no_duplicate_windows"])
    assert read(duplicate_window(shards_reported=3, extra_blocks_max=1)) == ("lower_bound", ["shards_missing"])
    assert read(duplicate_window(as_of_us=END_US - 1, extra_blocks_max=1)) == ("lower_bound", ["behind"])
    assert figures(ranks, [duplicate_window(final=False)])["provisional"] is True


def test_means_are_divided_once() -> None:
    """Sums of whole numbers first: three windows of a third each give one, not 0.9999."""
    third = [
        duplicate_window(window_start_us=START_US + n * WINDOW_US, inside_token_us=WINDOW_US + n, as_of_us=START_US + (n + 1) * WINDOW_US)
        for n in range(3)
    ]
    ranks = [holder(), holder(dp_rank=1)]
    span = Span(START_US, START_US + 3 * WINDOW_US)
    document = assemble(totals_from_records(ranks, third, span))
    assert document["duplicate_footprint"]["extra_tokens"]["mean"] == float(Fraction(3 * WINDOW_US + 3, 3 * WINDOW_US))


def test_other_tiers_stand_beside() -> None:
    document = figures(
        [holder(), holder(dp_rank=1)], [EXTRA, duplicate_window(tier="CPU", inside_token_us=2 * WINDOW_US, extra_tokens_max=9)]
    )
    footprint = document["duplicate_footprint"]
    assert footprint["extra_tokens"]["mean"] == 4.0
    assert footprint["other_tiers"]["CPU"]["extra_tokens"] == {"mean": 2.0, "max": 9, "end": 0}
    assert list(footprint["other_tiers"]) == ["CPU"]
    assert footprint["other_tiers"]["CPU"]["register"] == "exact"


def test_every_figure_says_how_it_may_be_read() -> None:
    """Above every count in the document, or beside it, stand coverage, register and reasons."""
    pair = duplicate_window(scope="workload_pair", scope_key='["", "chat"]', between_token_us=1)
    cuts = [duplicate_window(scope=scope, scope_key=key) for scope, key in (("rank", "a/0"), ("workload", "chat"), ("model", "m"))]
    rows = [EXTRA, duplicate_window(tier="CPU"), pair, *cuts]
    unsaid: list[str] = []

    def look(document: Any, path: str, said: bool) -> None:
        if isinstance(document, list):
            for number, each in enumerate(document):
                look(each, f"{path}[{number}]", said)
        elif isinstance(document, dict):
            said = said or {"coverage", "register", "reasons"} <= document.keys()
            unsaid.extend(f"{path}.{name}" for name in document if name.endswith(("tokens", "blocks", "bytes", "gpu_seconds")) and not said)
            for name, each in document.items():
                # What stands in a cut, or in another tier, must say so for itself.
                look(each, f"{path}.{name}", said and name not in ("other_tiers", "ranks", "fleet"))

    cuts_by: list[By | None] = [None, "rank", "workload", "model"]
    for by in cuts_by:
        totals = totals_from_records(
            [holder(), holder(dp_rank=1)], rows, Span(START_US, END_US), by=by, shared_prefixes=[shared_prefix(as_of_us=END_US)]
        )
        document = assemble(totals)
        assert document["shared_prefixes"]["trunks"]
        assert document["workload_pairs"]
        look(document, "", said=False)
    assert unsaid == []


def test_by_workload_undeclared_is_a_bucket_of_its_own() -> None:
    counted = group(**HOLDING, recompute_evicted_tokens=16, recompute_evicted_blocks=1)
    ranks = [holder(workload=None, groups=[counted]), holder(dp_rank=1), holder(dp_rank=2, groups=[counted], observed_us=0)]
    scoped = [
        EXTRA,
        duplicate_window(scope="workload", scope_key="", inside_token_us=WINDOW_US),
        duplicate_window(scope="workload", scope_key="chat", inside_token_us=2 * WINDOW_US),
    ]
    document = figures(ranks, scoped, by="workload")
    keys = [(core["key"], core["label"]) for core in document["repeat_compute"]]
    assert keys == [("chat", "chat"), (None, "(undeclared)")]
    assert [core["evicted"]["tokens"] for core in document["repeat_compute"]] == [16, 16]
    assert [core["coverage"] for core in document["repeat_compute"]] == [0.5, 1.0]
    assert [core["extra_tokens"]["mean"] for core in document["duplicate_footprint"]] == [2.0, 1.0]
    assert document["fleet"]["repeat_compute"]["evicted"]["tokens"] == 32
    assert document["fleet"]["duplicate_footprint"]["extra_tokens"]["mean"] == 4.0


def test_by_rank_in_the_order_of_ranks() -> None:
    document = figures([holder(dp_rank=n) for n in (10, 9, 0)], [EXTRA, duplicate_window(scope="rank", scope_key="a/9")], by="rank")
    keys = [core["key"] for core in document["repeat_compute"]]
    assert keys == ["a/0", "a/9", "a/10"]
    assert [core["key"] for core in document["duplicate_footprint"]] == keys
    assert [rank["dp_rank"] for rank in document["ranks"]] == [0, 9, 10]


def test_versions_of_the_rules_are_not_summed() -> None:
    old = holder(semantics_version=1)
    new = holder(semantics_version=2, groups=[group(**(HOLDING | {"stored_tokens": 7, "resolved_tokens": 7}))])
    document = figures([old, new])
    assert document["semantics_version"] == 2
    assert document["ranks"][0]["stored_tokens"] == 7
    assert document["warnings"] == ["only rows of semantics_version 2 are summed; rows of 1 in this span are left out"]


def test_several_lives_add_up_and_the_last_one_is_resident() -> None:
    before = holder(life_id="z", observed_us=1)
    after = holder(
        life_id="a", window_start_us=END_US, observed_us=2, groups=[group(**(HOLDING | {"resident_tokens": 5}))], workload="code"
    )
    document = assemble(totals_from_records([before, after], [], Span(START_US, END_US + WINDOW_US)))
    rank = document["ranks"][0]
    assert (rank["stored_tokens"], rank["resident_tokens"], rank["lives"], rank["workload"]) == (128, 5, 2, "code")
    assert document["repeat_compute"]["coverage"] == 3 / (2 * WINDOW_US)


def test_the_default_span_is_from_the_first_to_the_last_batch() -> None:
    ranks = [
        holder(first_batch_us=START_US + 5, last_batch_us=START_US + 9),
        holder(dp_rank=1, first_batch_us=START_US + 3, last_batch_us=START_US + 7),
    ]
    span = assemble(totals_from_records(ranks, []))["span"]
    assert (span["since_us"], span["until_us"], span["widened_to_windows"]) == (START_US + 3, START_US + 9, False)
    assert span["since"] == iso(START_US + 3)


def recomputing(tokens: int = 1600, gpu_us: int = 0, unrated: int = 0, **fields: Any) -> RankWindow:
    """A rank that computed evicted blocks again."""
    counted = {"recompute_evicted_tokens": tokens, "recompute_evicted_blocks": tokens // 16, "recompute_evicted_gpu_us": gpu_us}
    return holder(groups=[group(**HOLDING, **counted, unrated_tokens=unrated)], **fields)


def gpu_time(*ranks: RankWindow) -> tuple[float | None, int, str | None]:
    evicted = figures(list(ranks))["repeat_compute"]["evicted"]
    assert evicted["gpu_seconds_are"] == "estimate"
    return evicted["gpu_seconds"], evicted["rated_tokens"], evicted["method"]


def test_gpu_time_says_how_much_it_covers_and_by_what() -> None:
    declared = recomputing(gpu_us=2_500_000, prefill_rate=640.0, prefill_rate_source="declared")
    measured = recomputing(gpu_us=500_000, dp_rank=1, prefill_rate=3200.0, prefill_rate_source="measured")
    unknown = recomputing(unrated=1600, dp_rank=2)
    partly = recomputing(gpu_us=1_000_000, unrated=600, dp_rank=3, prefill_rate=1000.0, prefill_rate_source="measured")
    assert gpu_time(declared) == (2.5, 1600, "declared")
    assert gpu_time(declared, measured) == (3.0, 3200, "mixed")
    assert gpu_time(unknown) == (None, 0, None)
    assert gpu_time(unknown, measured) == (0.5, 1600, "measured")
    assert gpu_time(partly) == (1.0, 1000, "measured")
    assert gpu_time(recomputing(0)) == (0.0, 0, None)
    assert gpu_time(recomputing()) == (None, 0, None), "as rows of the version before tell it"
    rank = figures([measured])["ranks"][0]
    assert (rank["prefill_rate"], rank["prefill_rate_source"]) == (3200.0, "measured")
    assert rank["repeat_compute"]["evicted"]["gpu_seconds"] == 0.5


def test_tokens_without_a_rate_are_those_of_the_causes_without_gpu_time_first() -> None:
    counted = {"recompute_evicted_tokens": 100, "recompute_evicted_gpu_us": 9, "recompute_cleared_tokens": 50}
    core = figures([holder(groups=[group(**counted, unrated_tokens=70)], prefill_rate_source="declared")])["repeat_compute"]
    assert (core["evicted"]["rated_tokens"], core["cleared"]["rated_tokens"]) == (80, 0)
    assert core["cleared"]["gpu_seconds"] is None


def test_how_soon_content_came_back() -> None:
    soon = group(**HOLDING, back_evicted_buckets=[3, 40], back_evicted_counts=[98, 1], lifetime_buckets=[5], lifetime_counts=[1])
    late = group(**HOLDING, back_evicted_buckets=[40, 92], back_evicted_counts=[99, 2])
    other = group(group_idx=1, back_evicted_buckets=[1], back_evicted_counts=[1000])
    document = figures([holder(groups=[soon, other]), holder(dp_rank=1, groups=[late])])
    elapsed = document["repeat_compute"]["evicted"]["elapsed"]
    assert elapsed["histogram"] == [[*bounds(3), 98], [*bounds(40), 100], [*bounds(92), 2]]
    assert (elapsed["p50"], elapsed["p90"], elapsed["p99"]) == (bounds(40)[1] / 1e6,) * 3
    assert document["ranks"][0]["lifetime"]["p99"] == bounds(5)[1] / 1e6
    assert document["ranks"][1]["lifetime"] == {"p50": None, "p90": None, "p99": None, "histogram": []}
    assert document["ranks"][0]["repeat_compute"]["evicted"]["elapsed"]["p50"] == bounds(3)[1] / 1e6
    assert "elapsed" not in document["ranks"][0]["repeat_compute"]["concurrent"]
    cleared = figures([holder(groups=[group(**HOLDING, back_cleared_buckets=[7], back_cleared_counts=[1])])])["repeat_compute"]
    assert [cleared[cause]["elapsed"]["histogram"] for cause in ("evicted", "cleared", "restarted")] == [[], [[*bounds(7), 1]], []]


def test_bytes_of_a_rank_need_the_size_of_every_group_that_holds_something() -> None:
    first = group(**HOLDING, kv_bytes_per_token=1000)
    second = group(group_idx=1, resident_tokens=10, kv_bytes_per_token=7)
    unknown = group(group_idx=1, resident_tokens=10)
    empty = group(group_idx=1)

    def resident_bytes(*groups: GroupCounters) -> int | None:
        found: int | None = figures([holder(groups=list(groups))])["ranks"][0]["resident_bytes"]
        return found

    assert resident_bytes(first) == 64_000
    assert resident_bytes(first, second) == 64_070
    assert resident_bytes(first, unknown) is None
    assert resident_bytes(first, empty) == 64_000


def test_bytes_of_duplicates() -> None:
    sized = {
        "inside_byte_ms": 3_000_000,
        "between_byte_ms": 1_000_000,
        "extra_bytes_max": 900,
        "inside_bytes_end": 5,
        "between_bytes_end": 6,
    }
    ranks = [holder(), holder(dp_rank=1)]
    footprint = figures(ranks, [msgspec.structs.replace(EXTRA, **sized)])["duplicate_footprint"]
    assert footprint["extra_bytes"] == {"mean": 400.0, "max": 900, "end": 11}
    assert footprint["inside_instances"]["extra_bytes"] == {"mean": 300.0, "end": 5}
    unsized = figures(ranks, [EXTRA])["duplicate_footprint"]
    assert unsized["extra_bytes"] == {"mean": None, "max": None, "end": None}


@pytest.mark.parametrize(
    ("told", "registers"),
    [
        (["late_data"], ("lower_bound", "lower_bound")),
        (["parent_conflict"], ("lower_bound", "lower_bound")),
        (["model_undeclared"], ("exact", "indeterminate")),
        (["kv_connector", "history_forgotten"], ("exact", "exact")),
        # Of one window: the first and the last are clipped by the span.
        (["coverage", "single_holder"], ("exact", "exact")),
    ],
)
def test_what_duplicate_windows_say_of_themselves_reaches_the_figure(told: list[str], registers: tuple[str, str]) -> None:
    footprint = figures([holder(), holder(dp_rank=1)], [msgspec.structs.replace(EXTRA, reasons=told, late_changes=3)])[
        "duplicate_footprint"
    ]
    assert tuple(footprint[f"{place}_instances"]["register"] for place in ("inside", "between")) == registers
    assert footprint["reasons"] == (told if "exact" not in registers or told == ["model_undeclared"] else [])
    assert footprint["late_changes"] == 3


def test_what_the_fleets_windows_say_lowers_every_cut() -> None:
    scoped = duplicate_window(scope="workload", scope_key="chat", inside_token_us=1)

    def cut(**fleet: Any) -> tuple[str, list[str]]:
        (core,) = figures([holder(), holder(dp_rank=1)], [msgspec.structs.replace(EXTRA, **fleet), scoped], by="workload")[
            "duplicate_footprint"
        ]
        return core["register"], core["reasons"]

    assert cut() == ("exact", [])
    assert cut(reasons=["late_data"]) == ("lower_bound", ["late_data"])
    assert cut(shards_reported=3) == ("lower_bound", ["shards_missing"])


@pytest.mark.parametrize("reason", ["kv_connector", "history_forgotten"])
def test_what_lowers_repeat_compute_alone_leaves_the_footprint_as_it_is(reason: str) -> None:
    document = figures([holder(reasons=[reason]), holder(dp_rank=1)], [EXTRA])
    assert reason in document["repeat_compute"]["reasons"]
    assert (document["duplicate_footprint"]["register"], document["duplicate_footprint"]["reasons"]) == ("exact", [])


def test_shards_that_have_not_heard_all_of_a_rank_are_behind() -> None:
    ranks = [holder(), holder(dp_rank=1, last_batch_us=END_US - 10)]

    def behind(**said: Any) -> bool:
        """Over the whole stream: of an older span nobody says what was heard when."""
        rows = [msgspec.structs.replace(EXTRA, **said)]
        return "behind" in assemble(totals_from_records(ranks, rows))["duplicate_footprint"]["reasons"]

    assert not behind(ranks=2, rank_lag_us=10)
    assert behind(ranks=2, rank_lag_us=11)
    assert behind(ranks=1, rank_lag_us=0)


def test_first_insertions_are_those_that_neither_came_back_nor_were_loaded() -> None:
    counted = group(
        stored_blocks=100,
        stored_tokens=1600,
        recompute_evicted_blocks=5,
        recompute_evicted_tokens=80,
        reloaded_blocks=7,
        reloaded_tokens=112,
    )
    document = figures([holder(groups=[counted])])
    assert insertions(document) == Insertions(countable=True, blocks=100, tokens=1600, first_blocks=88, first_tokens=1408)
    assert insertions(figures([holder(reuse_reporting="unlabelled")])) == Insertions(countable=False)


def test_pairs_of_workloads() -> None:
    pairs = [
        duplicate_window(
            scope="workload_pair", scope_key=json.dumps(pair), between_token_us=n * WINDOW_US, between_tokens_max=9, between_blocks_end=n
        )
        for n, pair in enumerate((["", "chat"], ["chat", "code"]), 1)
    ]
    cpu = msgspec.structs.replace(pairs[1], tier="CPU", between_token_us=99 * WINDOW_US)
    document = figures([holder(), holder(dp_rank=1)], [EXTRA, cpu, *pairs], by="workload")
    found = [(pair["key"], pair["tier"], pair["tokens"], pair["blocks"]["end"], pair["bytes"]) for pair in document["workload_pairs"]]
    assert found == [
        (["chat", "code"], "GPU", {"mean": 2.0, "max": 9, "end": 0}, 2, None),
        ([None, "chat"], "GPU", {"mean": 1.0, "max": 9, "end": 0}, 1, None),
        (["chat", "code"], "CPU", {"mean": 99.0, "max": 9, "end": 0}, 2, None),
    ]
    assert {(pair["coverage"], pair["register"]) for pair in document["workload_pairs"]} == {(1.0, "exact")}


def test_shared_prefixes_of_the_last_instant() -> None:
    first, last = (
        shared_prefix(as_of_us=END_US),
        shared_prefix(as_of_us=END_US + 1, extra_tokens=7, parent_content_id=b"\x09" * 16, depth_tokens=80),
    )
    second = shared_prefix(as_of_us=END_US + 1, place=2)
    totals = totals_from_records([holder()], [], shared_prefixes=[second, first, last], prefixes=1)
    told = assemble(totals)["shared_prefixes"]
    assert told["as_of"] == iso(END_US + 1)
    (trunk,) = told["trunks"]
    assert (trunk["head_content_id"], trunk["content_id"]) == ("01" * 16, "02" * 16)
    assert (trunk["tokens"], trunk["depth_tokens"], trunk["parent_content_id"]) == (64, 80, "09" * 16)
    assert (trunk["place"], trunk["extra_tokens"], trunk["extra_bytes"], trunk["workloads"]) == (1, 7, None, [None, "chat"])
    assert (trunk["content_id"], trunk["parent_content_id"]) == ("02" * 16, "09" * 16)
    assert (trunk["coverage"], trunk["register"]) == (1.0, "exact")
    until = totals_from_records([holder()], [], until_us=END_US, shared_prefixes=[second, first, last])
    assert assemble(until)["shared_prefixes"]["as_of_us"] == END_US


def test_a_rank_that_is_absent_counts_as_not_observed() -> None:
    silent = KnownRank("b", 0, workload="chat", model="m", reuse_reporting="none", canary="c0")
    document = assemble(totals_from_records([holder(), holder(dp_rank=1)], [EXTRA], Span(START_US, END_US), known=[silent]))
    assert document["repeat_compute"]["coverage"] == 1.0, "it was heard of in no engine time"
    heard = KnownRank("b", 0, workload="chat", model="m", reuse_reporting="none", canary="c0", first_us=START_US - 1)
    document = assemble(totals_from_records([holder(), holder(dp_rank=1)], [EXTRA], Span(START_US, END_US), known=[heard], by="workload"))
    for core in (document["repeat_compute"][0], document["fleet"]["repeat_compute"], document["fleet"]["duplicate_footprint"]):
        assert core["coverage"] == pytest.approx(2 / 3)
        assert (core["register"], core["reasons"]) == ("lower_bound", ["absent", "coverage"])
    rank = document["ranks"][2]
    assert (rank["instance_id"], rank["lives"], rank["coverage"], rank["register"]) == ("b", 0, 0.0, "indeterminate")
    assert rank["reasons"] == ["absent", "not_observed"]


def test_contradictions_with_the_metrics_are_shown_with_both_numbers() -> None:
    breach = Breach("cached_over_pool", START_US + 5, START_US // 1000, 120, 100)
    rank = figures([holder(breaches=[breach], breaches_found=12, scrapes=20, pool_blocks=100, reasons=["cached_over_pool"])])["ranks"][0]
    assert rank["breaches"]["count"] == 12
    assert rank["breaches"]["listed"] == [{"kind": "cached_over_pool", "at": iso(START_US + 5), "found_blocks": 120, "bound_blocks": 100}]
    assert (rank["scrapes"], rank["pool_blocks"], rank["register"]) == (20, 100, "lower_bound")


def test_the_contradictions_by_the_most_blocks_are_listed() -> None:
    breaches = [Breach("in_use_over_cached", START_US + n, n, 100 + n, 100) for n in range(BREACHES_KEPT + 3)]
    breaches += [Breach("cached_over_pool", START_US, 0, 500, 100), Breach("cached_over_pool", START_US + 1, 1, 500, 100)]
    listed = listed_breaches(breaches)
    assert [(each.found - each.bound, each.at_us - START_US) for each in listed] == [
        (400, 0),
        (400, 1),
        *((n, n) for n in range(12, 4, -1)),
    ]


def test_a_span_of_which_one_side_alone_is_known_is_empty_there() -> None:
    assert (settle_span(None, 5, None, None), settle_span(7, None, None, None)) == (Span(5, 5), Span(7, 7))
    assert (settle_span(None, None, 3, 9), settle_span(None, None, None, None), settle_span(8, 3, 1, 9)) == (
        Span(3, 9),
        Span(0, 0),
        Span(8, 8),
    )


def test_one_clock_far_ahead_is_named() -> None:
    day = 86_400_000_000
    far = holder(dp_rank=7, last_batch_us=END_US + day + 1)
    ranks = [holder(), holder(dp_rank=1), far]
    (warning,) = assemble(totals_from_records(ranks, []))["warnings"]
    assert "a/7" in warning
    assert iso(END_US + day + 1) in warning
    assert assemble(totals_from_records(ranks, [], until_us=END_US))["warnings"] == []
    assert assemble(totals_from_records([*ranks, holder(dp_rank=8, last_batch_us=END_US + day)], []))["warnings"] == []


def test_a_version_of_the_rules_may_be_asked_for() -> None:
    old, new = holder(semantics_version=1, batches=5), holder(semantics_version=2)
    document = assemble(totals_from_records([old, new], [], semantics_version=1))
    assert (document["semantics_version"], document["ranks"][0]["batches"]) == (1, 5)
    assert document["warnings"] == ["only rows of semantics_version 1 are summed; rows of 2 in this span are left out"]


def test_reasons_have_words() -> None:
    assert reason_text("lost") == REASONS["lost"]
    assert reason_text("something_new") == "something new"
