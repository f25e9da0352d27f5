"""The simulated engines: pool and scheduler, workloads and traces, wire format, captures. Sockets: test_simulate_server.py."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import os
import subprocess
import sys
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from producers import wire
from producers.simulate import fleet, presets
from producers.simulate.encode import encode_batch
from producers.simulate.engine import Control, EngineRank, EngineSpec
from producers.simulate.events import AllBlocksCleared, BlockRemoved, BlockStored, Event
from producers.simulate.fleet import FleetSpec, InstanceSpec
from producers.simulate.pool import BlockPool
from producers.simulate.source import SourceBatch
from producers.simulate.trace import TOKENS_PER_HASH, read_trace
from producers.simulate.workload import Request, WorkloadSpec, draw_tokens, requests
from schemas.errors import KvcensusError
from tests.oracle import oracle
from tests.shared_data import capture_path, shared_path

START_US = 1_796_000_000_000_000
SECOND = 1_000_000


def tokens(name: str, count: int) -> array[int]:
    return draw_tokens(Random(name), count)


def request(at_us: int, prompt: array[int], answer: int = 1, **more: Any) -> Request:
    said = more.pop("said", None) or tokens(f"answer {at_us} {len(prompt)}", answer)
    return Request(at_us, (prompt,), said, b"route", **more)


def run(
    spec: EngineSpec, sent: Iterable[Request], controls: Iterable[Control] = (), seconds: float = 60
) -> tuple[EngineRank, list[SourceBatch]]:
    rank = EngineRank(spec, 0, lambda life: b"life %d" % life)
    ordered = sorted(sent, key=lambda one: one.arrival_us)
    return rank, list(rank.run(ordered, controls, START_US, round(seconds * SECOND)))


def decoded(batches: Iterable[SourceBatch]) -> list[wire.WireBatch]:
    return [wire.decode(batch.payload) for batch in batches]


def stores(batches: Iterable[SourceBatch]) -> list[wire.Stored]:
    return [event for batch in decoded(batches) for event in batch.events if isinstance(event, wire.Stored)]


def removals(batches: Iterable[SourceBatch]) -> list[wire.Removed]:
    return [event for batch in decoded(batches) for event in batch.events if isinstance(event, wire.Removed)]


class Naive:
    """The cache as its events tell it: a multiset of hashes."""

    def __init__(self, pool_blocks: int) -> None:
        self.pool_blocks = pool_blocks
        self.held: Counter[Any] = Counter()
        self.ever: set[Any] = set()

    def apply(self, event: wire.Event | Event) -> None:
        if isinstance(event, wire.Stored | BlockStored):
            assert len(event.token_ids or ()) == len(event.block_hashes) * event.block_size
            assert event.extra_keys is not None
            assert len(event.extra_keys) == len(event.block_hashes)
            # A run starts at the root or hangs on a block that is held right now.
            assert event.parent_block_hash is None or self.held[event.parent_block_hash] > 0
            self.held.update(event.block_hashes)
            self.ever.update(event.block_hashes)
        elif isinstance(event, wire.Removed | BlockRemoved):
            (removed,) = event.block_hashes
            assert self.held[removed] > 0, "a removal of something that is not held"
            self.held[removed] -= 1
        else:
            self.held.clear()
        assert self.held.total() <= self.pool_blocks

    def now(self) -> Counter[Any]:
        return +self.held


# ---------------------------------------------------------------------------------------------------------------- pool


@st.composite
def pool_histories(draw: st.DrawFn) -> tuple[int, list[tuple[str, int, int]]]:
    """A pool size and steps: start a prompt of a family with n blocks, end the k-th running one, reset."""
    step = st.one_of(
        st.tuples(st.just("start"), st.integers(0, 3), st.integers(1, 6)),
        st.tuples(st.just("end"), st.integers(0, 7), st.just(0)),
        st.tuples(st.just("reset"), st.just(0), st.just(0)),
    )
    return draw(st.integers(1, 16)), draw(st.lists(step, max_size=60))


@given(pool_histories())
def test_the_pools_events_tell_exactly_what_it_holds(history: tuple[int, list[tuple[str, int, int]]]) -> None:
    blocks, steps = history
    pool = BlockPool(blocks, 2)
    naive = Naive(blocks)
    running: list[list[int]] = []
    for kind, which, length in steps:
        if kind == "start":
            hashes = [which * 100 + index for index in range(length)]
            hits = pool.lookup(hashes[: length - 1])
            free = pool.free_blocks
            taken = pool.allocate(hits, length - len(hits))
            if taken is None:
                assert pool.free_blocks == free
            else:
                mine = hits + taken
                first = len(hits)
                parent = hashes[first - 1] if first else None
                pool.publish(mine[first:], hashes[first:], parent, [0] * 2 * len(taken), [None] * len(taken))
                running.append(mine)
        elif kind == "end" and running:
            pool.free(running.pop(which % len(running)))
        elif kind == "reset":
            assert pool.reset() == (not running)
        for event in pool.take_events():
            naive.apply(event)
        assert naive.now() == pool.cached_copies()
        assert pool.idle == (not running)
        assert pool.free_blocks == blocks - len({block for mine in running for block in mine})


def test_a_pool_takes_the_least_recently_freed_block_and_a_prompts_end_before_its_beginning() -> None:
    pool = BlockPool(4, 1)
    first = pool.allocate((), 2)
    second = pool.allocate((), 2)
    assert first is not None
    assert second is not None
    pool.publish(first, [1, 2], None, [0, 0], [None, None])
    pool.publish(second, [3, 4], None, [0, 0], [None, None])
    pool.free(second)
    pool.free(first)
    pool.take_events()
    assert pool.allocate((), 5) is None
    pool.allocate((), 3)
    assert [event.block_hashes for event in pool.take_events() if isinstance(event, BlockRemoved)] == [[4], [3], [2]]


def test_a_hit_saves_a_free_block_from_eviction() -> None:
    pool = BlockPool(3, 1)
    mine = pool.allocate((), 2)
    assert mine is not None
    pool.publish(mine, [1, 2], None, [0, 0], [None, None])
    pool.free(mine)
    hits = pool.lookup([1, 2, 3])
    assert hits == mine
    # One block is free beside the two that are hit: two more can't be had, and nothing may change in trying.
    assert pool.allocate(hits, 2) is None
    assert pool.free_blocks == 3
    assert pool.allocate(hits, 1) is not None
    assert pool.free_blocks == 0
    assert pool.cached_copies() == Counter({1: 1, 2: 1})


# ----------------------------------------------------------------------------------------------------------- one engine


@st.composite
def engine_runs(draw: st.DrawFn) -> tuple[EngineSpec, list[Request], list[Control]]:
    spec = EngineSpec(
        pool_blocks=draw(st.integers(4, 40)),
        block_size=draw(st.sampled_from([1, 2, 4, 8])),
        wire=draw(st.sampled_from(["map", "array12"])),
        hash_form=draw(st.sampled_from(["u64", "bytes32"])),
        hash_seed=draw(st.sampled_from(["per_life", "fixed"])),
        prefill_chunk=draw(st.integers(1, 32)),
        max_batched_tokens=draw(st.integers(8, 64)),
        max_running=draw(st.integers(1, 8)),
        tick_us=draw(st.sampled_from([1, 10_000])),
        restart_us=draw(st.integers(0, 300_000)),
    )
    sent = []
    for number in range(draw(st.integers(1, 14))):
        family = draw(st.integers(0, 2))
        length = draw(st.integers(1, 60))
        own = draw(st.integers(0, 12))
        prompt = tokens(f"family {family}", 60)[:length] + tokens(f"own {number}", own)
        salt = draw(st.sampled_from([None, None, "one", "two"]))
        adapter = draw(st.sampled_from([None, None, (1, "ad")]))
        said = tokens(f"said {draw(st.integers(0, 2))}", 40)[: draw(st.integers(1, 40))]
        sent.append(request(draw(st.integers(0, 2 * SECOND)), prompt, said=said, salt=salt, adapter=adapter))
    control = st.builds(Control, st.integers(0, 2 * SECOND), st.sampled_from(["flush", "restart"]))
    return spec, sent, draw(st.lists(control, max_size=4))


@given(engine_runs())
def test_whatever_is_asked_an_engines_events_are_a_possible_history(made: tuple[EngineSpec, list[Request], list[Control]]) -> None:
    spec, sent, controls = made
    rank, batches = run(spec, sent, controls)
    naive = Naive(spec.pool_blocks)
    life, seq, at_us = 0, 0, 0
    for batch, read in zip(batches, decoded(batches), strict=True):
        if batch.life != life:
            assert batch.life > life
            life, seq, naive = batch.life, 0, Naive(spec.pool_blocks)
        assert batch.seq == seq
        assert read.at_us == batch.at_us > at_us
        assert read.dp_rank == 0
        assert read.events
        assert batch.at_us % spec.tick_us == START_US % spec.tick_us
        for event in read.events:
            naive.apply(event)
        seq, at_us = seq + 1, batch.at_us
    if rank.stats.restarts == life:
        # The last life has published something; a reset that no step has followed is still unpublished.
        for unpublished in rank.pool.take_events():
            naive.apply(unpublished)
        assert naive.now() == rank.pool.cached_copies()
    stats = rank.stats
    assert stats.finished + stats.rejected + stats.cut_off == len(sent)
    assert stats.cut_off == 0, "a minute is enough for a dozen short requests"
    assert rank.pool.idle


class _StepByStep(EngineRank):
    def _skip_quiet(self, now: int, outside: int) -> int:
        return 0


@given(engine_runs())
def test_skipping_quiet_steps_changes_nothing(made: tuple[EngineSpec, list[Request], list[Control]]) -> None:
    spec, sent, controls = made
    ordered = sorted(sent, key=lambda one: one.arrival_us)
    slow = _StepByStep(spec, 0, lambda life: b"life %d" % life)
    assert list(slow.run(ordered, controls, START_US, 10 * SECOND)) == run(spec, sent, controls, 10)[1]


def test_only_full_blocks_are_stored_prompts_in_one_run_and_answers_block_by_block() -> None:
    prompt = tokens("prompt", 70)
    said = tokens("said", 40)
    _, batches = run(EngineSpec(block_size=16), [request(0, prompt, said=said)])
    # 70 tokens of prompt are four full blocks; the 39 answer tokens that are computed fill blocks 5 and 6 (80, 96), not 7 (112).
    assert [len(event.block_hashes) for event in stores(batches)] == [4, 1, 1]
    everything = [token for event in stores(batches) for token in event.token_ids or ()]
    assert everything == (prompt + said)[:96].tolist()
    first, second, third = stores(batches)
    assert (first.parent_block_hash, second.parent_block_hash, third.parent_block_hash) == (
        None,
        first.block_hashes[-1],
        second.block_hashes[0],
    )
    assert removals(batches) == []


def test_a_prompt_computed_in_chunks_is_one_run_per_step() -> None:
    _, batches = run(EngineSpec(block_size=16, prefill_chunk=64), [request(0, tokens("long", 200))])
    assert [len(event.block_hashes) for event in stores(batches)] == [4, 4, 4]
    assert [batch.seq for batch in batches] == [0, 1, 2]


def test_a_fully_cached_prompt_of_whole_blocks_stores_its_last_block_again() -> None:
    prompt = tokens("whole", 64)
    _, batches = run(EngineSpec(block_size=16), [request(0, prompt), request(SECOND, prompt)])
    first, again = stores(batches)
    assert again.block_hashes == first.block_hashes[-1:]
    assert again.parent_block_hash == first.block_hashes[-2]


def test_a_cache_hit_publishes_nothing() -> None:
    prompt = tokens("with a rest", 70)
    rank, batches = run(EngineSpec(block_size=16), [request(0, prompt), request(SECOND, prompt)])
    assert len(batches) == 1
    assert rank.stats.finished == 2
    assert rank.stats.hit_tokens == 64


def test_two_prompts_computed_side_by_side_make_two_copies_each_with_its_store_and_its_removal() -> None:
    prompt = tokens("shared", 256)
    spec = EngineSpec(block_size=16, pool_blocks=40, prefill_chunk=64)
    # The second comes while the first is being computed: it finds its first chunks and computes the rest itself.
    twice = [request(0, prompt, 20), request(12_000, prompt, 20)]
    _, batches = run(spec, [*twice, request(5 * SECOND, tokens("another", 40 * 16 - 8))])
    early = [batch for batch in batches if batch.at_us < START_US + 5 * SECOND]
    stored = Counter(key for event in stores(early) for key in event.block_hashes)
    assert max(stored.values()) == 2
    assert sum(count == 2 for count in stored.values()) >= 4
    assert removals(early) == []
    # The last prompt takes every block of the pool: one removal for each copy, one hash in each.
    removed = Counter(key for event in removals(batches) for key in event.block_hashes)
    assert removed == stored
    assert all(len(event.block_hashes) == 1 for event in removals(batches))


def test_evictions_come_before_the_store_that_needed_the_blocks_in_one_batch() -> None:
    spec = EngineSpec(block_size=16, pool_blocks=8)
    _, batches = run(spec, [request(0, tokens("a", 16 * 8 - 1)), request(SECOND, tokens("b", 16 * 6 - 1))])
    last = decoded(batches)[-1]
    assert [type(event).__name__ for event in last.events] == ["Removed"] * 5 + ["Stored"]
    first = stores(batches)[0]
    # One of the six blocks it takes was never full; the ends of the old prompt go first.
    assert [event.block_hashes[0] for event in removals(batches)] == first.block_hashes[:1:-1]


def test_a_reset_waits_for_the_next_step_and_comes_before_its_stores() -> None:
    prompt = tokens("p", 100)
    flush = Control(SECOND, "flush")
    _, batches = run(EngineSpec(), [request(0, prompt), request(2 * SECOND, prompt)], [flush])
    first, second = decoded(batches)
    assert [type(event).__name__ for event in second.events] == ["Cleared", "Stored"]
    assert second.at_us - first.at_us == 2 * SECOND
    # All of it is computed anew.
    assert second.events[1] == first.events[0]


def test_a_busy_engine_is_drained_before_it_is_reset() -> None:
    busy = request(0, tokens("busy", 100), 200)
    late = request(500_000, tokens("busy", 100))
    rank, batches = run(EngineSpec(), [busy, late], [Control(400_000, "flush")])
    kinds = [type(event).__name__ for batch in decoded(batches) for event in batch.events]
    assert kinds.index("Cleared") == len(kinds) - 2
    assert rank.stats.flushes == 1


def test_a_restart_starts_the_sequence_and_an_empty_pool_and_its_clients_ask_again() -> None:
    prompt = tokens("p", 100)
    spec = EngineSpec(restart_us=500_000)
    sent = [request(0, prompt, 100), request(3 * SECOND, prompt)]
    rank, batches = run(spec, sent, [Control(600_000, "restart")])
    assert rank.stats.retried == 1
    lives: dict[int, list[SourceBatch]] = {}
    for batch in batches:
        lives.setdefault(batch.life, []).append(batch)
    assert [batch.seq for batch in lives[1]] == list(range(len(lives[1])))
    assert lives[0][-1].at_us < START_US + 600_000
    assert lives[1][0].at_us == START_US + 600_000 + 500_000
    before, after = stores(lives[0])[0], stores(lives[1])[0]
    assert before.token_ids == after.token_ids
    assert not set(before.block_hashes) & set(after.block_hashes), "hashes of a life are its own"
    _, fixed = run(replace(spec, hash_seed="fixed"), sent, [Control(600_000, "restart")])
    assert len(fixed) == len(batches)


def test_hashes_that_are_fixed_are_equal_in_every_life_rank_and_instance() -> None:
    one = InstanceSpec("one", "w", EngineSpec(hash_seed="fixed"), restart_at_s=(2.0,))
    spec = FleetSpec((one, replace(one, name="two")), (WorkloadSpec("w", rate=8.0, mix=(("popular", 1.0),), popular_prompts=1),), 6.0)
    own = FleetSpec(tuple(replace(i, engine=EngineSpec()) for i in spec.instances), spec.workloads, 6.0)
    for made, expected in ((spec, 1), (own, 4)):
        first = set()
        for source in fleet.sources(made):
            lives: dict[int, Any] = {}
            for batch in source.batches:
                for event in stores([batch]):
                    if event.parent_block_hash is None:
                        lives.setdefault(batch.life, event.block_hashes[0])
            assert len(lives) == 2
            first |= set(lives.values())
        assert len(first) == expected


def test_salts_and_adapters_are_in_the_extra_keys_as_vllm_has_them() -> None:
    prompt = tokens("p", 40)
    sent = [
        request(0, prompt),
        request(SECOND, prompt, salt="tenant-1"),
        request(2 * SECOND, prompt, adapter=(2, "adapter-b")),
        request(3 * SECOND, prompt, salt="tenant-1", adapter=(2, "adapter-b")),
    ]
    _, batches = run(EngineSpec(), sent)
    assert [(event.extra_keys, event.lora_id, event.lora_name) for event in stores(batches)] == [
        ([None, None], None, None),
        ([["tenant-1"], None], None, None),
        ([["adapter-b"], ["adapter-b"]], 2, "adapter-b"),
        ([["adapter-b", "tenant-1"], ["adapter-b"]], 2, "adapter-b"),
    ]
    hashes = [tuple(event.block_hashes) for event in stores(batches)]
    assert len(set(hashes)) == 4


def test_a_request_that_can_never_fit_is_refused_and_counted() -> None:
    rank, batches = run(EngineSpec(pool_blocks=4, block_size=16), [request(0, tokens("p", 70))])
    assert rank.stats.rejected == 1
    assert batches == []


def test_the_newest_request_is_preempted_and_finishes_later() -> None:
    spec = EngineSpec(pool_blocks=10, block_size=16)
    rank, batches = run(spec, [request(0, tokens("a", 64), 90), request(10_000, tokens("b", 64), 90)])
    assert rank.stats.preempted > 0
    assert rank.stats.finished == 2
    naive = Naive(10)
    for batch in decoded(batches):
        for event in batch.events:
            naive.apply(event)


# --------------------------------------------------------------------------------------------------------- wire format


def recorded(name: str) -> Iterator[bytes]:
    with gzip.open(capture_path(name), "rt") as lines:
        for line in lines:
            yield base64.b64decode(json.loads(line)["frames"][-1])


@pytest.mark.parametrize("name", ["a_shared_prefix", "b_pressure", "c_reset_salt", "f_lora_salt_session", "g_dp2"])
def test_encoding_what_a_real_engine_sent_gives_the_same_bytes(name: str) -> None:
    """vLLM 0.32: same keys, same order, same defaults left out. Batches of requests with a session id hold a field of their own."""
    compared = 0
    for payload in recorded(f"{name}.frames.jsonl.gz"):
        _, events, dp_rank = msgspec.msgpack.decode(payload)
        if any("session_id" in event for event in events):
            continue
        mine = [msgspec.convert(event, BlockStored | BlockRemoved | AllBlocksCleared) for event in events]
        # The time is not rounded to microseconds on the wire: it is compared apart.
        encoded = encode_batch(wire.decode(payload).at_us, mine, dp_rank)
        assert encoded[:2] == payload[:2] == b"\x93\xcb"
        assert encoded[10:] == payload[10:]
        compared += 1
    assert compared > 5


@pytest.mark.parametrize(("name", "form"), [("j_v0.16.0_array", "array8"), ("j_v0.23.0_array", "array12")])
def test_encoding_what_an_older_engine_sent_gives_the_same_bytes(name: str, form: Any) -> None:
    compared = 0
    for payload in recorded(f"{name}.frames.jsonl.gz"):
        _, events, dp_rank = msgspec.msgpack.decode(payload)
        mine: list[Event] = []
        for tag, *fields in events:
            if tag == "BlockStored":
                hashes, parent, ids, size, lora_id, medium, lora_name, *rest = fields
                mine.append(BlockStored(hashes, parent, ids, size, lora_id, medium, lora_name, *rest[:3]))
            else:
                mine.append(BlockRemoved(*fields) if tag == "BlockRemoved" else AllBlocksCleared())
        assert encode_batch(wire.decode(payload).at_us, mine, dp_rank, form)[10:] == payload[10:]
        compared += 1
    assert compared > 5


def test_a_simulated_engines_events_have_the_shape_of_a_recorded_ones() -> None:
    def shapes(payloads: Iterable[bytes]) -> set[tuple[str, ...]]:
        return {tuple(event) for payload in payloads for event in msgspec.msgpack.decode(payload)[1]}

    spec = presets.demo_fleet()
    simulated = shapes(batch.payload for source in fleet.sources(spec) for batch in source.batches)
    real = shapes(p for name in ("a_shared_prefix", "b_pressure", "g_dp2") for p in recorded(f"{name}.frames.jsonl.gz"))
    assert simulated == real


@given(st.integers(0, 2**52))
def test_engine_time_survives_the_wire_to_the_microsecond(at_us: int) -> None:
    ts, _, _ = msgspec.msgpack.decode(encode_batch(at_us, [], 0))
    assert round(ts * 1_000_000) == at_us


@pytest.mark.parametrize("form", ["map", "array8", "array12"])
def test_every_wire_form_says_the_same(form: Any) -> None:
    sent = [request(number * 200_000, tokens(f"p{number % 4}", 90), 20) for number in range(12)]
    _, plain = run(EngineSpec(pool_blocks=16), sent)
    _, other = run(EngineSpec(pool_blocks=16, wire=form), sent)
    for one, two in zip(decoded(plain), decoded(other), strict=True):
        for left, right in zip(one.events, two.events, strict=True):
            left.group_idx = right.group_idx
            if isinstance(left, wire.Stored) and isinstance(right, wire.Stored) and form == "array8":
                assert (right.extra_keys, right.spec_kind) == (None, None)
                left.extra_keys = left.spec_kind = None
            assert left == right


# ---------------------------------------------------------------------------------------------- workloads, fleets, traces

_DIGEST = """
import hashlib
from producers.simulate import fleet, presets
digest = hashlib.sha256()
for spec in (presets.demo_fleet(), presets.test_fleets()["salts-and-adapters"]):
    for source in fleet.sources(spec):
        for batch in source.batches:
            digest.update(b"%d/%d/%d" % (batch.life, batch.seq, batch.at_us) + batch.payload)
print(digest.hexdigest())
"""


def test_a_seed_gives_the_same_bytes_in_every_process() -> None:
    digests = set()
    for hash_seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        made = subprocess.run([sys.executable, "-c", _DIGEST], env=environment, capture_output=True, text=True, check=True)
        digests.add(made.stdout.strip())
    assert len(digests) == 1


def payloads(spec: FleetSpec) -> str:
    digest = hashlib.sha256()
    for source in fleet.sources(spec):
        for batch in source.batches:
            digest.update(batch.payload)
    return digest.hexdigest()


def test_another_seed_gives_other_bytes_and_lazy_batches_are_the_same() -> None:
    spec = presets.test_fleets()["thrash"]
    assert payloads(spec) == payloads(spec)
    assert payloads(spec) != payloads(replace(spec, seed=spec.seed + 1))
    for eager, lazy in zip(fleet.sources(spec), fleet.sources(spec, lazy=True), strict=True):
        assert list(lazy.batches) == list(eager.batches)
        assert lazy.batches_per_life() is None
        assert sum(eager.batches_per_life() or ()) == len(list(eager.batches))


def test_a_rank_does_not_depend_on_the_others() -> None:
    spec = presets.test_fleets()["flush-and-restart"]
    plans = fleet.plan(spec)
    backwards = {(rank.instance.name, rank.dp_rank): list(rank) for rank in reversed(plans)}
    for source in fleet.sources(spec):
        assert backwards[source.instance_id, source.dp_rank] == source.batches


def test_chats_grow_and_system_prompts_are_shared() -> None:
    spec = WorkloadSpec("chat", rate=5.0, mix=(("chat", 1.0),), system_prompts=2, fanout=0.0)
    made = requests(spec, 3, 20 * SECOND)
    assert [one.arrival_us for one in made] == sorted(one.arrival_us for one in made)
    assert all(one.arrival_us < 20 * SECOND for one in made)
    whole = [one.tokens().tolist() for one in made]
    for one, everything in zip(made, whole, strict=True):
        assert len(everything) == one.prompt_tokens + one.output_tokens
    # Of those with an earlier turn, the prompt begins with the whole of that turn, answer included.
    follow = sum(any(later[: len(earlier)] == earlier for later in whole[index + 1 :]) for index, earlier in enumerate(whole))
    assert follow > len(whole) / 3
    assert len({tuple(everything[:128]) for everything in whole}) == 2
    other = requests(replace(spec, name="elsewhere", system_prompts=1), 3, 20 * SECOND)
    assert {tuple(one.tokens()[:128]) for one in other} < {tuple(everything[:128]) for everything in whole}


def test_salts_adapters_and_double_requests_appear() -> None:
    spec = WorkloadSpec("w", rate=20.0, salts=3, salted=0.5, adapters=("x", "y"), fanout=0.5, mix=(("unique", 1.0),))
    made = requests(spec, 1, 20 * SECOND)
    assert {one.salt for one in made} == {None, "tenant-0", "tenant-1", "tenant-2"}
    assert {one.adapter for one in made} == {None, (1, "x"), (2, "y")}
    assert len({id(one) for one in made}) < len(made)


@pytest.mark.parametrize("routing", ["round-robin", "random", "prefix"])
def test_routing(routing: Any) -> None:
    instances = tuple(InstanceSpec(f"i{number}", "w", dp_size=2) for number in range(2))
    spec = FleetSpec(instances, (WorkloadSpec("w", rate=30.0, system_prompts=8),), 20.0, 5, routing)
    received = [rank._received for rank in fleet.plan(spec)]
    total = sum(len(part) for part in received)
    assert total == len(requests(spec.workloads[0], 5, 20 * SECOND))
    homes: dict[bytes, set[int]] = {}
    for index, part in enumerate(received):
        for one in part:
            homes.setdefault(one.route_key, set()).add(index)
    if routing == "prefix":
        assert all(len(places) == 1 for places in homes.values())
        assert len(set.union(*homes.values())) > 1
    else:
        assert max(len(places) for places in homes.values()) == 4
    if routing == "round-robin":
        assert max(len(part) for part in received) - min(len(part) for part in received) <= 1


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"instances": ()}, "at least one instance"),
        ({"duration_s": 0.0}, "above 0 seconds"),
        ({"routing": "sticky"}, "unknown routing 'sticky'"),
        ({"workloads": (WorkloadSpec("lost"),)}, "no instance serves workload 'lost'"),
        ({"instances": (InstanceSpec("a", "w"), InstanceSpec("a", "w"))}, "two instances of one name"),
        ({"instances": (InstanceSpec("a", "w", dp_size=0),)}, "dp_size"),
        ({"instances": (InstanceSpec("a", "w", EngineSpec(block_size=0)),)}, "block_size must be at least 1"),
        ({"instances": (InstanceSpec("a", "w", EngineSpec(max_running=99, max_batched_tokens=9)),)}, "max_running"),
        ({"workloads": (WorkloadSpec("w", rate=0),)}, "rate must be above 0"),
        ({"workloads": (WorkloadSpec("w", mix=()),)}, "mix"),
        ({"workloads": (WorkloadSpec("w", system_prompts=0),)}, "system prompt"),
        ({"workloads": (WorkloadSpec("w", turns=(3, 2)),)}, "least <= most"),
    ],
)
def test_an_impossible_fleet_is_refused_with_its_reason(change: dict[str, Any], complaint: str) -> None:
    possible = FleetSpec((InstanceSpec("a", "w"),), (WorkloadSpec("w"),), 1.0)
    with pytest.raises(KvcensusError, match=complaint):
        fleet.plan(replace(possible, **change))


def inputs(spec: FleetSpec) -> list[oracle.RankInput]:
    return [
        oracle.RankInput(
            source.instance_id,
            source.dp_rank,
            [(batch.seq, batch.payload) for batch in source.batches],
            source.declaration.reuse_reporting,
            source.declaration.removals,
            source.declaration.workload,
            source.declaration.model,
        )
        for source in fleet.sources(spec)
    ]


def test_no_figure_of_the_demo_fleet_is_zero() -> None:
    spec = presets.demo_fleet()
    assert any(instance.dp_size == 2 for instance in spec.instances)
    assert len({instance.workload for instance in spec.instances}) == 2
    figures = oracle.figures(inputs(spec))
    for cause in ("evicted", "cleared", "restarted", "concurrent"):
        assert figures["repeat_compute"][cause]["tokens"] > 500, cause
    for part in ("inside_instances", "between_instances"):
        assert figures["duplicate_footprint"][part]["extra_tokens"]["max"] > 1000, part


@pytest.mark.parametrize("name", presets.test_fleets())
def test_the_fleets_for_comparison_are_what_they_say(name: str) -> None:
    spec = presets.test_fleets()[name]
    assert 4 <= spec.ranks <= 16
    plans = fleet.plan(spec)
    batches = {rank: list(rank) for rank in plans}
    assert all(batches.values())
    assert 2_000 <= sum(rank.stats.stored_blocks + rank.stats.removed_blocks for rank in plans) <= 30_000
    for instance in spec.instances:
        stats = [rank.stats for rank in plans if rank.instance is instance]
        assert all(one.restarts == len(instance.restart_at_s) for one in stats)
        assert not instance.flush_at_s or any(one.flushes for one in stats)


def trace_line(at_ms: float, length: int, ids: list[int], output: int = 4) -> str:
    return json.dumps({"timestamp": at_ms, "input_length": length, "output_length": output, "hash_ids": ids}) + "\n"


def test_equal_hash_ids_of_a_trace_are_equal_prefixes(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(trace_line(0, 1000, [1, 2]) + trace_line(10, 1100, [1, 3, 4], 0) + trace_line(20, 600, [5, 2]))
    one, two, three = read_trace(path)
    assert (one.prompt_tokens, one.output_tokens, two.output_tokens) == (1000, 4, 1)
    whole = [request.tokens() for request in (one, two, three)]
    assert [len(tokens) for tokens in whole] == [1004, 1101, 604]
    assert whole[0][:TOKENS_PER_HASH] == whole[1][:TOKENS_PER_HASH]
    assert whole[0][TOKENS_PER_HASH:600] == whole[2][TOKENS_PER_HASH:600]
    assert whole[0][TOKENS_PER_HASH:600] != whole[1][TOKENS_PER_HASH:600]
    assert [request.arrival_us for request in (one, two, three)] == [0, 10_000, 20_000]
    assert two.tokens() == whole[1]


def test_a_trace_can_be_cut_by_window_and_by_number(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl.gz"
    with gzip.open(path, "wt") as out:
        out.writelines(trace_line(second * 1000, 10, [second]) for second in range(10))
    assert [one.arrival_us for one in read_trace(path, from_s=3, until_s=6)] == [0, SECOND, 2 * SECOND]
    assert len(list(read_trace(path, limit=4))) == 4


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("{}\n", "line 1: not a request"),
        (trace_line(0, 10, [1]) + "no json\n", "line 2: not a request"),
        (trace_line(5, 10, [1]) + trace_line(4, 10, [1]), "line 2: .*sort the trace"),
        (trace_line(0, 600, [1]), "line 1: 1 hash ids don't cover 600 tokens"),
    ],
)
def test_what_is_no_trace_is_refused_with_its_line(tmp_path: Path, content: str, complaint: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(content)
    with pytest.raises(KvcensusError, match=complaint):
        list(read_trace(path))


def test_a_trace_that_is_missing_or_cut_short_is_refused(tmp_path: Path) -> None:
    with pytest.raises(KvcensusError, match="no such trace"):
        list(read_trace(tmp_path / "nothing.jsonl"))
    path = tmp_path / "cut.jsonl.gz"
    path.write_bytes(gzip.compress(trace_line(0, 10, [1]).encode() * 2000)[:-60])
    with pytest.raises(KvcensusError, match="can't be read"):
        list(read_trace(path))


def test_the_recorded_trace_runs_and_hits_its_shared_prefixes() -> None:
    path = shared_path("traces/mooncake-conversation.jsonl.gz")
    sent = list(read_trace(path, limit=40))
    engine = EngineSpec(pool_blocks=12_000, max_batched_tokens=8192, prefill_chunk=2048)
    spec = FleetSpec(tuple(InstanceSpec(f"i{n}", "trace", engine) for n in range(2)), (), 120.0, routing="prefix")
    plans = fleet.plan(spec, {"trace": sent})
    for rank in plans:
        naive = Naive(engine.pool_blocks)
        for batch in rank:
            for event in wire.decode(batch.payload).events:
                naive.apply(event)
    assert sum(rank.stats.finished for rank in plans) == 40
    assert sum(rank.stats.hit_tokens for rank in plans) > 0
