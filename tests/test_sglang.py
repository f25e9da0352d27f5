"""SGLang's stream: its encodings, and salts that its hashes may not cover."""

from __future__ import annotations

import hashlib
import random
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from producers.identity import EXTRA_KEY_CONTEXT, Identity, IdentityKey, Pseudonym, encode_value
from producers.resolver import RankResolver
from producers.stream import RankStream
from producers.wire import Cleared, Removed, Stored, WireError, decode
from schemas.records import ID_BYTES, NO_ID, Batch, Declaration, EngineProfile, Op
from sql.figures import assemble
from sql.totals import totals_from_records
from streams.offline import OfflineFleet

KEY = IdentityKey(bytes(range(32)), bytes(32))
TS = 1796022527.5


def resolver(profile: EngineProfile = "sglang", max_blocks: int = 1000) -> RankResolver:
    return RankResolver(Identity(KEY, "m"), KEY, max_blocks, profile=profile)


def pack(*events: Any) -> bytes:
    return msgspec.msgpack.encode([TS, list(events), 0])


def one(event: Any) -> Any:
    (only,) = decode(pack(event), profile="sglang").events
    return only


def resolve(target: RankResolver, *events: Any, profile: EngineProfile = "sglang") -> Batch:
    return target.resolve(decode(pack(*events), profile=profile))


def ids(packed: bytes) -> list[bytes]:
    return [packed[at : at + ID_BYTES] for at in range(0, len(packed), ID_BYTES)]


def contents(batch: Batch) -> list[bytes]:
    return [content for op in batch.ops for content in ids(op.content_ids or bytes(len(op.block_ids)))]


# -- the wire


BASE = ["BlockStored", [-2, 5], -1, [1, 2], 1, None, "GPU"]
STORED = Stored(block_hashes=[2**64 - 2, 5], parent_block_hash=2**64 - 1, token_ids=[1, 2], block_size=1, medium="GPU")
BOTH = {"cache_salt": "tenant", "session_id": "s"}


@pytest.mark.parametrize(
    ("tail", "more"),
    [
        ([], {}),
        ([None], {}),
        ([{"cache_salt": "tenant"}], {"cache_salt": "tenant"}),
        ([BOTH], BOTH),
        ([{"session_id": "s", "new": 1}], {"session_id": "s"}),
        (["full"], {"group_idx": 0, "spec_kind": "full_attention"}),
        (["swa", BOTH], {"group_idx": 1, "spec_kind": "sliding_window", **BOTH}),
        ([BOTH, "ComponentType.SWA"], {"group_idx": 1, "spec_kind": "sliding_window", **BOTH}),
        (["mamba"], {"group_idx": 2, "spec_kind": "mamba", "token_ids": None}),
        (["c4"], {"group_idx": 3, "spec_kind": "c4"}),
        ([None, None, "later"], {}),
    ],
)
def test_an_array_with_what_follows_the_medium(tail: list[Any], more: dict[str, Any]) -> None:
    assert one(BASE + tail) == msgspec.structs.replace(STORED, **more)


def test_arrays_of_the_first_releases() -> None:
    assert one(BASE[:6]) == msgspec.structs.replace(STORED, medium=None)
    assert one(BASE[:5]) == msgspec.structs.replace(STORED, medium=None)
    assert one(["BlockRemoved", [-1]]) == Removed(block_hashes=[2**64 - 1])
    assert one(["BlockRemoved", [-1, 3], "CPU_PINNED"]) == Removed(block_hashes=[2**64 - 1, 3], medium="CPU_PINNED")
    assert one(["BlockRemoved", [3], "GPU", "swa"]) == Removed(block_hashes=[3], medium="GPU", group_idx=1)
    assert one(["AllBlocksCleared"]) == Cleared()


def test_maps() -> None:
    names = ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium")
    event = {"type": "BlockStored", **dict(zip(names, BASE[1:], strict=True))}
    assert one(event) == STORED
    assert one({**event, **BOTH, "new": []}) == msgspec.structs.replace(STORED, **BOTH)
    assert one({**event, "component_type": "swa"}) == msgspec.structs.replace(STORED, group_idx=1, spec_kind="sliding_window")
    shared: dict[str, Any] = {
        "extra_keys": [["tenant"], None],
        "lora_name": "ad",
        "group_idx": 4,
        "locality": "REMOTE",
        "ownership": "o",
        "reused": True,
    }
    window = {"kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": 64}
    expected = msgspec.structs.replace(STORED, **shared, spec_kind="sliding_window", spec_sliding_window=64)
    assert one({**event, **shared, **window, "component_type": "full"}) == expected
    assert one({"type": "BlockRemoved", "block_hashes": [-1], "medium": "GPU"}) == Removed(block_hashes=[2**64 - 1], medium="GPU")
    removed: dict[str, Any] = {"group_idx": 4, "locality": "REMOTE", "ownership": "o"}
    assert one({"type": "BlockRemoved", "block_hashes": [1], "component_type": "swa", **removed}) == Removed(block_hashes=[1], **removed)
    assert one({"type": "AllBlocksCleared"}) == Cleared()


@pytest.mark.parametrize("event", [BASE, [*BASE, BOTH], {"type": "BlockStored", "block_hashes": [-1], "block_size": 1, **BOTH}])
def test_the_slow_way_gives_what_the_fast_way_gives(event: Any) -> None:
    batch = decode(pack(event, {"type": "Unheard"}), profile="sglang")
    assert batch.unknown_events == 1
    assert batch.events == [one(event)]


def test_pairs_in_place_of_tokens_are_no_tokens() -> None:
    """With speculative decoding a page's tokens come as pairs."""
    assert one([*BASE[:3], [[1, 2], [2, 3]], *BASE[4:]]).token_ids is None


@pytest.mark.parametrize(
    "event", [["BlockStored", ["x"], None, [1], 1], ["BlockStored", [1]], {"type": "BlockStored", "block_hashes": [1]}]
)
def test_what_cannot_be_read_refuses(event: Any) -> None:
    with pytest.raises(WireError):
        one(event)


def test_the_metadata_is_no_adapters_name_by_the_other_profile() -> None:
    with pytest.raises(WireError):
        decode(pack([*BASE, BOTH]))


# -- salts


class Engine:
    """Publishes prompts as SGLang does, a page at a time. ``covered``: its hashes cover the salt, as in newer releases."""

    def __init__(self, size: int, covered: bool, maps: bool) -> None:
        self.size, self.covered, self.maps = size, covered, maps

    def hashes(self, pages: list[int], salt: str | None) -> list[int]:
        digest = hashlib.sha256((salt or "").encode() if self.covered else b"")
        out = []
        for page in pages:
            digest.update(page.to_bytes(4, "little"))
            out.append(int.from_bytes(digest.digest()[:8], "big", signed=True))
        return out

    def store(self, pages: list[int], salt: str | None, start: int = 0) -> Any:
        hashes = self.hashes(pages, salt)
        tokens = [page * 1000 + position for page in pages[start:] for position in range(self.size)]
        parent = hashes[start - 1] if start else None
        if self.maps:
            event: dict[str, Any] = {
                "type": "BlockStored",
                "block_hashes": hashes[start:],
                "parent_block_hash": parent,
                "token_ids": tokens,
            }
            return {**event, "block_size": self.size, "lora_id": None, "medium": "GPU", **({"cache_salt": salt} if salt else {})}
        return ["BlockStored", hashes[start:], parent, tokens, self.size, None, "GPU", *([{"cache_salt": salt}] if salt else [])]

    def remove(self, pages: list[int], salt: str | None) -> Any:
        hashes = self.hashes(pages, salt)
        return {"type": "BlockRemoved", "block_hashes": hashes, "medium": "GPU"} if self.maps else ["BlockRemoved", hashes, "GPU"]


ENGINES = [Engine(size, covered, maps) for size in (1, 4) for covered in (False, True) for maps in (False, True)]


@pytest.mark.parametrize("engine", ENGINES, ids=lambda e: f"{e.size}-{e.covered}-{e.maps}")
def test_two_salts_are_never_one_content_and_never_one_block(engine: Engine) -> None:
    target = resolver()
    batches = {salt: resolve(target, engine.store([1, 2, 3], salt)) for salt in (None, "a", "b", "")}
    plain, first, second, empty = (contents(batch) for batch in batches.values())
    assert plain == empty
    assert len({*plain, *first, *second}) == 9
    assert NO_ID not in plain + first + second
    blocks = [ids(batch.ops[0].block_ids) for batch in batches.values()]
    assert len({*blocks[0], *blocks[1], *blocks[2]}) == 9
    assert blocks[3] == blocks[0]
    for salt, known in (("a", first), (None, plain), ("b", second)):
        (op,) = resolve(target, engine.store([1, 2, 3, 4], salt, start=3)).ops
        assert (op.parent_state, op.parent_content_id) == ("CONTENT", known[2])
    assert target.counters.identity_conflicts == target.counters.shared_contents == target.counters.unresolved_blocks == 0


def test_a_removal_means_the_hash_under_every_salt_it_was_stored_under() -> None:
    engine = Engine(4, covered=False, maps=False)
    target = resolver()
    first, second = (ids(resolve(target, engine.store([1, 2], salt)).ops[0].block_ids) for salt in ("a", "b"))
    (op,) = resolve(target, engine.remove([1], None)).ops
    assert sorted(ids(op.block_ids)) == sorted([first[0], second[0]])
    plain = ids(resolve(target, engine.store([1, 2], None)).ops[0].block_ids)
    (op,) = resolve(target, engine.remove([1, 2], None)).ops
    assert sorted(ids(op.block_ids)[:3]) == sorted([first[0], second[0], plain[0]])
    assert sorted(ids(op.block_ids)[3:]) == sorted([first[1], second[1], plain[1]])
    target.new_life()
    (op,) = resolve(target, engine.remove([1], None)).ops
    assert ids(op.block_ids) == [plain[0]]


def test_a_removal_means_one_block_where_the_hash_covers_the_salt() -> None:
    engine = Engine(4, covered=True, maps=True)
    target = resolver()
    stored = {salt: resolve(target, engine.store([1, 2], salt)).ops[0].block_ids for salt in ("a", "b", None)}
    for salt, blocks in stored.items():
        assert resolve(target, engine.remove([1, 2], salt)).ops[0].block_ids == blocks


def test_what_is_forgotten_is_no_longer_meant() -> None:
    engine = Engine(4, covered=False, maps=False)
    target = resolver(max_blocks=2)
    for salt in ("a", "b", "c"):
        resolve(target, engine.store([1], salt))
    (op,) = resolve(target, engine.remove([1], None)).ops
    assert len(ids(op.block_ids)) == 2


def test_a_salt_leaves_as_a_pseudonym_at_the_root() -> None:
    engine = Engine(4, covered=False, maps=True)
    target = resolver()
    (op,) = resolve(target, {**engine.store([1, 2], "tenant"), "session_id": "s-1"}).ops
    assert op.extra_keys == [Pseudonym(KEY, EXTRA_KEY_CONTEXT)(encode_value("tenant")), b""]
    assert op.session_id == Pseudonym(KEY, b"kvcensus:session:v1")(encode_value("s-1"))
    (op,) = resolve(target, engine.store([1, 2, 3], "tenant", start=2)).ops
    assert op.extra_keys == []


def test_a_salt_counts_whether_or_not_it_is_among_the_extra_keys() -> None:
    event = Engine(4, covered=False, maps=True).store([1, 2], "tenant")
    said: list[Any] = [None, [], [["tenant"], None], ["tenant", None]]
    found = [contents(resolve(resolver(), {**event, "extra_keys": keys})) for keys in said]
    assert found == [found[0]] * 4
    more = contents(resolve(resolver(), {**event, "extra_keys": [["image"], None]}))
    image = contents(resolve(resolver(), {**event, "cache_salt": None, "extra_keys": [["image"], None]}))
    assert len({*found[0], *more, *image}) == 6


def test_a_salt_that_has_no_encoding_has_no_content() -> None:
    engine = Engine(4, covered=False, maps=True)
    batch = resolve(resolver(), {**engine.store([1, 2], None), "cache_salt": msgspec.msgpack.Ext(5, b"?")})
    assert (batch.unresolved_blocks, batch.ops[0].content_ids, batch.ops[0].extra_keys) == (2, b"", [])


def test_a_hash_that_stands_for_two_contents_is_believed_for_neither() -> None:
    """Salts that the events do not name at all, or the first releases' hashes, which cover a page without what is before it."""
    target = resolver()
    store = ["BlockStored", [7], None, [1], 1, None, "GPU"]
    (first,) = contents(resolve(target, store))
    batch = resolve(target, ["BlockStored", [8, 7], None, [2, 1], 1, None, "GPU"])
    assert contents(batch)[1] == NO_ID
    assert contents(batch)[0] not in (NO_ID, first)
    assert (batch.unresolved_blocks, target.counters.identity_conflicts) == (1, 1)
    for event in (store, ["BlockStored", [9], 7, [3], 1, None, "GPU"]):
        assert contents(resolve(target, event)) == [NO_ID]
    assert target.counters.identity_conflicts == 1
    assert (7, 1, NO_ID, 0) in target.entries()


# -- one content, whichever engine


@given(
    st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=5), min_size=1, max_size=4),
    st.sampled_from([None, "a", "b"]),
    st.sampled_from(ENGINES),
    st.integers(),
)
def test_equal_content_is_equal_by_either_profile(prompts: list[list[int]], salt: str | None, engine: Engine, seed: int) -> None:
    cuts = random.Random(seed)
    ours, theirs = resolver("vllm"), resolver("sglang")
    for pages in prompts:
        tokens = [page * 1000 + position for page in pages for position in range(engine.size)]
        theirs_hashes = [
            int.from_bytes(hashlib.sha256(repr((salt, pages[: at + 1])).encode()).digest()[:8], "big") for at in range(len(pages))
        ]
        whole = {"type": "BlockStored", "block_hashes": theirs_hashes, "parent_block_hash": None, "token_ids": tokens}
        keys = [[salt] if at == 0 and salt else None for at in range(len(pages))]
        expected = contents(resolve(ours, {**whole, "block_size": engine.size, "extra_keys": keys}, profile="vllm"))
        cut = cuts.randint(0, len(pages))
        runs = [engine.store(pages[:cut], salt)] * bool(cut) + [engine.store(pages, salt, start=cut)] * (cut < len(pages))
        assert contents(resolve(theirs, *runs)) == expected
        assert NO_ID not in expected


def test_profiles_differ_in_nothing_else() -> None:
    event = {
        "type": "BlockStored",
        "block_hashes": [1, 2],
        "parent_block_hash": None,
        "token_ids": [1, 2],
        "block_size": 1,
        "medium": "GPU",
    }
    assert resolve(resolver("sglang"), event).ops == resolve(resolver("vllm"), event, profile="vllm").ops
    assert isinstance(resolve(resolver("sglang"), event).ops[0], Op)


# -- counted


def figures_of(*ranks: tuple[str, EngineProfile, list[list[Any]]]) -> dict[str, Any]:
    """The figures of ranks (instance, profile, batches of events one second apart)."""
    offline = OfflineFleet(window_us=10_000_000, shards=2)
    streams = []
    for instance, profile, batches in ranks:
        declared = Declaration("none", "per_copy", model="m", engine_profile=profile)
        stream = RankStream(instance, 0, resolver(profile), declared, "x", profile=profile)
        streams.append((stream, batches))
        for message in stream.start(0):
            offline.apply(message)
    for seq in range(max(len(batches) for _, batches in streams)):
        for stream, batches in streams:
            events = batches[seq] if seq < len(batches) else []
            for message in stream.feed(seq, msgspec.msgpack.encode([1_700_000_000.0 + seq, events, 0]), 0):
                offline.apply(message)
    rows = offline.drain()
    return assemble(totals_from_records(rows.rank_windows, rows.duplicate_windows))


def extra_blocks(document: dict[str, Any]) -> Any:
    return document["duplicate_footprint"]["between_instances"]["extra_blocks"]["max"]


def test_salts_are_no_duplicates_of_each_other_and_equal_ones_are_over_engines() -> None:
    engine = Engine(4, covered=False, maps=False)

    def sglang(instance: str, salt: str | None) -> tuple[str, EngineProfile, list[list[Any]]]:
        return instance, "sglang", [[engine.store([1, 2], salt)], [], [], []]

    tokens = [page * 1000 + position for page in (1, 2) for position in range(4)]
    event = {
        "type": "BlockStored",
        "block_hashes": [1, 2],
        "parent_block_hash": None,
        "token_ids": tokens,
        "block_size": 4,
        "medium": "GPU",
    }
    vllm: tuple[str, EngineProfile, list[list[Any]]] = ("v", "vllm", [[{**event, "extra_keys": [["x"], None]}], [], [], []])
    assert extra_blocks(figures_of(sglang("a", "x"), sglang("b", "y"), sglang("c", None))) == 0
    assert extra_blocks(figures_of(sglang("a", "x"), sglang("b", "x"))) == 2
    assert extra_blocks(figures_of(sglang("a", "x"), sglang("b", "y"), vllm)) == 2


def test_a_removal_under_one_of_two_salts_only_understates() -> None:
    engine = Engine(4, covered=False, maps=False)
    both = [[engine.store([1], "x"), engine.store([1], "y")], []]
    removed = [[engine.remove([1], "x")], [], [engine.remove([1], "y")], []]
    held = figures_of(("a", "sglang", both))["ranks"][0]
    assert held["resident_blocks"] == 2
    gone = figures_of(("a", "sglang", [*both, *removed]))
    assert gone["ranks"][0]["resident_blocks"] == 0
    assert gone["ranks"][0]["unjoined_evicts"] == 2
    assert gone["repeat_compute"]["concurrent"]["blocks"] == 0
    again = figures_of(("a", "sglang", [*both, *removed, [engine.store([1], "x")], []]))
    assert again["repeat_compute"]["evicted"]["blocks"] == 1
