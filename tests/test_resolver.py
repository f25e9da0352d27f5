"""Runs to blocks: chains, unknown parents, borrowing, retries within a batch, bounds and lives."""

from __future__ import annotations

import hashlib
import random
import struct
from collections import defaultdict
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from producers import capture
from producers.identity import (
    EXTRA_KEY_CONTEXT,
    SESSION_CONTEXT,
    Identity,
    IdentityKey,
    Pseudonym,
    encode_extra,
    encode_value,
    pack_tokens,
)
from producers.resolver import RankResolver
from producers.wire import Cleared, Event, Removed, Stored, WireBatch, decode
from schemas import codec
from schemas.records import ID_BYTES, NO_ID, Batch, Op, RankMessage
from tests.secret_forms import secret_forms
from tests.shared_data import CAPTURE_NAMES, capture_path

KEY = IdentityKey(bytes(range(32)), bytes(32))
PSEUDONYM = Pseudonym(KEY)
SIZE = 4


def resolver(model: str | None = "m", max_blocks: int = 1000) -> RankResolver:
    return RankResolver(Identity(KEY, model), KEY, max_blocks)


def tokens_of(*blocks: int, size: int = SIZE) -> list[int]:
    """Tokens of blocks told apart by one number each."""
    return [block * 1000 + position for block in blocks for position in range(size)]


def stored(hashes: list[Any], tokens: list[int] | None, parent: Any = None, size: int = SIZE, **more: Any) -> Stored:
    return Stored(block_hashes=hashes, block_size=size, parent_block_hash=parent, token_ids=tokens, **more)


def resolve(target: RankResolver, *events: Event, unknown: int = 0) -> Batch:
    return target.resolve(WireBatch(1, list(events), 0, unknown))


def ids(packed: bytes) -> list[bytes]:
    return [packed[at : at + ID_BYTES] for at in range(0, len(packed), ID_BYTES)]


def expected_chain(*blocks: int, model: str | None = "m", adapter: str | None = None, salt: str | None = None) -> list[bytes]:
    """Content ids of a prompt, one block at a time from its root; a salt sits in the first block's extra keys."""
    identity, parent, out = Identity(KEY, model), None, []
    for position, block in enumerate(blocks):
        extra = encode_extra([salt]) if salt and position == 0 else b""
        parent = identity.content_id(parent, pack_tokens(tokens_of(block)), extra, adapter, SIZE)
        out.append(parent)
    return out


# -- chains


def test_a_prompt_from_its_root() -> None:
    batch = resolve(resolver(), stored([11, 12, 13], tokens_of(1, 2, 3), spec_kind="full_attention", lora_name=None))
    assert batch == Batch(
        [
            Op(
                "STORE",
                0,
                None,
                None,
                SIZE,
                b"".join(PSEUDONYM(block_hash) for block_hash in (11, 12, 13)),
                b"".join(expected_chain(1, 2, 3)),
                "ROOT",
                None,
                "full_attention",
            )
        ]
    )


def test_a_run_goes_on_from_a_known_parent() -> None:
    target = resolver()
    resolve(target, stored([11, 12], tokens_of(1, 2)))
    (op,) = resolve(target, stored([13], tokens_of(3), parent=12)).ops
    chain = expected_chain(1, 2, 3)
    assert (op.parent_state, op.parent_content_id, op.content_ids) == ("CONTENT", chain[1], chain[2])


def test_an_unknown_parent_is_not_a_root() -> None:
    target = resolver()
    batch = resolve(target, stored([12, 13], tokens_of(1, 2), parent=11))
    (op,) = batch.ops
    assert (op.parent_state, op.parent_content_id, op.content_ids) == ("UNKNOWN", None, b"")
    assert ids(op.block_ids) == [PSEUDONYM(12), PSEUDONYM(13)]
    assert batch.unresolved_blocks == target.counters.unresolved_blocks == 2
    (child,) = resolve(target, stored([14], tokens_of(3), parent=13)).ops
    assert child.content_ids == b""  # a child of an unresolved block is no better known


def test_a_parent_known_at_another_block_size_is_unknown() -> None:
    target = resolver()
    resolve(target, stored([11], tokens_of(1)))
    (op,) = resolve(target, stored([12], tokens_of(2, size=8), parent=11, size=8)).ops
    assert (op.parent_state, op.content_ids) == ("UNKNOWN", b"")


# -- borrowing


def test_a_sliding_window_group_borrows_by_hash() -> None:
    """Its hashes are a subset of the span of its tokens, and nothing says which."""
    target = resolver()
    window = stored([12, 13], tokens_of(1, 2, 3), group_idx=1, spec_kind="sliding_window")
    full = stored([11, 12, 13], tokens_of(1, 2, 3), group_idx=0)
    chain = expected_chain(1, 2, 3)
    for batch in (resolve(target, window, full), resolve(target, full, window)):
        ops = {op.group_idx: op for op in batch.ops}
        assert [op.group_idx for op in batch.ops] in ([1, 0], [0, 1])
        assert ids(ops[1].content_ids) == chain[1:]
        assert (ops[1].parent_state, ops[1].parent_content_id) == ("UNKNOWN", None)
        assert ids(ops[0].content_ids) == chain
        assert batch.unresolved_blocks == 0


def test_a_block_size_that_differs_is_not_borrowed() -> None:
    target = resolver()
    resolve(target, stored([11], tokens_of(1)))
    batch = resolve(target, stored([11], None, size=8))
    assert (batch.ops[0].content_ids, batch.ops[0].block_size, batch.unresolved_blocks) == (b"", 8, 1)


def test_one_hash_at_two_block_sizes_is_two_contents() -> None:
    """Engines give a large block the hash of the small one that ends at the same token."""
    target = resolver()
    small, large = stored([11, 12], tokens_of(1, 2), group_idx=0), stored([12], tokens_of(5, size=8), size=8, group_idx=1)
    first = resolve(target, small, large)
    again = resolve(target, stored([12], None, group_idx=0), stored([12], None, size=8, group_idx=1))
    assert ids(first.ops[0].content_ids)[1] == again.ops[0].content_ids
    assert first.ops[1].content_ids == again.ops[1].content_ids != again.ops[0].content_ids
    (child,) = resolve(target, stored([13], tokens_of(6, size=8), parent=12, size=8)).ops
    assert child.parent_content_id == first.ops[1].content_ids
    (vague,) = resolve(target, stored([12], None, size=0)).ops
    assert (vague.block_size, vague.content_ids) == (0, b"")  # either of the two
    assert len(target) == 4
    assert target.counters.identity_conflicts == 0


def test_a_placeholder_takes_the_known_size_and_is_split_where_sizes_differ() -> None:
    target = resolver()
    resolve(target, stored([11, 12], tokens_of(1, 2)), stored([21], tokens_of(7, size=8), size=8))
    resolve(target, stored([31], tokens_of(9), parent=99))  # its size is known, its content is not
    batch = resolve(target, stored([11, 12, 31, 21, 77, 12], None, size=0, medium="cpu"))
    chain = expected_chain(1, 2)
    assert [
        (op.block_size, [PSEUDONYM(h) for h in hashes]) for op, hashes in zip(batch.ops, ([11, 12, 31], [21], [77], [12]), strict=True)
    ] == [(op.block_size, ids(op.block_ids)) for op in batch.ops]
    assert [op.block_size for op in batch.ops] == [4, 8, 0, 4]
    assert ids(batch.ops[0].content_ids) == [*chain, NO_ID]
    assert batch.ops[2].content_ids == b""
    assert {(op.tier, op.parent_state) for op in batch.ops} == {("CPU", "UNKNOWN")}
    assert batch.unresolved_blocks == 2


def test_an_unknown_parent_still_borrows_its_own_blocks() -> None:
    target = resolver(max_blocks=2)
    resolve(target, stored([11, 12], tokens_of(1, 2)))
    resolve(target, stored([99], tokens_of(9)))  # pushes 11 out
    (op,) = resolve(target, stored([12, 13], tokens_of(2, 3), parent=11)).ops
    assert op.parent_state == "UNKNOWN"
    assert ids(op.content_ids) == expected_chain(1, 2, 3)[1:]  # 12 is borrowed, and 13 follows it


@pytest.mark.parametrize(
    "event",
    [
        stored([11], None),
        stored([11], []),
        stored([11], tokens_of(1)[:-1]),
        stored([11], [*tokens_of(1)[:-1], -1]),
        stored([11], [*tokens_of(1)[:-1], 2**32]),
        stored([11], tokens_of(1), lora_id=1),
        stored([11], tokens_of(1), extra_keys=[["salt"], None]),
        stored([11], tokens_of(1), extra_keys=[[msgspec.msgpack.Ext(5, b"?")]]),
    ],
    ids=["no tokens", "empty tokens", "too few", "negative", "too large", "nameless adapter", "keys of other blocks", "no encoding"],
)
def test_what_cannot_be_assigned_is_unresolved(event: Stored) -> None:
    batch = resolve(resolver(), event)
    (op,) = batch.ops
    assert (op.parent_state, op.content_ids, batch.unresolved_blocks) == ("UNKNOWN", b"", 1)


def test_a_content_claimed_under_a_known_hash_is_counted_and_the_first_kept() -> None:
    target = resolver()
    resolve(target, stored([11, 12], tokens_of(1, 2)))
    (op,) = resolve(target, stored([11, 12, 13], tokens_of(1, 5, 3))).ops
    assert ids(op.content_ids) == expected_chain(1, 2, 3)
    assert target.counters.identity_conflicts == 1


def test_a_content_under_two_hashes_is_counted() -> None:
    """What an engine that publishes no extra keys does with two salts."""
    target = resolver()
    resolve(target, stored([11, 12], tokens_of(1, 2)), stored([21, 22], tokens_of(1, 2)))
    assert target.counters.shared_contents == 2
    resolve(target, stored([11, 12], tokens_of(1, 2)), stored([21, 22], tokens_of(1, 2)))
    assert target.counters.shared_contents == 2


# -- retries


def test_children_before_parents_resolve_within_the_batch_and_keep_their_order() -> None:
    blocks = list(range(1, 9))
    runs = [stored([10 + b], tokens_of(b), parent=9 + b if b > 1 else None, medium="CPU") for b in blocks]
    for order in (runs, runs[::-1], random.Random(1).sample(runs, len(runs))):
        batch = resolve(resolver(), *order, Removed(block_hashes=[11]))
        chain = dict(zip((PSEUDONYM(10 + b) for b in blocks), expected_chain(*blocks), strict=True))
        assert [op.block_ids for op in batch.ops[:-1]] == [PSEUDONYM(run.block_hashes[0]) for run in order]
        assert all(op.content_ids == chain[op.block_ids] for op in batch.ops[:-1])
        assert [op.parent_state for op in batch.ops[:-1]] == ["CONTENT" if run.parent_block_hash else "ROOT" for run in order]
        assert batch.unresolved_blocks == 0


def test_a_retry_reaches_placeholders_and_windows_that_came_first() -> None:
    events = (
        stored([12], None, size=0, medium="CPU"),
        stored([13, 12], tokens_of(1, 2, 3), group_idx=1),
        stored([13], tokens_of(3), parent=12),
        stored([11, 12], tokens_of(1, 2)),
    )
    chain = expected_chain(1, 2, 3)
    batch = resolve(resolver(), *events)
    assert [ids(op.content_ids) for op in batch.ops] == [[chain[1]], [chain[2], chain[1]], [chain[2]], chain[:2]]
    assert [op.block_size for op in batch.ops] == [SIZE] * 4


def test_a_long_reversed_batch_takes_one_visit_per_block() -> None:
    count = 3000
    runs = [stored([b], [b] * SIZE, parent=b - 1 if b else None) for b in range(count)]
    wide = stored(list(range(count)), None)
    batch = resolve(resolver(max_blocks=count), wide, *runs[::-1])
    assert batch.unresolved_blocks == 0
    assert len(set(ids(batch.ops[0].content_ids))) == count


# -- what else is in a batch


def test_removals_of_one_place_become_one_op_and_order_is_kept() -> None:
    events = (
        Removed(block_hashes=[1], medium="GPU", group_idx=0),
        Removed(block_hashes=[2], medium="GPU"),
        Removed(block_hashes=[3, 4], medium="gpu"),
        Removed(block_hashes=[5], group_idx=1),
        Removed(block_hashes=[6], group_idx=1, medium="CPU"),
        Removed(block_hashes=[7], group_idx=1, medium="CPU", locality="REMOTE"),
        Removed(block_hashes=[]),
        stored([8], tokens_of(8), group_idx=1),
        Removed(block_hashes=[9], group_idx=1, medium="CPU", locality="remote"),
        Removed(block_hashes=[10], group_idx=1, medium="CPU", locality="REMOTE"),
    )
    target = resolver()
    ops = resolve(target, *events).ops
    seen = [(op.kind, op.group_idx, op.tier, op.locality, ids(op.block_ids)) for op in ops]
    assert seen == [
        ("REMOVE", 0, "GPU", None, [PSEUDONYM(h) for h in (1, 2, 3, 4)]),
        ("REMOVE", 1, None, None, [PSEUDONYM(5)]),
        ("REMOVE", 1, "CPU", None, [PSEUDONYM(6)]),
        ("REMOVE", 1, "CPU", "REMOTE", [PSEUDONYM(7)]),
        ("STORE", 1, None, None, [PSEUDONYM(8)]),
        ("REMOVE", 1, "CPU", "REMOTE", [PSEUDONYM(9), PSEUDONYM(10)]),
    ]
    assert (target.counters.blocks_removed, target.counters.blocks_stored) == (9, 1)


def test_a_clear_keeps_what_it_lacks() -> None:
    ops = resolve(resolver(), Cleared(), Cleared(medium="cpu", group_idx=2, locality="LOCAL")).ops
    assert ops == [Op("CLEAR", None, None, None), Op("CLEAR", 2, "CPU", "LOCAL")]


def test_stores_of_no_blocks_are_no_ops() -> None:
    assert resolve(resolver(), stored([], tokens_of(1), parent=5)).ops == []


def test_remote_blocks_are_not_counted_as_unresolved() -> None:
    batch = resolve(resolver(), stored([1], None, locality="remote"), stored([2], None, locality="LOCAL"))
    assert batch.unresolved_blocks == 1
    assert [op.locality for op in batch.ops] == ["REMOTE", "LOCAL"]


def test_marks_and_unknown_events_are_handed_on() -> None:
    target = resolver()
    batch = resolve(target, stored([1], tokens_of(1), reused=True, lora_name="ad"), unknown=3)
    assert batch.ops[0].reused
    assert batch.ops[0].lora_name == "ad"
    assert batch.unknown_events == target.counters.unknown_events == 3


# -- the fields of an op


EXTRA_KEY, SESSION = Pseudonym(KEY, EXTRA_KEY_CONTEXT), Pseudonym(KEY, SESSION_CONTEXT)


def test_an_op_carries_what_the_event_says() -> None:
    event = stored(
        [11, 12],
        tokens_of(1, 2),
        medium="Cpu",
        locality="local",
        ownership="shared",
        group_idx=3,
        spec_kind="sliding_window",
        spec_sliding_window=64,
        lora_id=7,
        lora_name="ad",
        session_id="session-1",
        reused=True,
    )
    (op,) = resolve(resolver(), event).ops
    assert (
        op.tier,
        op.locality,
        op.ownership,
        op.group_idx,
        op.spec_kind,
        op.spec_sliding_window,
        op.lora_id,
        op.lora_name,
        op.reused,
    ) == (
        "CPU",
        "LOCAL",
        "SHARED",
        3,
        "sliding_window",
        64,
        7,
        "ad",
        True,
    )
    assert op.session_id == SESSION(encode_value("session-1"))
    (op,) = resolve(resolver(), Removed(block_hashes=[1], ownership="shared")).ops
    assert (op.tier, op.ownership) == (None, "SHARED")


@pytest.mark.parametrize("medium", [None, ""])
def test_a_medium_that_is_not_named_is_not_guessed(medium: str | None) -> None:
    batch = resolve(resolver(), stored([1], tokens_of(1), medium=medium), Removed(block_hashes=[1], medium=medium), Cleared(medium=medium))
    assert [op.tier for op in batch.ops] == [None] * 3


@pytest.mark.parametrize("lora_id", ["7", 2**63, -(2**64)])
def test_an_adapters_number_that_is_none_is_left_out(lora_id: int | str) -> None:
    assert resolve(resolver(), stored([1], tokens_of(1), lora_id=lora_id, lora_name="ad")).ops[0].lora_id is None


def test_extra_keys_leave_as_pseudonyms_block_by_block() -> None:
    keys = [["ad", "salt", "image"], ["ad"], ["salt"], None]
    (op,) = resolve(resolver(), stored([1, 2, 3, 4], tokens_of(1, 2, 3, 4), extra_keys=keys, lora_name="ad")).ops
    salt, image = EXTRA_KEY(encode_value("salt")), EXTRA_KEY(encode_value("image"))
    assert op.extra_keys == [salt + image, b"", salt, b""]
    nothings: list[Any] = [None, [], [None] * 2, [[], None], [["ad"], ["ad"]]]
    for nothing in nothings:
        (op,) = resolve(resolver(), stored([1, 2], tokens_of(1, 2), extra_keys=nothing, lora_name="ad")).ops
        assert op.extra_keys == []
    (op,) = resolve(resolver(), stored([1, 2], None, extra_keys=[["salt"], None])).ops
    assert op.extra_keys == [salt, b""]  # they can be assigned although tokens are not there
    (op,) = resolve(resolver(), stored([1, 2], tokens_of(1, 2), extra_keys=[["salt"]])).ops
    assert op.extra_keys == []


def test_a_placeholder_that_is_split_keeps_each_blocks_keys() -> None:
    target = resolver()
    resolve(target, stored([1], tokens_of(1)), stored([2], tokens_of(2, size=8), size=8))
    ops = resolve(target, stored([1, 2], None, size=0, extra_keys=[["a"], ["b"]])).ops
    assert [op.extra_keys for op in ops] == [[EXTRA_KEY(encode_value("a"))], [EXTRA_KEY(encode_value("b"))]]


def test_the_parent_is_named_where_the_run_can_be_assigned() -> None:
    target = resolver()
    root, child = resolve(target, stored([11], tokens_of(1)), stored([12], tokens_of(2), parent=11)).ops
    assert (root.parent_state, root.parent_block_id) == ("ROOT", None)
    assert (child.parent_state, child.parent_block_id) == ("CONTENT", PSEUDONYM(11))
    (orphan,) = resolve(target, stored([13], tokens_of(3), parent=99)).ops
    assert (orphan.parent_state, orphan.parent_content_id, orphan.parent_block_id) == ("UNKNOWN", None, PSEUDONYM(99))
    for event in (
        stored([11, 12], tokens_of(1), parent=10),
        stored([11, 12], tokens_of(1, 2, 3)),
        stored([11], None, parent=10),
        stored([11], [], parent=10, size=0),
    ):
        (op,) = resolve(target, event).ops
        assert (op.parent_state, op.parent_content_id, op.parent_block_id) == ("UNKNOWN", None, None)


@pytest.mark.parametrize("name", ["c_reset_salt.frames.jsonl.gz", "f_lora_salt_session.frames.jsonl.gz"])
def test_no_token_salt_or_session_in_any_encoded_byte(name: str) -> None:
    frames = list(capture.read(capture_path(name)))
    target = RankResolver(Identity(KEY, "m"), KEY, collect_learned=True)
    out = []
    for frame in frames:
        batch = target.resolve(decode(frame.payload))
        out.append(codec.encode(RankMessage("i", 0, "l", 1, 1, 1, "x", batch)) + repr(target.take_learned()).encode())
    secrets = {form for form in secret_forms(frames) if len(form) >= 6}
    assert b"sess-1" in secrets
    assert len(secrets) > 100
    everything = b"\n".join(out)
    assert [secret for secret in secrets if secret in everything] == []


# -- lives and bounds


def test_the_bridge_outlives_removal_and_clear_and_ends_with_the_life() -> None:
    target = resolver()
    resolve(target, stored([11], tokens_of(1)), Removed(block_hashes=[11]), Cleared())
    (op,) = resolve(target, stored([12], tokens_of(2), parent=11)).ops
    assert op.parent_state == "CONTENT"
    target.new_life()
    assert len(target) == 0
    (op,) = resolve(target, stored([12], tokens_of(2), parent=11)).ops
    assert op.parent_state == "UNKNOWN"


def test_the_bound_forgets_the_least_recently_stored() -> None:
    target = resolver(max_blocks=3)
    for h in (1, 2, 3):
        resolve(target, stored([h], tokens_of(h)))
    resolve(target, stored([1], tokens_of(1)))  # used again
    resolve(target, stored([4], tokens_of(4), parent=2))  # and 2, as a parent
    assert (len(target), target.counters.bridge_evictions) == (3, 1)
    known = {h: resolve(target, stored([h], None)).ops[0].content_ids != b"" for h in (1, 2, 4)}
    assert known == {1: True, 2: True, 4: True}
    assert resolve(target, stored([3], None)).ops[0].content_ids == b""
    resolve(target, stored([30], tokens_of(3)))  # what was forgotten under one hash is nothing that two hashes share
    assert target.counters.shared_contents == 0


@given(st.lists(st.tuples(st.integers(1, 12), st.sampled_from([4, 8]), st.booleans()), max_size=40), st.integers(1, 6))
def test_the_bridge_never_outgrows_its_bound(steps: list[tuple[int, int, bool]], bound: int) -> None:
    target = resolver(max_blocks=bound)
    entered = 0
    for block, size, with_tokens in steps:
        resolve(target, stored([block], tokens_of(block, size=size) if with_tokens else None, size=size))
        entered += 1
        assert len(target) <= bound
    assert len(target) + target.counters.bridge_evictions <= entered


# -- equal content, equal ids: whatever the engine


PROMPTS = st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=6), min_size=1, max_size=6)


HASHES = {"u64": 8, "i64": 8, "xxhash": 16, "sha256": 32}
"""Kinds of engine hashes and their bytes: integers of either sign, or bytes."""


class Engine:
    """Publishes prompts as an engine does: hashes seeded per process, runs cut anywhere, in maps or arrays."""

    def __init__(self, seed: int, hashes: str, cuts: random.Random, arrays: bool = False, **prompt: Any) -> None:
        self.seed, self.hashes, self.cuts, self.arrays = seed, hashes, cuts, arrays
        self.prompt = prompt
        self.target = resolver(prompt.get("model", "m"))
        self.contents: dict[tuple[int, ...], bytes] = {}

    def hash_of(self, prefix: tuple[int, ...]) -> int | bytes:
        digest = hashlib.sha256(f"{self.seed} {prefix} {self.prompt}".encode()).digest()[: HASHES[self.hashes]]
        return digest if self.hashes not in ("u64", "i64") else int.from_bytes(digest, "big", signed=self.hashes == "i64")

    def event(self, blocks: list[int], start: int, end: int) -> Any:
        salt, adapter, size = (self.prompt.get(name) for name in ("salt", "adapter", "size"))
        names_adapter = adapter and self.hashes == "sha256"  # newer engines repeat the adapter's name among the extra keys
        keys: list[Any] = [([adapter] if names_adapter else []) + ([salt] if salt and at == 0 else []) for at in range(start, end)]
        event = {
            "type": "BlockStored",
            "block_hashes": [self.hash_of(tuple(blocks[: at + 1])) for at in range(start, end)],
            "parent_block_hash": self.hash_of(tuple(blocks[:start])) if start else None,
            "token_ids": tokens_of(*blocks[start:end], size=size or SIZE),
            "block_size": size or SIZE,
            "lora_id": 1 if adapter else None,
            "medium": "GPU",
            "lora_name": adapter,
            "extra_keys": [each or None for each in keys] if any(keys) else None,
        }
        return [*event.values()] if self.arrays else event

    def serve(self, blocks: list[int]) -> None:
        start = 0
        while start < len(blocks):
            end = self.cuts.randint(start + 1, len(blocks))
            payload = msgspec.msgpack.encode([1.0, [self.event(blocks, start, end)], 0])
            (op,) = self.target.resolve(decode(payload)).ops
            for at, content in zip(range(start, end), ids(op.content_ids), strict=True):
                self.contents[tuple(blocks[: at + 1])] = content
            start = end


PROMPTED = st.fixed_dictionaries({}, optional={"salt": st.just("s"), "adapter": st.just("a"), "size": st.sampled_from([1, 16])})


@given(PROMPTS, st.integers(), PROMPTED, st.permutations(sorted(HASHES)), st.lists(st.booleans(), min_size=5, max_size=5))
def test_equal_content_is_equal_across_splits_seeds_hash_kinds_encodings_and_lives(
    prompts: list[list[int]], seed: int, prompt: dict[str, Any], kinds: list[str], arrays: list[bool]
) -> None:
    engines = [Engine(each, kind, random.Random(seed + each), arrays[each], **prompt) for each, kind in enumerate(kinds)]
    for engine in engines:
        for blocks in prompts:
            engine.serve(blocks)
        assert engine.target.counters.unresolved_blocks == 0
        assert engine.target.counters.identity_conflicts == 0
        assert engine.contents == engines[0].contents
    assert len(set(engines[0].contents.values())) == len(engines[0].contents)
    restarted = Engine(99, kinds[1], random.Random(seed + 99), arrays[4], **prompt)
    restarted.target = engines[0].target
    restarted.target.new_life()
    for blocks in prompts:
        restarted.serve(blocks)
    assert restarted.contents == engines[0].contents


@given(PROMPTS, st.integers())
def test_content_that_differs_is_never_equal(prompts: list[list[int]], seed: int) -> None:
    variants: list[dict[str, Any]] = [
        {},
        {"salt": "s"},
        {"salt": "t"},
        {"adapter": "a"},
        {"adapter": "b"},
        {"adapter": "a", "salt": "s"},
        {"adapter": "s"},
        {"model": "other"},
        {"model": None},
        {"size": 8},
        {"size": 1},
    ]
    claimed: dict[bytes, tuple[int, tuple[int, ...]]] = {}
    for number, variant in enumerate(variants):
        engine = Engine(number, sorted(HASHES)[number % 4], random.Random(seed), bool(number % 3), **variant)
        for blocks in prompts:
            engine.serve(blocks)
        for prefix, content in engine.contents.items():
            assert claimed.setdefault(content, (number, prefix)) == (number, prefix)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(0, 5), st.integers(10, 12))
def test_one_token_more_or_another_changes_every_id_from_there_on(blocks: list[int], at: int, other: int) -> None:
    """A block's id covers what is before it, and nothing after."""
    at %= len(blocks)
    one, changed = Engine(1, "u64", random.Random(1)), Engine(1, "u64", random.Random(1))
    one.serve(blocks)
    changed.serve([*blocks[:at], other, *blocks[at + 1 :]])
    first, second = list(one.contents.values()), list(changed.contents.values())
    assert first[:at] == second[:at]
    assert not set(first[at:]) & set(second)


# -- real engines


@pytest.mark.parametrize("name", CAPTURE_NAMES)
def test_real_streams_resolve_without_conflict(name: str) -> None:
    """Also those with full reports, whose announcements start at the root again: equal hash, equal content."""
    for frames in capture.ranks(capture_path(name)).values():
        target = resolver()
        contents: dict[bytes, set[bytes]] = defaultdict(set)
        last = -1
        for frame in frames:
            if frame.seq <= last:
                target.new_life()
                contents.clear()
            last = frame.seq
            wire_batch = decode(frame.payload)
            batch = target.resolve(wire_batch)
            assert codec.decode(codec.encode(RankMessage("i", 0, "l", 1, 1, 1, "x", batch)), RankMessage).batch == batch
            for op in batch.ops:
                if op.kind == "STORE":
                    for block, content in zip(ids(op.block_ids), ids(op.content_ids), strict=True):
                        contents[content].add(block)
            named = [h for event in wire_batch.events if not isinstance(event, Cleared) for h in event.block_hashes]
            assert sum(len(op.block_ids) for op in batch.ops) == len(named) * ID_BYTES
        assert target.counters.unresolved_blocks == 0
        assert target.counters.identity_conflicts == 0
        shared = sum(len(blocks) - 1 for blocks in contents.values())
        assert target.counters.shared_contents == shared
        # Version 0.16 publishes no extra keys: the salted prompts of its capture look like the plain one.
        assert (shared > 0) == (name == "j_v0.16.0_array.frames.jsonl.gz")


def test_equal_prompts_on_engines_of_three_versions_are_equal_content() -> None:
    found: list[set[bytes]] = []
    for name in ("b_pressure.frames.jsonl.gz", "j_v0.16.0_array.frames.jsonl.gz", "j_v0.23.0_array.frames.jsonl.gz"):
        target = resolver()
        found.append(set())
        for frame in capture.read(capture_path(name)):
            for op in target.resolve(decode(frame.payload)).ops:
                found[-1].update(ids(op.content_ids))
    assert len(found[0] & found[1] & found[2]) >= 100


def test_salts_and_adapters_of_one_prompt_are_apart() -> None:
    target = resolver()
    firsts = []
    for frame in list(capture.read(capture_path("f_lora_salt_session.frames.jsonl.gz")))[:6]:
        firsts.append(ids(target.resolve(decode(frame.payload)).ops[0].content_ids))
    plain, adapter_a, adapter_b, adapter_a_salted, salted, salted_again = firsts
    assert salted == salted_again
    assert len({tuple(chain) for chain in (plain, adapter_a, adapter_b, adapter_a_salted, salted)}) == 5
    assert len({content for chain in (plain, adapter_a, adapter_b, adapter_a_salted, salted) for content in chain}) == 20


# -- the retry against a naive fixpoint


@st.composite
def shuffled_batches(draw: st.DrawFn) -> list[list[Stored]]:
    """Stores of a few prompts, cut into runs, out of order, some without tokens, sizes or all of their hashes."""
    events: list[Stored] = []
    for blocks in draw(PROMPTS):
        prefixes = [tuple(blocks[: at + 1]) for at in range(len(blocks))]
        hashes = [int.from_bytes(struct.pack(">6B", *(*prefix, *bytes(6 - len(prefix)))), "big") for prefix in prefixes]
        cuts = sorted(draw(st.sets(st.integers(1, len(blocks) - 1)))) if len(blocks) > 1 else []
        for start, end in zip([0, *cuts], [*cuts, len(blocks)], strict=True):
            shape = draw(st.sampled_from(["whole", "whole", "no tokens", "no size", "window"]))
            run = hashes[start:end]
            tokens = tokens_of(*blocks[start:end]) if shape in ("whole", "window") else None
            if shape == "window":
                run = run[1:]
            if run:
                events.append(stored(run, tokens, hashes[start - 1] if start else None, 0 if shape == "no size" else SIZE))
    events = draw(st.permutations(events))
    cut = draw(st.integers(0, len(events)))
    return [events[:cut], events[cut:]]


def naive(events: list[Stored], known: dict[Any, bytes]) -> list[list[bytes]]:
    """Content ids per event (NO_ID: none): every run again and again, until a pass changes nothing."""
    identity = Identity(KEY, "m")
    found = [[NO_ID] * len(event.block_hashes) for event in events]
    while True:
        before = [list(run) for run in found]
        for event, run in zip(events, found, strict=True):
            whole = event.token_ids is not None and len(event.token_ids) == len(run) * event.block_size
            linked = whole and (event.parent_block_hash is None or event.parent_block_hash in known)
            previous = known.get(event.parent_block_hash)
            for at, block_hash in enumerate(event.block_hashes):
                if block_hash in known:
                    run[at] = known[block_hash]
                elif linked and event.token_ids is not None:
                    tokens = pack_tokens(event.token_ids[at * SIZE : (at + 1) * SIZE])
                    run[at] = known[block_hash] = identity.content_id(previous, tokens, b"", None, SIZE)
                linked = whole and run[at] != NO_ID
                previous = run[at]
        if found == before:
            return found


@given(shuffled_batches())
def test_a_batch_resolves_to_the_fixpoint(batches: list[list[Stored]]) -> None:
    target, known = resolver(), dict[Any, bytes]()
    for events in batches:
        expected = naive(events, known)
        ops = resolve(target, *events).ops
        block_ids = [block for op in ops for block in ids(op.block_ids)]
        contents = [content for op in ops for content in ids(op.content_ids or bytes(len(op.block_ids)))]
        assert block_ids == [PSEUDONYM(block_hash) for event in events for block_hash in event.block_hashes]
        assert contents == [content for run in expected for content in run]
        assert target.counters.identity_conflicts == 0
