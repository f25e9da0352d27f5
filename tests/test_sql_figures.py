"""What the figures say of known totals: sums, coverage, registers and their reasons."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest

from schemas.records import DuplicateWindow, GroupCounters, RankWindow
from sql.figures import REASONS, assemble, primary_group, reason_text
from sql.times import iso
from sql.totals import By, Span, totals_from_records
from tests.sql_records import START_US, WINDOW_US, duplicate_window, group, rank_window

END_US = START_US + WINDOW_US
HOLDING = {"stored_blocks": 4, "stored_tokens": 64, "resolved_tokens": 64, "resident_blocks": 4, "resident_tokens": 64}


def figures(ranks: list[RankWindow], duplicates: list[DuplicateWindow] | None = None, by: By | None = None) -> dict[str, Any]:
    return assemble(totals_from_records(ranks, duplicates or [], Span(START_US, END_US), by=by))


def holder(**fields: Any) -> RankWindow:
    """A rank that was observed throughout, declared in full, and holds resolved content."""
    return rank_window(**({"groups": [group(**HOLDING)], "model": "m", "workload": "chat"} | fields))


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
        assert core[cause] == {"tokens": 2 * number, "blocks": 2 * number + 1}
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
    assert (core["evicted"], core["cleared"], core["restarted"], core["ambiguous_reload"]) == (zero,) * 4
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
    assert core["concurrent"] == {"tokens": 32, "blocks": 2}
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
    assert document["repeat_compute"]["evicted"] == {"tokens": 16, "blocks": 1}
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


def test_reasons_have_words() -> None:
    assert reason_text("lost") == REASONS["lost"]
    assert reason_text("something_new") == "something new"
