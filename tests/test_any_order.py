"""The answer hangs on the facts alone: any interleaving of ranks, any batching, any number of shards, cores killed anywhere.

Every run of a random fleet must end with the rows of the run in the order of time, and those are held against the reference.
"""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest

from producers.identity import ephemeral_key
from schemas.records import RankMessage
from tests.oracle import driver, rows
from tests.oracle.machine import Machine
from tests.oracle.oracle import Contents, Rank, RankInput
from tests.oracle.streams import fleet

KEY = ephemeral_key()
WINDOWS_US = (250_000, 1_000_000, 10_000_000, 60_000_000)
SKEWS_US = (0, 1_000_000, 1_000_000, 3_000_000)

TOLD_WHEN = ("version", "final", "ranks", "rank_lag_us", "shards", "shards_reported")
"""What a row says of the moment at which it was given out."""


def outcome(machine: Machine) -> dict[Any, Any]:
    """The rows that hold in the end, but for what they say of when they were given out.

    Rows of nothing but zeros are left out where only a change that was taken back may have given rise to them: of tiers other than the GPU
    and of pairs of workloads.
    """
    found: dict[Any, Any] = {}
    for row in rows.latest_rank_rows(machine.rank_windows):
        found["rank", row.instance_id, row.dp_rank, row.life_id, row.window_start_us] = msgspec.structs.asdict(row)
    for again in machine.recomputes:
        found["recompute", again.instance_id, again.dp_rank, again.life_id, again.seq, again.index] = msgspec.structs.asdict(again)
    for window in rows.latest_duplicate_rows(machine.duplicate_windows):
        if window.extra_blocks_max or (window.tier == "GPU" and window.scope != "workload_pair"):
            plain = {name: value for name, value in msgspec.structs.asdict(window).items() if name not in TOLD_WHEN}
            found[window.scope, window.scope_key, window.tier, window.window_start_us] = plain
    return found


def differences(one: dict[Any, Any], other: dict[Any, Any]) -> list[str]:
    """What differs between two outcomes."""
    return [f"{key}: {one.get(key)} and {other.get(key)}" for key in sorted({*one, *other}, key=str) if one.get(key) != other.get(key)]


class Case:
    """A random fleet, and what comes of it in the order of time."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.inputs: list[RankInput] = fleet(seed, rich=True)
        self.sent: list[list[RankMessage]] = [driver.messages(given, KEY) for given in self.inputs]
        self.window_us = self.rng.choice(WINDOWS_US)
        self.skew_us = self.rng.choice(SKEWS_US)
        self.calm = self.machine(1)
        self.calm.in_time()

    def machine(self, shards: int) -> Machine:
        return Machine(self.inputs, self.sent, self.rng, window_us=self.window_us, shards=shards, skew_us=self.skew_us)

    def disturbed(self, *, kills: bool) -> list[str]:
        """How a disturbed run's rows differ from the calm one's."""
        machine = self.machine(self.rng.randint(1, 4))
        machine.disturbed(kills=kills)
        return differences(outcome(self.calm), outcome(machine))

    def from_the_reference(self) -> list[str]:
        """How the calm run's rows differ from the reference."""
        contents = Contents()
        ranks = [Rank(given, contents, states=True) for given in self.inputs]
        calm = self.calm
        found = rows.fleet_differences(ranks, contents, calm.duplicate_windows, skew_us=self.skew_us, window_us=self.window_us)
        found += rows.coverage_differences(ranks, contents, calm.rank_windows, calm.duplicate_windows, skew_us=self.skew_us)
        return found + rows.prefix_differences(ranks, contents, calm.shared_prefixes)


@pytest.mark.parametrize("block", range(4))
def test_any_order_gives_the_same_rows_and_those_are_the_references(block: int) -> None:
    for seed in range(block * 15, block * 15 + 15):
        case = Case(seed)
        assert case.from_the_reference() == [], f"seed {seed}"
        assert case.disturbed(kills=False) == [], f"seed {seed}"


@pytest.mark.parametrize("block", range(4))
def test_cores_killed_anywhere_give_the_same_rows(block: int) -> None:
    for seed in range(1000 + block * 10, 1010 + block * 10):
        assert Case(seed).disturbed(kills=True) == [], f"seed {seed}"
