"""A holder core says the same whenever it is drained, and goes on from its own state as if nothing had happened."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

import msgspec
import pytest

from schemas.errors import KvcensusError
from schemas.records import RankMessage, RankWindow, Recompute, ResidencyChanges, ResidencyStep
from streams.residency import RankCore
from tests.random_rank import RandomRank

SHARDS = 3
HISTORY = {"history_us": 90_000_000, "history_blocks": 12}


@dataclass
class Said:
    """Everything a core gave out, with what cannot matter taken away: versions of rows that are not final, and where messages are cut."""

    rows: dict[tuple[str, int], RankWindow] = field(default_factory=dict)
    recomputes: dict[tuple[str, int, int], Recompute] = field(default_factory=dict)
    steps: list[dict[bytes, tuple[object, ...]]] = field(default_factory=lambda: [{} for _ in range(SHARDS)])
    told: list[dict[str, None]] = field(default_factory=lambda: [{} for _ in range(SHARDS)])
    observed: list[tuple[int, int]] = field(default_factory=list)
    notes: set[tuple[int, str]] = field(default_factory=set)
    offsets: list[int] = field(default_factory=lambda: [-1] * SHARDS)

    def add(self, core: RankCore) -> None:
        drained = core.drain()
        for row in drained.windows:
            known = self.rows.get((row.life_id, row.window_start_us))
            if known is None or row.version >= known.version:
                self.rows[row.life_id, row.window_start_us] = row
        for each in drained.recomputes:
            self.recomputes[each.life_id, each.seq, each.index] = each
        for shard, messages in enumerate(drained.changes):
            for message in messages:
                self._hear(shard, message)

    def _hear(self, shard: int, message: ResidencyChanges) -> None:
        declared = (message.workload, message.model, message.key_epoch, message.kv_bytes_per_token, message.staleness_ms)
        self.told[shard][repr((declared, message.declared_at_us))] = None
        if message.departed:
            self.told[shard][f"departed {message.watermark_us}"] = None
        for step in message.steps:
            assert step.source_offset <= message.source_offset
            told = msgspec.msgpack.encode(step)
            # A shard passes over what lies at or before the position it has: it must have it, however messages are cut.
            assert step.source_offset > self.offsets[shard] or told in self.steps[shard]
            self.steps[shard][told] = (step.source_offset, declared)
        self.offsets[shard] = max(self.offsets[shard], message.source_offset)
        self.observed += zip(message.observed[::2], message.observed[1::2], strict=True)
        self.notes |= {(note.at_us, note.reason) for note in message.notes}

    def final(self) -> tuple[object, ...]:
        rows = {key: msgspec.structs.replace(row, version=row.version if row.final else 0) for key, row in self.rows.items()}
        return rows, self.recomputes, self.steps, self.told, merged(self.observed), self.notes


def merged(stretches: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The union of stretches of time."""
    out: list[tuple[int, int]] = []
    for start, end in sorted(stretches):
        if out and start <= out[-1][1]:
            out[-1] = (out[-1][0], max(out[-1][1], end))
        else:
            out.append((start, end))
    return out


def core(shards: int = SHARDS) -> RankCore:
    return RankCore("a", 0, shards=shards, **HISTORY)


def run(messages: list[RankMessage], drains: set[int]) -> Said:
    holder, said = core(), Said()
    for offset, message in enumerate(messages):
        holder.apply(message, offset)
        if offset in drains:
            said.add(holder)
    said.add(holder)
    return said


@pytest.mark.parametrize("seed", range(12))
def test_what_is_said_does_not_hang_on_when_it_is_asked(seed: int) -> None:
    messages = list(RandomRank(seed).messages(400))
    pick = random.Random(seed)
    always = run(messages, set(range(400))).final()
    for drains in (set[int](), set(pick.sample(range(400), 15)), set(range(200, 400, 7))):
        for one, other in zip(run(messages, drains).final(), always, strict=True):
            assert one == other


@pytest.mark.parametrize("seed", range(12))
def test_a_restored_core_goes_on_as_if_nothing_had_happened(seed: int) -> None:
    messages = list(RandomRank(100 + seed).messages(400))
    pick = random.Random(seed)
    undisturbed = run(messages, set(range(0, 400, 20)))
    holder, said, offset = core(), Said(), 0
    while offset < len(messages):
        holder.apply(messages[offset], offset)
        if pick.random() < 0.05:
            said.add(holder)
            data = holder.dump()
            assert RankCore.restored(data, shards=SHARDS, **HISTORY).dump() == data
            if pick.random() < 0.5:  # more is counted and given out, and then lost
                for ahead in range(offset + 1, min(offset + 30, len(messages))):
                    holder.apply(messages[ahead], ahead)
                said.add(holder)
            holder = RankCore.restored(data, shards=SHARDS, **HISTORY)
            offset = max(0, offset - pick.randint(0, 10))  # and some of what it knows comes again
        offset += 1
    said.add(holder)
    for one, other in zip(said.final(), undisturbed.final(), strict=True):
        assert one == other


def test_the_streams_use_everything() -> None:
    """Else the tests above prove little."""
    seen = Counter[str]()
    for seed in range(12):
        said = run(list(RandomRank(seed).messages(400)), set())
        for row in said.rows.values():
            seen.update(row.reasons)
            seen["breaches"] += row.breaches_found
            for group in row.groups:
                for name in ("unreused_blocks", "forgotten_blocks", "unrated_tokens", "reloaded_blocks", "recompute_evicted_gpu_us"):
                    seen[name] += getattr(group, name)
                seen["lifetimes"] += sum(group.lifetime_counts)
                seen["kv_bytes"] += group.kv_bytes_per_token is not None
        seen["departed"] += sum(each.startswith("departed") for each in said.told[0])
        seen.update(each.cause for each in said.recomputes.values())
    wanted = """unlabelled warmup kv_connector identity history_forgotten late_attach lost refused restarted rekeyed reattached redeclared
        undeclared_gap ambiguous_reload cached_over_pool in_use_over_cached identity_refused breaches departed unreused_blocks
        forgotten_blocks unrated_tokens reloaded_blocks recompute_evicted_gpu_us lifetimes kv_bytes evicted cleared concurrent"""
    assert not [name for name in wanted.split() if not seen[name]]


def test_a_state_of_other_rules_or_options_is_not_used() -> None:
    holder = core()
    data = holder.dump()
    for bad in (b"", b"\xc0", data[:-1], b"\x93\x63" + data[2:]):
        with pytest.raises(KvcensusError):
            RankCore.restored(bad, shards=SHARDS)
    with pytest.raises(KvcensusError):
        RankCore.restored(data, shards=1)


def test_steps_name_what_lies_before_each_content_they_open() -> None:
    said = run(list(RandomRank(3).messages(200)), set())
    steps = [msgspec.msgpack.decode(step, type=ResidencyStep) for shard in said.steps for step in shard]
    assert steps
    assert all(len(step.parents) == len(step.opened) for step in steps)
