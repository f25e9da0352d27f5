"""``deploy_effect``: the hour before against the hour after, computed by hand, and every reason for which it is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from schemas.records import Deploy, DuplicateWindow, RankWindow
from sql.change_load import sides_around, sides_of
from sql.database import Database
from sql.total_types import Span
from tests.sql_records import duplicate_window, group, rank_window
from tests.test_sql_views import WINDOWS, reads
from tests.test_sql_views_rows import HOUR, read, settle, store

__all__ = ["store"]

MINUTE_US = 60_000_000
FIVE_US = 5 * MINUTE_US
DEPLOY = HOUR + 60 * MINUTE_US
FIGURES = [
    "duplicate footprint, between",
    "duplicate footprint, inside",
    "repeat compute, cleared",
    "repeat compute, concurrent",
    "repeat compute, evicted",
    "repeat compute, restarted",
]

Change = Callable[[int], dict[str, Any]]
"""What is declared or counted otherwise in the window of a number."""


def nothing(number: int) -> dict[str, Any]:
    return {}


def ranks(instance: str = "a", windows: int = 36, change: Change = nothing) -> list[RankWindow]:
    """A rank in windows of 5 minutes from the hour on: in window n, 2n tokens evicted, 3 restarted, 5 concurrent came back."""
    rows = []
    for number in range(windows):
        start = HOUR + number * FIVE_US
        counted = group(recompute_evicted_tokens=2 * number, recompute_restarted_tokens=3, recompute_concurrent_tokens=5)
        fields: dict[str, Any] = {"instance_id": instance, "workload": instance, "semantics_version": 2, "register": "exact"}
        fields |= {"window_start_us": start, "window_us": FIVE_US, "observed_us": FIVE_US, "groups": [counted]}
        fields |= {"first_batch_us": start, "last_batch_us": start + FIVE_US}
        rows.append(rank_window(**(fields | change(number))))
    return rows


def footprints(windows: int = 36, change: Change = nothing, **scope: Any) -> list[DuplicateWindow]:
    """Extra copies in the same windows: in window n, 10 tokens inside, n between."""
    rows = []
    for number in range(windows):
        start = HOUR + number * FIVE_US
        fields: dict[str, Any] = {"window_start_us": start, "window_us": FIVE_US, "as_of_us": start + FIVE_US, "semantics_version": 2}
        fields |= {"inside_token_us": 10 * FIVE_US, "between_token_us": number * FIVE_US, "expected_ranks": 1, "observed_us": FIVE_US}
        fields |= {"register": "exact", "inside_register": "exact", "between_register": "lower_bound", "key_epoch": 0}
        rows.append(duplicate_window(**(fields | scope | change(number))))
    return rows


def deployed(at_us: int = DEPLOY, name: str = "d1", **fields: Any) -> Deploy:
    return msgspec.structs.replace(Deploy(name, 1, "new image", at_us), **fields)


def effect(store: Database, *records: Any) -> dict[str, dict[str, Any]]:
    """Rows of the only deploy, by figure. The view that is asked for one deploy says the same."""
    settle(store, records)
    found = read(store, "SELECT * FROM deploy_effect ORDER BY figure")
    assert read(store, "SELECT * FROM deploy_effect_of(deploy = 'd1') ORDER BY figure") == found
    assert len({row["figure"] for row in found}) == len(found)
    return {row["figure"]: row for row in found}


def hourly(windows: range) -> float:
    """Evicted tokens per hour over these windows."""
    return sum(2 * number for number in windows) * 12 / len(windows)


def between(windows: range) -> float:
    return sum(windows) / len(windows)


@pytest.mark.parametrize(
    ("at_us", "before", "after"),
    [
        (DEPLOY, range(0, 12), range(12, 24)),  # on the border of a window
        (DEPLOY + 1, range(0, 12), range(13, 25)),  # the window in which it happened is on neither side
        (DEPLOY + FIVE_US - 1, range(0, 12), range(13, 25)),
        (DEPLOY + FIVE_US, range(1, 13), range(13, 25)),
        (DEPLOY + 80 * MINUTE_US, range(20, 28), range(28, 36)),  # forty minutes of data behind it: both sides are cut to that
        (DEPLOY + 82 * MINUTE_US, range(21, 28), range(29, 36)),
    ],
)
def test_the_sides_are_whole_windows_around_the_deploy(store: Database, at_us: int, before: range, after: range) -> None:
    found = effect(store, *ranks(), *footprints(), deployed(at_us))
    assert list(found) == FIGURES
    evicted = found["repeat compute, evicted"]
    assert (evicted["before"], evicted["after"]) == (pytest.approx(hourly(before)), pytest.approx(hourly(after)))
    assert evicted["change"] == pytest.approx(hourly(after) - hourly(before))
    assert (evicted["unit"], evicted["comparable"], evicted["why"]) == ("tokens per hour", True, [])
    assert (found["repeat compute, restarted"]["before"], found["repeat compute, restarted"]["change"]) == (36.0, 0.0)
    assert found["repeat compute, concurrent"]["after"] == 60.0
    assert found["repeat compute, cleared"]["after"] == 0.0
    footprint = found["duplicate footprint, between"]
    assert (footprint["before"], footprint["after"]) == (pytest.approx(between(before)), pytest.approx(between(after)))
    assert (footprint["before_register"], found["duplicate footprint, inside"]["before_register"]) == ("lower_bound", "exact")
    assert found["duplicate footprint, inside"]["before"] == pytest.approx(10.0)
    for row in found.values():
        assert (row["before_windows"], row["after_windows"], row["windows"]) == (len(before), len(after), len(before))
        assert (row["before_coverage"], row["after_coverage"]) == (1.0, 1.0)
    sides = read(store, "SELECT side, count() AS n, min(window_start) AS first FROM deploy_windows GROUP BY side ORDER BY side")
    assert [(row["side"], row["n"], round(row["first"].timestamp() * 1e6)) for row in sides] == [
        ("after", len(after), HOUR + after[0] * FIVE_US),
        ("before", len(before), HOUR + before[0] * FIVE_US),
    ]


def late(**fields: Any) -> Change:
    """The same from the deploy on."""
    return lambda number: fields if number >= 12 else {}


@pytest.mark.parametrize(
    ("change", "footprint_change", "why_repeat", "why_footprint"),
    [
        (late(semantics_version=3), late(semantics_version=3), ["a side holds no windows", "the rules version differs"], None),
        (late(key_epoch=1), late(key_epoch=1), ["the key epoch differs"], None),
        (nothing, late(key_epoch=None), [], ["the key epoch differs"]),
        (nothing, lambda number: {"key_epoch": None}, [], ["the key epoch differs"]),  # several keys on both sides
        (
            late(observed_us=FIVE_US // 2, register="lower_bound"),
            late(observed_us=FIVE_US // 2, register="lower_bound"),
            ["coverage is below 80 %"],
            None,
        ),
        (late(kv_connector="disk", register="indeterminate"), nothing, ["it cannot be measured"], []),
        (
            nothing,
            late(register="indeterminate", inside_register="indeterminate", between_register="indeterminate"),
            [],
            ["it cannot be measured"],
        ),
        (late(observed_us=0, register="indeterminate"), nothing, ["coverage is below 80 %", "it cannot be measured"], []),
    ],
)
def test_sides_that_do_not_compare_have_no_change_and_say_why(
    store: Database, change: Change, footprint_change: Change, why_repeat: list[str], why_footprint: list[str] | None
) -> None:
    found = effect(store, *ranks(change=change), *footprints(change=footprint_change), deployed())
    assert list(found) == FIGURES
    for figure, row in found.items():
        expected = why_repeat if figure.startswith("repeat") or why_footprint is None else why_footprint
        assert row["why"] == expected, figure
        assert row["comparable"] == (not expected)
        assert (row["change"] is None) == bool(expected)


def test_a_rank_that_cannot_tell_copies_spoils_that_figure_alone(store: Database) -> None:
    found = effect(store, *ranks(change=late(reuse_reporting="unlabelled", register="lower_bound")), *footprints(), deployed())
    assert {figure: row["why"] for figure, row in found.items() if row["why"]} == {"repeat compute, concurrent": ["it cannot be measured"]}
    assert (found["repeat compute, concurrent"]["before"], found["repeat compute, concurrent"]["after"]) == (60.0, None)
    assert (found["repeat compute, evicted"]["before_register"], found["repeat compute, evicted"]["after_register"]) == (
        "exact",
        "lower_bound",
    )


@pytest.mark.parametrize(
    ("at_us", "why"),
    [
        (HOUR, "a side holds no windows"),
        (HOUR + 180 * MINUTE_US, "a side holds no windows"),  # nothing has come since
        (HOUR + 30 * MINUTE_US, "windows are missing on a side"),  # the data begin half an hour before
    ],
)
def test_a_deploy_at_the_edge_of_the_data_is_listed_and_refused(store: Database, at_us: int, why: str) -> None:
    found = effect(store, *ranks(), *footprints(), deployed(at_us))
    assert list(found) == FIGURES
    assert {tuple(row["why"]) for row in found.values()} == {(why,)}
    assert {row["change"] for row in found.values()} == {None}


def nobody(number: int) -> dict[str, Any]:
    """After the deploy, a quarter of an hour in which no rank was expected: engines are down."""
    empty: dict[str, Any] = {"key_epoch": None, "expected_ranks": 0, "observed_us": 0, "inside_token_us": 0, "between_token_us": 0}
    empty |= dict.fromkeys(("register", "inside_register", "between_register"), "indeterminate") | {"reasons": ["no_ranks"]}
    return empty if 12 <= number < 15 else {"inside_tokens_max": 10, "between_tokens_max": number}


def test_time_in_which_no_rank_was_expected_has_no_key_and_spoils_no_side(store: Database) -> None:
    found = effect(store, *ranks(), *footprints(change=nobody), deployed())
    inside, shared = found["duplicate footprint, inside"], found["duplicate footprint, between"]
    assert (inside["why"], shared["why"]) == ([], [])
    assert (inside["before"], inside["after"], inside["change"]) == (10.0, 7.5, -2.5)
    assert (inside["before_register"], inside["after_register"], shared["after_register"]) == ("exact", "lower_bound", "lower_bound")


def test_a_side_that_cannot_be_compared_in_part_says_nothing(store: Database) -> None:
    """What was found does not help where ids or models do not compare."""
    changed: dict[str, Any] = {"reasons": ["key_change"], "register": "indeterminate", "between_register": "indeterminate"}
    most = {"inside_tokens_max": 10, "between_tokens_max": 20}
    found = effect(store, *ranks(), *footprints(change=lambda number: most | (changed if number == 14 else {})), deployed())
    assert found["duplicate footprint, between"]["why"] == ["it cannot be measured"]


def test_nothing_is_added_up_over_rules_or_keys(store: Database) -> None:
    """Rows of earlier rules beside the newer ones count nowhere; a side of two keys shows no sum."""
    earlier = ranks(change=lambda number: {"semantics_version": 1, "groups": [group(recompute_evicted_tokens=10**6)]})
    found = effect(store, *earlier, *ranks(), *footprints(), deployed())
    assert found["repeat compute, evicted"]["before"] == pytest.approx(hourly(range(12)))
    assert found["repeat compute, evicted"]["why"] == []
    settle(store, [*ranks("b", change=lambda number: {"key_epoch": 1})])
    rows = read(store, "SELECT * FROM deploy_effect WHERE figure = 'repeat compute, evicted'")
    assert [(row["before"], row["after"], row["why"]) for row in rows] == [(None, None, ["the key epoch differs", "it cannot be measured"])]


def test_a_deploy_of_one_workload_or_model_is_about_that_alone(store: Database) -> None:

    def other(number: int) -> dict[str, Any]:
        return {"groups": [group(recompute_evicted_tokens=7)], "model": "other"}

    records: list[Any] = [*ranks("a"), *ranks("b", change=other), *footprints()]
    records += footprints(scope="workload", scope_key="b", inside_token_us=4 * FIVE_US)
    records += footprints(scope="model", scope_key="other", inside_token_us=6 * FIVE_US)
    records += [deployed(), deployed(name="w", workload="b"), deployed(name="m", model="other")]
    records += [deployed(name="wm", workload="b", model="other"), deployed(name="none", workload="nobody")]
    records += [deployed(name="gone"), deployed(name="gone", version=2, removed=True)]
    settle(store, records)
    found = read(store, "SELECT deploy_id, figure, before, why FROM deploy_effect")
    told = {(row["deploy_id"], row["figure"]): row["before"] for row in found}
    evicted, inside = "repeat compute, evicted", "duplicate footprint, inside"
    assert {name: told[name, evicted] for name in ("d1", "w", "m", "wm")} == {
        "d1": pytest.approx(hourly(range(12)) + 84),
        "w": 84.0,
        "m": 84.0,
        "wm": 84.0,
    }
    assert {name: told[name, inside] for name in ("d1", "w", "m")} == {"d1": 10.0, "w": 4.0, "m": 6.0}
    assert {row["deploy_id"] for row in found} == {"d1", "w", "m", "wm", "none"}, "one that was taken back is not there"
    for name in ("d1", "w", "m", "wm", "none"):
        of_one = f"SELECT deploy_id, figure, before, why FROM deploy_effect_of(deploy = '{name}') ORDER BY figure"
        assert read(store, of_one) == sorted((row for row in found if row["deploy_id"] == name), key=lambda row: str(row["figure"]))
    assert read(store, "SELECT * FROM deploy_effect_of(deploy = 'gone')") == []
    assert {tuple(row["why"]) for row in found if row["deploy_id"] == "none"} == {("a side holds no windows",)}
    assert [row["deploy_id"] for row in read(store, "SELECT deploy_id FROM deploys_declared ORDER BY 1")] == ["d1", "m", "none", "w", "wm"]


def test_the_effect_of_one_deploy_reads_no_other_time(store: Database) -> None:
    settle(store, [*ranks(windows=3), deployed()])
    for table, indexes in reads(store, "SELECT * FROM deploy_effect_of(deploy = 'd1')").items():
        if table in WINDOWS:
            keys = next(index for index in indexes if index["Type"] == "PrimaryKey")
            assert "window_start" in keys["Keys"]
            assert "window_start in" in keys["Condition"]
            assert "element set" not in keys["Condition"], "two borders, not the windows one by one"


def test_sides_are_windows_of_the_longest_length_that_holds_batches(store: Database) -> None:
    """Before the deploy windows of 10 s, after it of 5 minutes; an hour without a batch is no length to go by."""
    short = rank_window(window_start_us=DEPLOY - 10_000_000, window_us=10_000_000, last_batch_us=DEPLOY)
    long = rank_window(window_start_us=DEPLOY, window_us=FIVE_US, last_batch_us=DEPLOY + 60 * MINUTE_US)
    empty = [rank_window(instance_id="idle", window_start_us=start, window_us=60 * MINUTE_US, batches=0) for start in (HOUR, DEPLOY)]
    settle(store, [short, long, *empty])
    sides = sides_around(store, DEPLOY + 1, 10 * MINUTE_US)
    assert sides.before == Span(DEPLOY - 2 * FIVE_US, DEPLOY)
    assert sides.after == Span(DEPLOY + FIVE_US, DEPLOY + 3 * FIVE_US)
    two = sides_of(store, Span(DEPLOY - 1, DEPLOY), Span(DEPLOY, DEPLOY + 1))
    assert (two.before, two.after) == (Span(DEPLOY - FIVE_US, DEPLOY), Span(DEPLOY, DEPLOY + FIVE_US))
