"""Two spans against each other: which spans, what is compared, and every reason for which it is not. On records in memory."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.records import DuplicateWindow, RankWindow
from sql.change import PARTS, Cut, change, compare
from sql.change_refusals import SIDES
from sql.change_spans import Sides, around, duration, two
from sql.repeat_figures import CAUSES
from sql.times import iso
from sql.total_types import Span, Totals
from sql.totals import totals_from_records
from tests.sql_records import (
    START_US,
    WINDOW_US,
    duplicate_window,
    group,
    random_duplicate_windows,
    random_rank_windows,
    rank_window,
)

WINDOWS = 6
"""Of each side."""
BEFORE = Span(START_US, START_US + WINDOWS * WINDOW_US)
AFTER = Span(BEFORE.end_us + WINDOW_US, BEFORE.end_us + (WINDOWS + 1) * WINDOW_US)
AT_US = BEFORE.end_us + 3_000_000
"""An instant in the window that lies between them."""
RANKS = (("a", 0), ("a", 1), ("b", 0))

Rows = tuple[list[RankWindow], list[DuplicateWindow]]


def rows(
    ranks: Callable[[int, bool], dict[str, Any]] = lambda rank, after: {},
    duplicates: Callable[[bool], dict[str, Any]] = lambda after: {},
) -> Rows:
    """Thirteen windows of three ranks and of the fleet: what ``ranks`` (number of the rank, whether after) and ``duplicates`` say of each.

    Per rank and window 100 tokens evicted and stored again before, 60 after; 400 extra tokens inside and 200 between before, half of it
    after.
    """
    rank_rows, duplicate_rows = [], []
    for number in range(2 * WINDOWS + 1):
        start, after = START_US + number * WINDOW_US, number > WINDOWS
        for rank, (instance, dp_rank) in enumerate(RANKS):
            again = 60 if after else 100
            counted: dict[str, Any] = {
                "stored_tokens": 1000,
                "resolved_tokens": 1000,
                "stored_blocks": 10,
                "resident_blocks": 5,
                "recompute_evicted_tokens": again,
                "recompute_evicted_blocks": again // 10,
                "recompute_evicted_gpu_us": again * 1000,
            }
            said: dict[str, Any] = {"instance_id": instance, "dp_rank": dp_rank}
            said |= {"prefill_rate": 1000.0, "prefill_rate_source": "declared"} | ranks(rank, after)
            counters = counted | said.pop("counters", {})
            fields = {
                "window_start_us": start,
                "first_batch_us": start,
                "last_batch_us": start + WINDOW_US - 1,
                "groups": [group(**counters)],
            }
            rank_rows.append(rank_window(**(fields | said)))
        half = 2 if after else 1
        levels = {"inside_token": 400 // half, "between_token": 200 // half, "inside_block": 40 // half, "between_block": 20 // half}
        made: dict[str, Any] = {f"{name}_us": level * WINDOW_US for name, level in levels.items()}
        made |= {f"{name}s_max": level for name, level in levels.items()} | {f"{name}s_end": level for name, level in levels.items()}
        made |= {"extra_tokens_max": 600 // half, "extra_blocks_max": 60 // half, "window_start_us": start, "as_of_us": start + WINDOW_US}
        made |= {"inside_byte_ms": 4000 * WINDOW_US // 1000, "between_byte_ms": 0}
        said = duplicates(after)
        if not said.pop("missing", False):
            duplicate_rows.append(duplicate_window(**(made | said)))
    return rank_rows, duplicate_rows


def totals(made: Rows, span: Span, **asked: Any) -> Totals:
    return totals_from_records(*made, since_us=span.start_us, until_us=span.end_us, **asked)


def compared(made: Rows, cut: Cut | None = None, **options: Any) -> dict[str, Any]:
    by = cut.by if cut else None
    return compare(totals(made, BEFORE, by=by), totals(made, AFTER, by=by), cut, **options)


def reasons(core: dict[str, Any]) -> list[str]:
    return [why["reason"] for why in core["refused"]]


# -- what is compared -----------------------------------------------------------------------------------------------


def test_each_figure_has_both_sides_and_the_difference() -> None:
    document = compared(rows())
    assert (document["comparable"], document["refused"], document["warnings"]) == (True, [], [])
    evicted = document["repeat_compute"]["causes"]["evicted"]
    assert evicted["tokens"] == {"before": 1800, "after": 1080, "difference": -720, "ratio": 0.6}
    assert evicted["blocks"] == {"before": 180, "after": 108, "difference": -72, "ratio": 0.6}
    assert evicted["gpu_seconds"] == {"before": 1.8, "after": 1.08, "difference": 1.08 - 1.8, "ratio": 1.08 / 1.8}
    assert evicted["per_hour"]["tokens"]["before"] == pytest.approx(1800 * 60)
    assert evicted["per_hour"]["tokens"]["difference"] == pytest.approx(-720 * 60)
    assert document["repeat_compute"]["causes"]["cleared"]["tokens"] == {"before": 0, "after": 0, "difference": 0, "ratio": None}
    inside = document["duplicate_footprint"]["inside_instances"]
    assert inside["extra_tokens"]["mean"] == {"before": 400, "after": 200, "difference": -200, "ratio": 0.5}
    assert inside["extra_tokens"]["max"] == {"before": 400, "after": 200, "difference": -200, "ratio": 0.5}
    assert inside["extra_bytes"]["mean"] == {"before": 4000, "after": 4000, "difference": 0, "ratio": 1}
    assert document["duplicate_footprint"]["between_instances"]["extra_blocks"]["mean"]["difference"] == -10
    for side in SIDES:
        told = document[side]
        assert told["ranks"] == ["a/0", "a/1", "b/0"]
        assert (told["semantics_version"], told["key_epochs"], told["canaries"], told["length"]) == (1, [0], ["c0"], "1 min")
        assert (told["repeat_compute"]["coverage"], told["repeat_compute"]["register"]) == (1.0, "exact")
        assert (told["duplicate_footprint"]["coverage"], told["duplicate_footprint"]["register"]) == (1.0, "exact")
    json.dumps(document)


def test_per_hour_is_per_hour_that_was_observed() -> None:
    """Seen for half the time after, half as much was counted: as much per hour as before."""
    seen = {"observed_us": WINDOW_US // 2, "counters": {"recompute_evicted_tokens": 50}}
    document = compared(rows(lambda rank, after: seen if after else {}), min_coverage=0.5)
    evicted = document["repeat_compute"]["causes"]["evicted"]
    assert evicted["tokens"]["difference"] == -900
    assert evicted["per_hour"]["tokens"]["difference"] == 0


def test_concurrent_is_per_hour_of_the_ranks_that_tell_it() -> None:
    """One rank of three tells no copies, and was seen for half its time: it lengthens the hours of the other causes alone."""

    def made(rank: int, after: bool) -> dict[str, Any]:
        counted = {"counters": {"recompute_concurrent_tokens": 10}}
        return counted | ({"reuse_reporting": "unlabelled", "observed_us": WINDOW_US // 2} if rank == 2 else {})

    causes = compared(rows(made))["repeat_compute"]["causes"]
    assert causes["concurrent"]["tokens"]["before"] == 2 * WINDOWS * 10
    assert causes["concurrent"]["per_hour"]["tokens"]["before"] == pytest.approx(2 * WINDOWS * 10 * 60)
    assert causes["evicted"]["per_hour"]["tokens"]["before"] == pytest.approx(1800 * 60 / (2.5 / 3))


def test_nothing_is_added_over_causes() -> None:
    document = compared(rows())
    assert set(document["repeat_compute"]) == {"comparable", "refused", "causes"}
    assert list(document["repeat_compute"]["causes"]) == list(CAUSES)


def test_sides_of_other_lengths_compare_by_the_hour_and_in_the_mean() -> None:
    made = rows()
    document = compare(totals(made, BEFORE), totals(made, Span(AFTER.start_us, AFTER.start_us + 3 * WINDOW_US)))
    evicted = document["repeat_compute"]["causes"]["evicted"]
    assert (evicted["tokens"]["before"], evicted["tokens"]["after"], evicted["tokens"]["difference"]) == (1800, 540, None)
    assert evicted["per_hour"]["tokens"]["ratio"] == pytest.approx(0.6)
    inside = document["duplicate_footprint"]["inside_instances"]["extra_tokens"]
    assert (inside["mean"]["difference"], inside["max"]["difference"]) == (-200, None)
    assert "the sides are 1 min and 30 s long: only means and figures per hour are compared" in document["warnings"]


def test_a_cut_takes_its_ranks_and_what_they_bear() -> None:
    made = rows(lambda rank, after: {"workload": "chat" if rank else "code", "model": "m"})
    borne = duplicate_window(scope="workload", scope_key="chat", inside_token_us=7 * WINDOW_US, as_of_us=START_US + WINDOW_US)
    made[1].append(borne)
    document = compared(made, Cut(workload="chat"))
    assert document["before"]["ranks"] == ["a/1", "b/0"]
    assert document["repeat_compute"]["causes"]["evicted"]["tokens"]["before"] == 1200
    assert document["duplicate_footprint"]["inside_instances"]["extra_tokens"]["mean"]["before"] == pytest.approx(7 / 6)
    assert compared(made, Cut(model="m"))["before"]["ranks"] == ["a/0", "a/1", "b/0"]
    both = compared(made, Cut("chat", "m"))
    assert both["repeat_compute"]["causes"]["evicted"]["tokens"]["before"] == 1200
    assert (both["comparable"], reasons(both), both["duplicate_footprint"]["inside_instances"]) == (True, ["two_cuts"], None)
    assert both["before"]["duplicate_footprint"] is None
    none = compared(made, Cut(workload="chatt"))
    assert reasons(none["repeat_compute"]) == reasons(none["duplicate_footprint"]) == ["no_windows", "no_windows"]
    assert none["refused"][0]["text"] == "no window of workload chatt was counted before"


# -- what is not ----------------------------------------------------------------------------------------------------


def later(**fields: Any) -> Rows:
    """Rows in which rank a/0 is as given after, and as ever before."""
    return rows(lambda rank, after: dict(fields) if after and rank == 0 else {})


def rules() -> Rows:
    """Rows that newer rules counted after."""
    return rows(lambda rank, after: {"semantics_version": 1 + after}, lambda after: {"semantics_version": 1 + after})


def seen_by_half() -> Rows:
    """Rows that were observed for half their time after."""
    return rows(lambda rank, after: {"observed_us": WINDOW_US // 2 if after else WINDOW_US})


@pytest.mark.parametrize(
    ("made", "repeat", "duplicates", "text"),
    [
        (rules(), ["rules"], ["rules"], "1 before, 2 after"),
        (rows(lambda rank, after: {"key_epoch": int(after)}), ["key_change"], ["key_change"], "epoch 0 before, 1 after"),
        (rows(lambda rank, after: {"canary": f"c{after:d}"}), ["key_change"], ["key_change"], "epoch 0 on both sides, not the same key"),
        (rows(lambda rank, after: {"canary": f"c{rank}"}), [], ["key_change"] * 2, "before were made with 3 keys"),
        (rows(lambda rank, after: {"canary": f"c{rank // 2}"}), [], ["key_change"] * 2, "after were made with 2 keys"),
        (
            rows(lambda rank, after: {"canary": f"c{(rank + after) % 3}"}),
            ["key_change"],
            ["key_change"] * 3,
            "the identity key of a/0, a/1",
        ),
        (seen_by_half(), ["coverage"], ["coverage"], "after was observed for 50% of its span, less than 80%"),
        (later(reuse_reporting="labelled"), ["redeclared"], ["redeclared"], "reuse reporting of a/0 changed: none before, labelled after"),
        (later(removals="last_copy"), ["redeclared"], ["redeclared"], "removals of a/0 changed: per_copy before, last_copy after"),
        (later(kv_connector="offload"), ["redeclared"], [], "KV connector of a/0 changed: none before, offload after"),
        (rows(lambda rank, after: {"kv_connector": "offload"}), ["indeterminate"] * 2, [], "the figure before says nothing (kv_connector)"),
        (
            rows(duplicates=lambda after: {"shards_reported": 4 - after}),
            [],
            ["shards_missing"],
            "not all content shards have reported after",
        ),
        (rows(duplicates=lambda after: {"missing": after}), [], ["indeterminate"], "the figure after says nothing (no_duplicate_windows)"),
    ],
)
def test_what_cannot_be_compared_says_why(made: Rows, repeat: list[str], duplicates: list[str], text: str) -> None:
    document = compared(made)
    assert reasons(document["repeat_compute"]) == repeat
    assert reasons(document["duplicate_footprint"]) == duplicates
    assert document["comparable"] is False
    assert any(text in why["text"] for why in document["refused"]), document["refused"]
    for figure in ("repeat_compute", "duplicate_footprint"):
        core = document[figure]
        assert core["comparable"] is (not core["refused"])
        for each in changes(core):
            assert each["difference"] is None or core["comparable"]
            assert each["ratio"] is None or core["comparable"]
    told = document["repeat_compute"]["causes"]["evicted"]["tokens"]
    shown = [told["before"], told["after"]]
    assert None not in shown or "indeterminate" in repeat, "both sides are shown all the same"


def changes(core: Any) -> list[dict[str, Any]]:
    """Every change in a part of a document."""
    if not isinstance(core, dict):
        return []
    return [core] if "difference" in core else [found for each in core.values() for found in changes(each)]


def test_a_side_without_windows_is_refused() -> None:
    made = rows()
    document = compare(totals(made, Span(START_US - 10 * WINDOW_US, START_US)), totals(made, AFTER))
    assert document["refused"] == [{"reason": "no_windows", "text": "no window of any rank was counted before"}]
    assert document["repeat_compute"]["causes"]["evicted"]["tokens"] == {"before": None, "after": 1080, "difference": None, "ratio": None}
    inside = document["duplicate_footprint"]["inside_instances"]
    assert inside["extra_tokens"]["mean"] == {"before": None, "after": 200, "difference": None, "ratio": None}
    assert inside["register"]["before"] == "indeterminate"


def test_ranks_that_were_expected_and_silent_are_no_windows_and_have_no_key() -> None:
    """A rank that is absent stands there with what it had declared: nothing was counted of it."""
    made = rows(lambda rank, after: {"key_epoch": int(rank == 2)} if rank == 2 and not after else {})
    silent = [row for row in made[0] if row.window_start_us < AFTER.start_us], made[1]
    document = compared(silent)
    assert document["after"]["absent_ranks"] == document["after"]["ranks"] == ["a/0", "a/1", "b/0"]
    assert document["after"]["key_epochs"] == []
    assert document["refused"] == [{"reason": "no_windows", "text": "no window of any rank was counted after"}]
    assert document["repeat_compute"]["causes"]["evicted"]["tokens"]["after"] is None


def test_copies_are_compared_by_the_keys_of_the_whole_fleet_whatever_the_cut() -> None:
    made = rows(lambda rank, after: {"workload": "chat" if rank == 2 else "code", "canary": "c9" if after and rank == 0 else "c0"})
    made[1].append(duplicate_window(scope="workload", scope_key="chat", inside_token_us=WINDOW_US, as_of_us=START_US + WINDOW_US))
    document = compared(made, Cut(workload="chat"))
    assert document["repeat_compute"]["comparable"]
    assert reasons(document["duplicate_footprint"]) == ["key_change"] * 2


def test_a_rank_that_was_declared_anew_within_a_side_is_refused() -> None:
    made = rows()
    last = max(row.window_start_us for row in made[0])
    ranks = [
        msgspec.structs.replace(row, reuse_reporting="labelled") if (row.window_start_us, row.dp_rank) == (last, 1) else row
        for row in made[0]
    ]
    document = compared((ranks, made[1]))
    assert reasons(document["repeat_compute"]) == reasons(document["duplicate_footprint"]) == ["redeclared"]
    assert "reuse reporting of a/1 changed: none before, labelled and none after" in document["refused"][0]["text"]


def test_duplicates_that_are_counted_for_half_the_span_are_refused() -> None:
    made = rows()
    made = made[0], [row for row in made[1] if row.window_start_us < AFTER.start_us + 3 * WINDOW_US]
    document = compared(made)
    assert reasons(document["duplicate_footprint"]) == ["behind"]
    assert document["refused"][0]["text"] == "duplicates after are counted for 50% of the span so far"
    assert document["repeat_compute"]["comparable"]
    assert compared(made, min_coverage=0.5)["comparable"]
    # How far another scope has come does not count: copies are seen as far as the fleet's are.
    bears = [
        duplicate_window(scope="workload", scope_key="chat", window_start_us=start, as_of_us=start + WINDOW_US)
        for start in range(START_US, AFTER.end_us, WINDOW_US)
    ]
    ahead = [msgspec.structs.replace(row, workload="chat") for row in made[0]], [*made[1], *bears]
    assert reasons(compared(ahead, Cut(workload="chat"))["duplicate_footprint"]) == ["behind"]


def test_a_cause_or_a_part_that_says_nothing_is_refused_alone() -> None:
    unlabelled = compared(rows(lambda rank, after: {"reuse_reporting": "unlabelled"}))
    causes = unlabelled["repeat_compute"]["causes"]
    assert unlabelled["comparable"]
    assert [cause for cause in CAUSES if not causes[cause]["comparable"]] == ["concurrent"]
    assert reasons(causes["concurrent"]) == ["cannot_tell"] * 2
    assert causes["concurrent"]["tokens"] == {"before": None, "after": None, "difference": None, "ratio": None}
    nameless = compared(rows(lambda rank, after: {"model": None}))
    parts = nameless["duplicate_footprint"]
    assert (nameless["comparable"], parts["inside_instances"]["comparable"]) == (True, True)
    assert reasons(parts["between_instances"]) == ["indeterminate"] * 2
    assert parts["between_instances"]["extra_tokens"]["mean"] == {"before": 200, "after": 100, "difference": None, "ratio": None}
    assert parts["between_instances"]["register"] == {"before": "indeterminate", "after": "indeterminate"}
    assert any("without a declared model" in warning for warning in nameless["warnings"])


def test_gpu_time_compares_by_one_method_and_where_most_has_a_rate() -> None:
    measured = compared(later(prefill_rate_source="measured"))
    cost = measured["repeat_compute"]["causes"]["evicted"]["gpu_seconds"]
    assert (cost["before"], cost["difference"]) == (1.8, None)
    assert measured["repeat_compute"]["causes"]["evicted"]["tokens"]["difference"] == -720
    assert measured["warnings"] == ["GPU time of evicted is not compared: by declared rates before, by mixed ones after"]
    unrated = compared(rows(lambda rank, after: {"counters": {"unrated_tokens": 40}} if after else {}))
    assert unrated["warnings"] == ["GPU time of evicted is not compared: a rate is known of 100% of the tokens before, of 33.33% after"]
    nobody = compared(rows(lambda rank, after: {"counters": {"recompute_evicted_gpu_us": 0, "unrated_tokens": 60}}))
    assert nobody["repeat_compute"]["causes"]["evicted"]["gpu_seconds"] == {
        "before": None,
        "after": None,
        "difference": None,
        "ratio": None,
    }


def test_what_should_be_known_and_refuses_nothing_is_a_warning() -> None:
    made = rows(lambda rank, after: {"final": not after})
    assert compared(made)["warnings"] == ["some windows after are still open: their figures will change"]
    new = rank_window(instance_id="c", window_start_us=AFTER.start_us, first_batch_us=AFTER.start_us, last_batch_us=AFTER.end_us - 1)
    gone = rows(lambda rank, after: {"departed": rank == 2})
    kept = [row for row in gone[0] if row.instance_id != "b" or row.window_start_us < BEFORE.end_us]
    document = compared(([*kept, new], gone[1]), min_coverage=0.5)
    assert document["warnings"] == ["not the same ranks: b/0 only before; c/0 only after"]
    assert document["repeat_compute"]["comparable"]
    old = [rank_window(semantics_version=0)]
    assert compared((rows()[0] + old, rows()[1]))["warnings"] == [
        "before: only rows of semantics_version 1 are summed; those of 0 are left out"
    ]
    overlapping = compare(totals(rows(), BEFORE), totals(rows(), Span(BEFORE.start_us + WINDOW_US, BEFORE.end_us + WINDOW_US)))
    assert "the sides overlap" in overlapping["warnings"]


# -- properties -----------------------------------------------------------------------------------------------------


def randomly(seed: int) -> tuple[Rows, Sequence[Span]]:
    rng = random.Random(seed)
    made = random_rank_windows(rng), random_duplicate_windows(rng)
    starts = [START_US + rng.randrange(12) * WINDOW_US for _ in range(2)]
    length = rng.randrange(1, 8) * WINDOW_US
    return made, [Span(start, start + length) for start in starts]


@pytest.mark.parametrize("seed", range(30))
def test_a_span_against_itself_differs_in_nothing(seed: int) -> None:
    made, spans = randomly(seed)
    cut = (Cut(), Cut(workload="chat"), Cut(model="m1"), Cut("chat", "m1"))[seed % 4]
    side = totals(made, spans[0], by=cut.by)
    document = compare(side, side, cut, 0.0)
    assert {each["difference"] for each in changes(document)} <= {0, None}
    assert {each["ratio"] for each in changes(document)} <= {1, None}
    assert not {"rules", "redeclared", "coverage"} & set(reasons(document))


@pytest.mark.parametrize("seed", range(30))
def test_swapping_the_sides_negates(seed: int) -> None:
    made, spans = randomly(seed)
    one, other = (totals(made, span) for span in spans)
    there, back = compare(one, other, min_coverage=0.0), compare(other, one, min_coverage=0.0)
    assert there["comparable"] is back["comparable"]
    pairs = list(zip(changes(there), changes(back), strict=True))
    assert len(pairs) == 5 * 6 + 2 * 5
    for here, swapped in pairs:
        assert (here["before"], here["after"]) == (swapped["after"], swapped["before"])
        assert here["difference"] == (None if swapped["difference"] is None else -swapped["difference"])
    assert sorted(reasons(there)) == sorted(reasons(back))


def test_random_sides_are_compared_and_refused() -> None:
    """The two properties above hold of something."""
    found = []
    for seed in range(30):
        made, (span, _) = randomly(seed)
        side = totals(made, span)
        found += [each["difference"] is not None for each in changes(compare(side, side, min_coverage=0.0))]
    assert found.count(True) > 100
    assert found.count(False) > 100


def test_a_change_of_one_value() -> None:
    assert change(4, 1, comparable=True) == {"before": 4, "after": 1, "difference": -3, "ratio": 0.25}
    assert change(0, 5, comparable=True) == {"before": 0, "after": 5, "difference": 5, "ratio": None}
    assert change(4, 1, comparable=False) == {"before": 4, "after": 1, "difference": None, "ratio": None}
    assert change(None, 1, comparable=True) == {"before": None, "after": 1, "difference": None, "ratio": None}
    assert PARTS == ("inside_instances", "between_instances")


# -- which spans ----------------------------------------------------------------------------------------------------

HOUR_US = 3_600_000_000


def test_the_window_of_a_deploy_counts_to_neither_side() -> None:
    found = around(AT_US, WINDOWS * WINDOW_US, WINDOW_US, AFTER.end_us + HOUR_US)
    assert found == Sides(BEFORE, AFTER)
    on_the_border = around(BEFORE.end_us, WINDOWS * WINDOW_US, WINDOW_US, AFTER.end_us + HOUR_US)
    assert on_the_border == Sides(BEFORE, Span(BEFORE.end_us, BEFORE.end_us + WINDOWS * WINDOW_US))
    assert around(AT_US, 1, WINDOW_US, None).after == Span(AFTER.start_us, AFTER.start_us + WINDOW_US), "one whole window at least"
    assert around(AT_US, 7, 0, None) == Sides(Span(AT_US - 7, AT_US), Span(AT_US, AT_US + 7)), "no window is known"


def test_a_side_that_is_not_over_is_cut_and_the_other_with_it() -> None:
    newest = AFTER.start_us + 4 * WINDOW_US + 1
    found = around(AT_US, WINDOWS * WINDOW_US, WINDOW_US, newest)
    assert found.before == Span(BEFORE.end_us - 4 * WINDOW_US, BEFORE.end_us)
    assert found.after == Span(AFTER.start_us, AFTER.start_us + 4 * WINDOW_US)
    assert found.notes == (f"not over yet: engine time has reached {iso(found.after.end_us)}, so both sides are cut to 40 s",)
    # Nothing whole yet, or a deploy to come: there is nothing to cut to.
    assert around(AT_US, WINDOWS * WINDOW_US, WINDOW_US, AFTER.start_us + 5) == Sides(BEFORE, AFTER)
    assert around(AT_US, WINDOWS * WINDOW_US, WINDOW_US, START_US) == Sides(BEFORE, AFTER)


def test_two_spans_are_widened_and_keep_their_beginnings_when_cut() -> None:
    before, after = Span(BEFORE.start_us + 3, BEFORE.end_us - 3), Span(AFTER.start_us + 1, AFTER.end_us)
    assert two(before, after, WINDOW_US, None) == Sides(BEFORE, AFTER)
    found = two(before, after, WINDOW_US, AFTER.start_us + 2 * WINDOW_US)
    assert found.before == Span(BEFORE.start_us, BEFORE.start_us + 2 * WINDOW_US)
    assert found.after == Span(AFTER.start_us, AFTER.start_us + 2 * WINDOW_US)
    assert two(after, before, WINDOW_US, AFTER.start_us + 2 * WINDOW_US) == Sides(found.after, found.before, found.notes)
    # Neither is over: as long as the one of which less has been.
    overlapping = two(Span(0, 100), Span(50, 200), 10, 85)
    assert (overlapping.before, overlapping.after) == (Span(0, 30), Span(50, 80))


@given(at=st.integers(0, 10**6), length=st.integers(1, 10**5), base=st.integers(1, 1000), newest=st.none() | st.integers(0, 2 * 10**6))
@settings(max_examples=200)
def test_sides_are_whole_windows_of_one_length_that_do_not_meet(at: int, length: int, base: int, newest: int | None) -> None:
    found = around(at, length, base, newest)
    assert found.before.end_us <= at <= found.after.start_us <= found.before.end_us + base
    assert found.before.length_us == found.after.length_us >= base
    assert all(border % base == 0 for side in (found.before, found.after) for border in (side.start_us, side.end_us))
    assert found.before.length_us <= -(-length // base) * base
    assert bool(found.notes) == (found.before.length_us < -(-length // base) * base)
    assert newest is None or not found.notes or found.after.end_us <= newest


def test_durations() -> None:
    assert [duration(us) for us in (HOUR_US, HOUR_US * 3 // 2, 60_000_000, 40_000_000, 500_000)] == [
        "1 h",
        "1.5 h",
        "1 min",
        "40 s",
        "0.5 s",
    ]
