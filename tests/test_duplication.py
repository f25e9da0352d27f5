"""Shards and merger against a brute-force sweep: any interleaving of ranks, any number of shards, any drains."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator
from fractions import Fraction
from itertools import pairwise
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.records import DuplicateStep, DuplicateSteps, DuplicateWindow, ResidencyChanges, ResidencyStep
from streams import merger as merger_module
from streams.duplication import ShardCore
from streams.merger import Merger

WINDOW_US = 100
SKEW_US = 15
SIZE = 16
Rank = tuple[str, int]
RANKS: list[Rank] = [("a", 0), ("a", 1), ("b", 0), ("b", 1), ("c", 0)]


@pytest.fixture(autouse=True, scope="module")
def short_stretches() -> Iterator[None]:
    """Idle stretches become one row after a few windows, so that short histories have some."""
    with patch.object(merger_module, "LONG_STRETCH_WINDOWS", 20):
        yield


def content_id(number: int) -> bytes:
    return number.to_bytes(4, "big") + bytes([0, number * 7]) + bytes(10)


@st.composite
def histories(draw: st.DrawFn) -> dict[Rank, list[tuple[int, dict[int, bool]]]]:
    """Per rank: (time, content -> open from now on), times not decreasing; at most one change per content and batch."""
    out: dict[Rank, list[tuple[int, dict[int, bool]]]] = {}
    for rank in RANKS[: draw(st.integers(1, len(RANKS)))]:
        at = draw(st.integers(1, 120))
        held: set[int] = set()
        batches = []
        for _ in range(draw(st.integers(1, 12))):
            at += draw(st.sampled_from([0, 1, 3, 14, 15, 16, 40, 100, 2_300]))
            changes: dict[int, bool] = {}
            for number in draw(st.sets(st.integers(0, 3), max_size=3)):
                changes[number] = number not in held
                held ^= {number}
            batches.append((at, changes))
        out[rank] = batches
    return out


def brute_force(history: dict[Rank, list[tuple[int, dict[int, bool]]]]) -> dict[str, Fraction | int]:
    """Evaluate every instant at which anything can change, straight from rule 5."""
    instants = {at for batches in history.values() for at, _ in batches}
    start, end = min(instants), max(instants)
    held: dict[int, dict[int, set[Rank]]] = {}
    current: dict[int, set[Rank]] = defaultdict(set)
    by_time: dict[int, list[tuple[Rank, dict[int, bool]]]] = defaultdict(list)
    for rank, batches in history.items():
        for at, changes in batches:
            by_time[at].append((rank, changes))
    opened: dict[tuple[int, str], int] = {}
    openings: dict[int, dict[tuple[int, str], int]] = {}
    for at in sorted(instants):
        for rank, changes in by_time[at]:
            for number, is_open in changes.items():
                (current[number].add if is_open else current[number].discard)(rank)
        for number in range(4):
            names = {rank[0] for rank in current[number]}
            for name in "abc":
                if name not in names:
                    opened.pop((number, name), None)
                elif (number, name) not in opened:
                    opened[number, name] = at
        held[at] = {number: set(ranks) for number, ranks in current.items()}
        openings[at] = dict(opened)
    moments = sorted(instants | {at + SKEW_US for o in openings.values() for at in o.values() if at + SKEW_US <= end})
    levels = []
    for moment in moments:
        known = max(at for at in instants if at <= moment)
        inside = between = 0
        for number, ranks in held[known].items():
            names = {rank[0] for rank in ranks}
            inside += len(ranks) - len(names)
            mature = sum(openings[known][number, name] + SKEW_US <= moment for name in names)
            between += max(0, mature - 1)
        levels.append((moment, inside * SIZE, between * SIZE))
    result: dict[str, Fraction | int] = {}
    for name, pick in (("inside", 1), ("between", 2)):
        total = sum(level[pick] * (after[0] - level[0]) for level, after in pairwise(levels))
        result[f"{name}_sum"] = total
        result[f"{name}_max"] = max(level[pick] for level in levels)
        result[f"{name}_end"] = levels[-1][pick]
    result["extra_max"] = max(level[1] + level[2] for level in levels)
    result["span"] = end - start
    return result


def run(history: dict[Rank, list[tuple[int, dict[int, bool]]]], seed: int, shards: int) -> list[DuplicateWindow]:
    """The same history through shards and merger, ranks interleaved and batches grouped by ``seed``."""
    rng = random.Random(seed)
    queues: dict[Rank, list[tuple[int, int, dict[int, bool]]]] = {
        rank: [(offset, at, changes) for offset, (at, changes) in enumerate(batches)] for rank, batches in history.items()
    }
    cores = [ShardCore(shard, shards, skew_us=SKEW_US) for shard in range(shards)]
    merger = Merger(window_us=WINDOW_US, shards=shards)
    rows: list[DuplicateWindow] = []
    offset = 0
    inbox: list[list[ResidencyChanges]] = [[] for _ in range(shards)]

    def take(shard: int, count: int) -> None:
        nonlocal offset
        for changes in inbox[shard][:count]:
            steps = cores[shard].apply(changes, offset)
            merger.apply(steps, offset)
            if rng.random() < 0.2:
                merger.apply(steps, offset)  # delivered twice
            offset += 1
        del inbox[shard][:count]

    while any(queues.values()):
        rank = rng.choice([rank for rank, queue in queues.items() if queue])
        taken = [queues[rank].pop(0) for _ in range(min(len(queues[rank]), rng.randint(1, 3)))]
        for shard in range(shards):
            steps = []
            for source, at, changes in taken:
                mine = [(n, o) for n, o in changes.items() if int.from_bytes(content_id(n)[:4], "big") % shards == shard]
                steps.append(
                    ResidencyStep(
                        source,
                        at,
                        "GPU",
                        SIZE,
                        b"".join(content_id(n) for n, o in mine if o),
                        b"".join(content_id(n) for n, o in mine if not o),
                    )
                )
            message = ResidencyChanges(*rank, f"w-{rank[0]}", None, taken[-1][0], taken[-1][1], steps)
            inbox[shard].extend([message] * (2 if rng.random() < 0.2 else 1))
        if rng.random() < 0.6:
            take(rng.randrange(shards), rng.randint(1, 3))
        if rng.random() < 0.3:
            rows.extend(merger.drain())
    for shard in range(shards):
        take(shard, len(inbox[shard]))
    rows.extend(merger.drain())
    newest: dict[tuple[str, str, int], DuplicateWindow] = {}
    for row in rows:
        key = (row.scope, row.scope_key, row.window_start_us)
        if key not in newest or row.version >= newest[key].version:
            newest[key] = row
    return list(newest.values())


@settings(max_examples=300, deadline=None)
@given(histories(), st.integers(0, 2**32), st.integers(1, 3))
def test_any_interleaving_gives_the_brute_force_answer(
    history: dict[Rank, list[tuple[int, dict[int, bool]]]], seed: int, shards: int
) -> None:
    expected = brute_force(history)
    rows = run(history, seed, shards)
    fleet = sorted((row for row in rows if row.scope == "fleet"), key=lambda row: row.window_start_us)
    for before, after in pairwise(fleet):
        assert before.window_start_us + before.window_us == after.window_start_us, "rows neither overlap nor leave holes"
    assert sum(row.inside_token_us for row in fleet) == expected["inside_sum"]
    assert sum(row.between_token_us for row in fleet) == expected["between_sum"]
    assert max(row.inside_tokens_max for row in fleet) == expected["inside_max"]
    assert max(row.between_tokens_max for row in fleet) == expected["between_max"]
    assert max(row.extra_tokens_max for row in fleet) == expected["extra_max"]
    assert fleet[-1].inside_tokens_end == expected["inside_end"]
    assert fleet[-1].between_tokens_end == expected["between_end"]
    assert fleet[-1].inside_blocks_end * SIZE == expected["inside_end"]


@settings(max_examples=200, deadline=None)
@given(histories())
def test_what_is_settled_and_let_go_changes_nothing(history: dict[Rank, list[tuple[int, dict[int, bool]]]]) -> None:
    """In the order of time, with everything more than a little behind folded away at once."""
    expected = brute_force(history)
    core, merger = ShardCore(0, 1, skew_us=SKEW_US, max_events=0, fold_behind_us=20), Merger(window_us=WINDOW_US, shards=1)
    batches = ((at, rank, source, changes) for rank, each in history.items() for source, (at, changes) in enumerate(each))
    in_time = sorted(batches, key=lambda batch: batch[:3])
    rows: dict[int, DuplicateWindow] = {}
    for offset, (at, rank, source, changes) in enumerate(in_time):
        opened = b"".join(content_id(number) for number, is_open in changes.items() if is_open)
        closed = b"".join(content_id(number) for number, is_open in changes.items() if not is_open)
        message = ResidencyChanges(*rank, None, None, source, at, [ResidencyStep(source, at, "GPU", SIZE, opened, closed)])
        merger.apply(core.apply(message, offset), offset)
    for row in merger.drain():
        if row.scope == "fleet":
            rows[row.window_start_us] = row
    assert core.late_changes == 0
    assert sum(row.inside_token_us for row in rows.values()) == expected["inside_sum"]
    assert sum(row.between_token_us for row in rows.values()) == expected["between_sum"]
    assert max(row.extra_tokens_max for row in rows.values()) == expected["extra_max"]


@settings(max_examples=100, deadline=None)
@given(histories(), st.integers(0, 2**32))
def test_the_cuts_add_up_to_the_fleet(history: dict[Rank, list[tuple[int, dict[int, bool]]]], seed: int) -> None:
    cuts: dict[tuple[str, int], list[DuplicateWindow]] = defaultdict(list)
    for row in run(history, seed, 2):
        cuts[row.scope, row.window_start_us].append(row)
    for scope in ("rank", "workload", "model"):
        for (_, start), (fleet,) in [(key, rows) for key, rows in cuts.items() if key[0] == "fleet"]:
            cut = cuts[scope, start]
            assert sum(row.inside_token_us for row in cut) == fleet.inside_token_us
            assert sum(row.between_token_us for row in cut) == fleet.between_token_us
            assert sum(row.inside_tokens_end + row.between_tokens_end for row in cut) == (
                fleet.inside_tokens_end + fleet.between_tokens_end
            )


@settings(max_examples=100, deadline=None)
@given(histories(), st.integers(0, 2**32), st.integers(0, 2**32))
def test_final_windows_do_not_depend_on_the_order(history: dict[Rank, list[tuple[int, dict[int, bool]]]], seed: int, other: int) -> None:
    def figures(rows: list[DuplicateWindow]) -> dict[tuple[str, str, int], tuple[int, ...]]:
        return {
            (row.scope, row.scope_key, row.window_start_us): (row.inside_token_us, row.between_token_us, row.extra_tokens_max)
            for row in rows
            if row.window_us == WINDOW_US and (row.inside_token_us or row.between_token_us or row.extra_tokens_max)
        }

    one, two = figures(run(history, seed, 2)), figures(run(history, other, 2))
    for key in one.keys() & two.keys():
        assert one[key] == two[key]


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 400), st.booleans()), min_size=1, max_size=25), st.integers(0, 2**32))
def test_a_merger_that_reads_all_again_replaces_the_rows_that_stand(told: list[tuple[int, bool]], seed: int) -> None:
    """A worker that starts anew gives out its rows at other moments: with those that stand, time is still covered once."""
    rng = random.Random(seed)
    times = [(window + 1) * WINDOW_US for window, _ in told]
    answers = [
        DuplicateSteps(0, 1, number, "a", 0, None, None, at_us, [DuplicateStep(at_us, "GPU", "a", 0, 1, 16, 0, 0)] if steps else [])
        for number, (at_us, (_, steps)) in enumerate(zip(times, told, strict=True))
    ]
    standing: dict[int, DuplicateWindow] = {}
    with patch.object(merger_module, "LONG_STRETCH_WINDOWS", 4):
        for _ in range(3):
            merger = Merger(window_us=WINDOW_US, shards=1)
            often = rng.choice((0.0, 0.3, 1.0))
            for number, answer in enumerate(answers):
                merger.apply(answer, number)
                if rng.random() < often or number == len(answers) - 1:
                    for row in merger.drain():
                        if row.scope == "fleet" and row.version > getattr(standing.get(row.window_start_us), "version", -1):
                            standing[row.window_start_us] = row
    rows = [row for _, row in sorted(standing.items())]
    for before, after in pairwise(rows):
        assert before.window_start_us + before.window_us == after.window_start_us
    end_us = max(answer.watermark_us for answer in answers)
    assert sum(row.inside_block_us for row in rows) == sum(end_us - step.at_us for answer in answers for step in answer.steps)
