"""The fleet's answer hangs on the facts alone: not on interleaving, cuts, shards, nor on restarts from what was written down."""

from __future__ import annotations

import json
import random
from collections import defaultdict

import pytest

from schemas.errors import KvcensusError
from schemas.records import NO_ID, DuplicateStep, DuplicateSteps, DuplicateWindow, ResidencyChanges, ResidencyStep
from streams.duplication import ShardCore
from streams.merger import Merger
from tests.fleet_histories import (
    CONTENTS,
    END_US,
    PARENTS,
    SIZE,
    SKEW_US,
    STEP_US,
    Batch,
    Fleet,
    Rank,
    content_id,
    final_windows,
    history,
    messages,
    run,
    told_prefixes,
)


@pytest.mark.parametrize("block", range(4))
def test_no_order_no_cut_and_no_number_of_shards_changes_the_answer(block: int) -> None:
    for seed in range(block * 6, block * 6 + 6):
        leaving = seed % 3 == 0
        batches = history(random.Random(seed), departures=leaving)
        one = run(batches, seed, shards=1)
        windows, prefixes = final_windows(one), told_prefixes(one)
        assert windows
        for shards, other in ((1, seed + 1_000), (3, seed + 2_000)):
            again = run(batches, other, shards=shards)
            assert leaving or told_prefixes(again) == prefixes, f"seed {seed}"
            theirs = final_windows(again)
            for key, row in windows.items():
                # What a window says of the shards is of that run.
                assert theirs.get(key) == row | {"shards": shards, "shards_reported": shards}, f"seed {seed}"
            assert theirs.keys() == windows.keys()


@pytest.mark.parametrize("block", range(4))
def test_restarts_from_what_was_written_down_change_nothing(block: int) -> None:
    for seed in range(block * 6, block * 6 + 6):
        leaving = seed % 3 == 0
        batches = history(random.Random(seed), departures=leaving)
        undisturbed = run(batches, seed + 7, shards=2)
        disturbed = run(batches, seed, shards=2, restarts=True)
        assert final_windows(disturbed) == final_windows(undisturbed), f"seed {seed}"
        assert leaving or told_prefixes(disturbed) == told_prefixes(undisturbed), f"seed {seed}"


@pytest.mark.parametrize("seed", range(6))
def test_slices_of_different_age_answer_like_a_core_that_never_stopped(seed: int) -> None:
    """Also with old events folded away, in the order of time, and with what is told of shared content cut into small answers."""
    rng = random.Random(seed)
    batches = history(rng)
    options = {"max_events": 0, "fold_behind_us": 50, "shared_bytes": 16}
    fleet = run(batches, seed, shards=1, in_order=True, options=options)
    log = fleet.residency[0]
    for _ in range(4):
        whole = Fleet(1, rng, options).cores[0]
        answers = [whole.apply(message, 0 + offset) for offset, message in enumerate(log)]
        dumps: dict[int, bytes] = {}
        core = Fleet(1, rng, options).cores[0]
        stops = sorted(rng.sample(range(len(log)), 3))
        for offset, message in enumerate(log[: stops[-1] + 1]):
            core.apply(message, offset)
            if offset in stops:
                dumps |= {number: core.dump_slice(number) for number in rng.sample(range(16), 8)}
        dumps = {number: core.dump_slice(number) for number in range(16)} | dumps
        restored = Fleet(1, rng, options).cores[0]
        for number, data in dumps.items():
            restored.load_slice(number, data)
        oldest = min(restored.slice_position(number) for number in range(16))
        for offset in range(rng.randint(0, oldest + 1), len(log)):
            answer = restored.apply(log[offset], offset)
            if offset > stops[-1]:
                assert answer == answers[offset]


def holders(batches: dict[Rank, list[Batch]], at: int) -> dict[int, tuple[Rank, ...]]:
    """Which ranks hold each content in GPU memory after all events up to and including ``at``."""
    held: dict[int, set[Rank]] = defaultdict(set)
    for rank, each in batches.items():
        for batch in each:
            if batch.at <= at and batch.tier == "GPU":
                for number in batch.opened:
                    held[number].add(rank)
                for number in batch.closed:
                    held[number].discard(rank)
    return {number: tuple(sorted(ranks)) for number, ranks in held.items() if len(ranks) > 1}


@pytest.mark.parametrize("seed", range(12))
def test_trunks_are_the_longest_chains_of_equal_holders(seed: int) -> None:
    batches = {rank: [Batch(**{**vars(batch), "known": True}) for batch in each] for rank, each in history(random.Random(seed)).items()}
    fleet = run(batches, seed, shards=2)
    numbers = {content_id(number): number for number in range(CONTENTS)} | {NO_ID: -1}
    checked = 0
    for at in range(STEP_US, END_US + 1, STEP_US):
        shared = holders(batches, at)
        children: dict[int, list[int]] = defaultdict(list)
        for number, ranks in shared.items():
            parent = numbers[PARENTS[number]]
            if shared.get(parent) == ranks:
                children[parent].append(number)
        wanted = []
        for head in shared:
            if len(children[numbers[PARENTS[head]]]) == 1 and head in children[numbers[PARENTS[head]]]:
                continue
            chain = [head]
            while len(children[chain[-1]]) == 1:
                chain += children[chain[-1]]
            wanted.append((len(chain) * SIZE * (len(shared[head]) - 1), content_id(chain[-1]), content_id(head), shared[head]))
        wanted.sort(key=lambda each: (-each[0], each[1]))
        given = [fleet.prefixes[key] for key in sorted(fleet.prefixes) if key[0] == at]
        assert [(row.extra_tokens, row.content_id, row.head_content_id) for row in given] == [each[:3] for each in wanted]
        assert [row.ranks for row in given] == [[f"{name}/{dp}" for name, dp in each[3]] for each in wanted]
        checked += len(given)
    assert checked


@pytest.mark.parametrize("seed", range(12))
def test_pairs_of_workloads_count_what_both_have_once_it_has_lasted(seed: int) -> None:
    batches = history(random.Random(seed))
    fleet = run(batches, seed, shards=2)
    instants = sorted({batch.at for each in batches.values() for batch in each if batch.at < END_US})
    since: dict[tuple[int, str], int] = {}
    held: dict[tuple[int, Rank], str] = {}
    spans: dict[str, list[tuple[int, int]]] = defaultdict(list)

    def together(number: int, at: int, was: dict[tuple[int, str], int], now: dict[tuple[int, str], int]) -> None:
        names = sorted(name for content, name in was if content == number)
        for place, one in enumerate(names):
            for other in names[place + 1 :]:
                if (number, one) not in now or (number, other) not in now:
                    start = max(was[number, one], was[number, other]) + SKEW_US
                    if at > start:
                        spans[json.dumps([one, other])].append((start, at))

    for at in instants:
        was = dict(since)
        last: dict[tuple[int, Rank], tuple[bool, str]] = {}
        for rank, each in batches.items():
            for batch in each:
                if batch.at == at and batch.tier == "GPU":
                    last |= {(number, rank): (True, batch.workload or "") for number in batch.opened}
                    last |= {(number, rank): (False, "") for number in batch.closed}
        for (number, rank), (is_open, workload) in last.items():
            if is_open:
                held.setdefault((number, rank), workload)
        # Opened before closed within one instant: what was there, and what came, is there together for no time.
        for (number, _), workload in held.items():
            since.setdefault((number, workload), at)
        between = dict(since)
        for key, (is_open, _) in last.items():
            if not is_open:
                held.pop(key, None)
        alive = {(number, workload) for (number, _), workload in held.items()}
        since = {key: opened for key, opened in since.items() if key in alive}
        for number in range(CONTENTS):
            together(number, at, {**between, **was}, since)
    for number in range(CONTENTS):
        together(number, END_US, since, {})
    wanted = {key: sum(until - start for start, until in each) for key, each in spans.items()}
    given: dict[str, int] = defaultdict(int)
    for (scope, pair, tier, start), row in fleet.windows.items():
        if scope == "workload_pair" and tier == "GPU" and start < END_US:
            given[pair] += row.between_block_us
            assert row.between_byte_ms is None
    assert {key: total for key, total in given.items() if total} == {key: total for key, total in wanted.items() if total}


def test_state_of_another_kind_is_refused() -> None:
    core = ShardCore(0, 2)
    with pytest.raises(KvcensusError, match="other options"):
        ShardCore(1, 2).load_slice(0, core.dump_slice(0))
    with pytest.raises(KvcensusError, match="other options"):
        ShardCore(0, 2).load_slice(1, core.dump_slice(0))
    with pytest.raises(KvcensusError, match="other options"):
        Merger.restored(Merger(shards=2).dump(), shards=3)


def test_an_answer_that_never_came_stands_in_every_window_since() -> None:
    merger = Merger(window_us=100, shards=1, grace_us=0)
    for number, previous in ((0, -1), (1, 0), (4, 3), (5, 4)):
        at = 50 + 100 * number
        merger.apply(DuplicateSteps(0, 1, number, "a", 0, None, None, at, [], previous_offset=previous, observed=[at - 10, at]), number)
    rows = {row.window_start_us: row for row in merger.drain() if row.scope == "fleet"}
    assert ["shards_missing" in rows[start].reasons for start in sorted(rows)] == [False, True, True, True, True, True]


def test_messages_sent_before_do_not_take_back_what_came_after() -> None:
    """A holder that starts anew sends again what it sent: the rank has not departed a second time."""
    batches = history(random.Random(3))
    rank, each = next(iter(batches.items()))
    each[3].departs = True
    cut = [message[0] for message in messages(rank, each, 1, random.Random(1))]
    core = ShardCore(0, 1)
    answers = [core.apply(message, offset) for offset, message in enumerate(cut)]
    stale = next(number for number, message in enumerate(cut) if message.departed)
    assert answers[stale].departed
    again = core.apply(cut[stale], len(cut))
    assert (again.departed, again.steps, again.notes, again.declared_at_us) == (False, [], [], answers[-1].declared_at_us)


def opening(number: int, at: int, instance: str, *contents: int) -> ResidencyChanges:
    """The ``number``th batch of an instance, which opens ``contents``."""
    packed = b"".join(content_id(each) for each in contents)
    return ResidencyChanges(instance, 0, "w", "m", number, at, [ResidencyStep(number, at, "GPU", SIZE, packed)], kv_bytes_per_token=10)


def test_changes_too_late_for_a_shard_count_later_and_say_so() -> None:
    core, merger = ShardCore(0, 1, skew_us=0, max_events=0, fold_behind_us=0, window_us=100), Merger(window_us=100, grace_us=0)
    sent = [opening(0, 50, "a", 1), opening(0, 60, "c"), opening(1, 350, "a", 17), opening(2, 450, "a", 33), opening(0, 20, "b", 1)]
    for offset, changes in enumerate([*sent, opening(1, 460, "b")]):
        merger.apply(core.apply(changes, offset), offset)
    fleet = {row.window_start_us: row for row in merger.drain() if row.scope == "fleet"}
    assert core.late_changes == 1
    assert ["late_data" in fleet[start].reasons for start in sorted(fleet)] == [True, False, False, False, False]
    assert fleet[0].between_block_us == 49, "from right after what was settled, and not from its own time"
    assert {row.late_changes for row in fleet.values()} == {1}


def test_a_merger_with_too_much_to_keep_lets_go_of_the_oldest_and_says_what_came_too_late() -> None:
    merger = Merger(window_us=100, grace_us=0, max_kept=40, keep_us=500)
    standing: dict[tuple[str, int], DuplicateWindow] = {}

    def take(number: int, at: int, watermark: int) -> None:
        step = DuplicateStep(at, "GPU", "a", 0, 1, SIZE, 0, 0)
        merger.apply(DuplicateSteps(0, 1, number, "a", 0, "w", "m", watermark, [step], kv_bytes_per_token=10), number)
        standing.update({(row.scope, row.window_start_us): row for row in merger.drain()})

    for number in range(100):
        take(number, 100 * number + 50, 100 * number + 50)
    assert merger.late_steps == 0
    take(100, 150, 9_960)
    fleet = [standing["fleet", start] for start in sorted(start for scope, start in standing if scope == "fleet")]
    assert merger.late_steps == 1
    assert [row.window_start_us for row in fleet] == list(range(0, 10_000, 100))
    late = [row for row in fleet if "late_data" in row.reasons]
    assert len(late) == 1
    assert late[0].inside_blocks_end == late[0].window_start_us // 100 + 2, "it counts from the oldest window that could change"
    assert fleet[-1].inside_blocks_end == 101
    assert fleet[-1].late_changes == 1
    assert fleet[-1].inside_bytes_end == 101 * SIZE * 10
    assert len(merger.dump()) < 6_000, "what was let go of is gone"


def test_content_behind_two_parents_is_told_once_and_since_when() -> None:
    core = ShardCore(0, 1)
    answers = []
    for number, (at, instance, parent) in enumerate(((100, "a", 1), (300, "b", 2), (200, "c", 2), (400, "d", 3))):
        changes = opening(0, at, instance, 5)
        changes.steps[0].parents = content_id(parent)
        answers.append(core.apply(changes, number))
    assert [answer.parent_conflicts for answer in answers] == [0, 1, 1, 1]
    assert [[(note.at_us, note.reason) for note in answer.notes] for answer in answers] == [
        [],
        [(300, "parent_conflict")],
        [(200, "parent_conflict")],
        [(200, "parent_conflict")],
    ]
