"""The wire decoder: every encoding seen in the field, the conformance corpus, and whatever a broken publisher may send."""

from __future__ import annotations

import contextlib
import json
import struct
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from producers import capture, wire
from producers.wire import Cleared, Removed, Stored, WireBatch, WireError, decode
from schemas.records import EngineProfile
from tests.shared_data import CAPTURE_NAMES, capture_path, shared_folder, shared_path

CORPUS = "corpora/inference-events-1.10/vllm-wire"
TOKENS = list(range(100, 164))
TS = 1796022527.4199615


def pack(*batch: Any) -> bytes:
    return msgspec.msgpack.encode(list(batch))


def one(event: Any) -> Any:
    batch = decode(pack(TS, [event], 0))
    assert batch.unknown_events == 0
    (only,) = batch.events
    return only


# -- the two encodings


def test_a_map_carries_every_field() -> None:
    event = {
        "type": "BlockStored",
        "block_hashes": [2**64 - 1, 0],
        "parent_block_hash": 7,
        "token_ids": TOKENS,
        "block_size": 32,
        "lora_id": 1,
        "medium": "cpu",
        "lora_name": "adapter-a",
        "extra_keys": [["adapter-a", "tenant-1"], None],
        "group_idx": 3,
        "kv_cache_spec_kind": "full_attention",
        "kv_cache_spec_sliding_window": 64,
        "locality": "REMOTE",
        "reused": True,
        "ownership": "shared",
        "session_id": "session-1",
        "something_new": {"deep": [1, 2]},
    }
    assert one(event) == Stored(
        block_hashes=[2**64 - 1, 0],
        parent_block_hash=7,
        token_ids=TOKENS,
        block_size=32,
        lora_id=1,
        medium="cpu",
        lora_name="adapter-a",
        extra_keys=[["adapter-a", "tenant-1"], None],
        group_idx=3,
        spec_kind="full_attention",
        spec_sliding_window=64,
        locality="REMOTE",
        ownership="shared",
        session_id="session-1",
        reused=True,
    )


def test_what_a_map_omits_is_none() -> None:
    stored = one({"type": "BlockStored", "block_hashes": [1], "block_size": 16})
    assert (stored.parent_block_hash, stored.token_ids, stored.medium, stored.group_idx, stored.extra_keys) == (None,) * 5
    assert one({"type": "BlockRemoved", "block_hashes": [1]}) == Removed(block_hashes=[1])
    assert one({"type": "AllBlocksCleared"}) == Cleared()


def test_nulls_in_a_map_are_as_omitted() -> None:
    event = {"type": "BlockStored", "block_hashes": [1], "block_size": 16}
    nulls = dict.fromkeys(("parent_block_hash", "token_ids", "medium", "group_idx", "extra_keys", "locality", "reused", "lora_name"))
    assert one({**event, **nulls}) == one(event)


STORED_ARRAY = ["BlockStored", [5, 6], 4, TOKENS, 32, 1, "GPU", "ad", [None, ["salt"]], 2, "mamba", 64, "later", {"fields": 1}]


@pytest.mark.parametrize("length", range(5, 15))
def test_a_stored_array_of_any_age(length: int) -> None:
    expected = Stored(block_hashes=[5, 6], parent_block_hash=4, token_ids=TOKENS, block_size=32)
    for position, name in enumerate(
        ("lora_id", "medium", "lora_name", "extra_keys", "group_idx", "spec_kind", "spec_sliding_window"), start=5
    ):
        if position < length:
            setattr(expected, name, STORED_ARRAY[position])
    assert one(STORED_ARRAY[:length]) == expected


@pytest.mark.parametrize(("length", "medium", "group"), [(2, None, None), (3, "CPU", None), (4, "CPU", 1), (6, "CPU", 1)])
def test_a_removed_array_of_any_age(length: int, medium: str | None, group: int | None) -> None:
    event = ["BlockRemoved", [5], "CPU", 1, "later", 9][:length]
    assert one(event) == Removed(block_hashes=[5], medium=medium, group_idx=group)


def test_a_cleared_array() -> None:
    assert one(["AllBlocksCleared"]) == Cleared()
    assert one(["AllBlocksCleared", "more", "fields"]) == Cleared()


def test_a_clear_keeps_the_scope_it_names() -> None:
    scoped = {"type": "AllBlocksCleared", "medium": "GPU", "group_idx": 0}
    assert one(scoped) == Cleared(medium="GPU", group_idx=0)
    assert one({"type": "TierBlocksCleared", "medium": "CPU"}) == Cleared(medium="CPU")
    for nothing in ({}, {"medium": None}, {"medium": ""}):
        with pytest.raises(WireError, match="TierBlocksCleared without medium"):
            one({"type": "TierBlocksCleared", **nothing})


def test_both_encodings_in_one_batch_keep_their_order() -> None:
    batch = decode(pack(TS, [STORED_ARRAY, {"type": "BlockRemoved", "block_hashes": [1]}, ["AllBlocksCleared"]]))
    assert [type(event) for event in batch.events] == [Stored, Removed, Cleared]


# -- the envelope


@pytest.mark.parametrize(("tail", "rank"), [((), None), ((None,), None), ((0,), 0), ((7,), 7), ((3, "a fourth", [5]), 3)])
def test_the_rank_and_what_follows_it(tail: tuple[Any, ...], rank: int | None) -> None:
    batch = decode(pack(TS, [["AllBlocksCleared"]], *tail))
    assert batch == WireBatch(1796022527419962, [Cleared()], rank)
    assert wire.dp_rank(pack(TS, ["unreadable"], *tail)) == rank


@pytest.mark.parametrize(("ts", "at_us"), [(0, 0), (1.5, 1_500_000), (1785153670, 1785153670_000_000), (TS, 1796022527_419_962)])
def test_engine_time_is_integer_microseconds(ts: float, at_us: int) -> None:
    assert decode(pack(ts, [])).at_us == at_us


@pytest.mark.parametrize("ts", [float("nan"), float("inf"), float("-inf"), -1.0, 2.0**33, 1e300, 2**64 - 1, "now", None, True, [], {}])
def test_a_time_that_is_none_refuses(ts: Any) -> None:
    with pytest.raises(WireError, match="ts "):
        decode(pack(ts, [], 0))


@pytest.mark.parametrize("rank", [-1, 2**31, "0", 1.5, [0]])
def test_a_rank_that_is_none_refuses(rank: Any) -> None:
    with pytest.raises(WireError):
        decode(pack(TS, [], rank))


# -- hashes


def test_signed_hashes_are_the_same_64_bits() -> None:
    stored = one({"type": "BlockStored", "block_hashes": [-1, 5], "parent_block_hash": -(2**63), "block_size": 16})
    assert stored.block_hashes == [2**64 - 1, 5]
    assert stored.parent_block_hash == 2**63
    assert one(["BlockRemoved", [-2]]).block_hashes == [2**64 - 2]
    assert one(["BlockStored", [-1], -1, None, 16]).parent_block_hash == 2**64 - 1


def test_hashes_of_bytes_stay_bytes() -> None:
    digest = bytes(range(32))
    stored = one({"type": "BlockStored", "block_hashes": [digest, digest[:16]], "parent_block_hash": b"\xff", "block_size": 16})
    assert stored.block_hashes == [digest, digest[:16]]
    assert stored.parent_block_hash == b"\xff"
    assert one(["BlockRemoved", [digest]]).block_hashes == [digest]


@pytest.mark.parametrize("bad", ["deadbeef", 1.5, None, True, [1], {"h": 1}, b""])
@pytest.mark.parametrize("as_map", [True, False])
def test_a_hash_that_is_none_refuses(bad: Any, as_map: bool) -> None:
    for event in (
        {"type": "BlockStored", "block_hashes": [1, bad], "block_size": 16} if as_map else ["BlockStored", [1, bad], None, None, 16],
        {"type": "BlockRemoved", "block_hashes": [bad]} if as_map else ["BlockRemoved", [bad]],
    ):
        with pytest.raises(WireError):
            one(event)


@pytest.mark.parametrize("bad", ["deadbeef", 1.5, True, [1]])
def test_a_parent_that_is_none_refuses(bad: Any) -> None:
    with pytest.raises(WireError):
        one({"type": "BlockStored", "block_hashes": [1], "parent_block_hash": bad, "block_size": 16})
    with pytest.raises(WireError):
        one(["BlockStored", [1], bad, None, 16])


# -- lenient with the unknown, strict with the known


def test_unknown_events_are_counted_and_skipped() -> None:
    known = {"type": "BlockRemoved", "block_hashes": [1]}
    batch = decode(pack(TS, [{"type": "BlockInactive", "x": [1]}, known, ["SomethingElse", 1, 2], known, {"type": "Huh"}], 0))
    assert batch.unknown_events == 3
    assert batch.events == [Removed(block_hashes=[1])] * 2


@pytest.mark.parametrize(
    ("event", "says"),
    [
        ({"type": "BlockStored", "block_hashes": [1]}, "BlockStored without block_size"),
        ({"type": "BlockStored", "block_hashes": [1], "block_size": None}, "BlockStored without block_size"),
        ({"type": "BlockStored", "block_size": 16}, "BlockStored without block_hashes"),
        ({"type": "BlockRemoved", "medium": "GPU"}, "BlockRemoved without block_hashes"),
        ({"type": "BlockStored", "block_hashes": 5, "block_size": 16}, "array"),
        ({"type": "BlockStored", "block_hashes": [1], "block_size": -16}, "block_size"),
        ({"type": "BlockStored", "block_hashes": [1], "block_size": 2**31}, "block_size"),
        ({"type": "BlockStored", "block_hashes": [1], "block_size": "16"}, "block_size"),
        ({"type": "BlockStored", "block_hashes": [1], "block_size": 16, "ownership": 5}, "ownership"),
        ({"type": "BlockStored", "block_hashes": [1], "block_size": 16, "medium": 5}, "medium"),
        ({"type": "BlockStored", "block_hashes": [1], "block_size": 16, "group_idx": -1}, "group_idx"),
        (["BlockStored", [1], None, [1]], "length"),
        (["BlockStored"], "length"),
        (["BlockRemoved"], "length"),
        ({"no": "type"}, "no type"),
        ({"type": 5}, "no type"),
        ([], "no type"),
        ([5, [1]], "no type"),
        ("BlockStored", "neither a map nor an array"),
        (None, "neither a map nor an array"),
    ],
)
def test_a_malformed_known_event_refuses_the_payload(event: Any, says: str) -> None:
    with pytest.raises(WireError, match=says) as caught:
        decode(pack(TS, [{"type": "BlockRemoved", "block_hashes": [1]}, event], 0))
    assert "event 1" in str(caught.value)


REDACTED = [None, "[redacted]", b"", 0, True, {}, ["x"] * 16, [None] * 16, [1.5], [True], [[1, 2]], {"len": 16}]


@pytest.mark.parametrize("tokens", REDACTED, ids=repr)
def test_token_ids_that_are_none_are_no_refusal(tokens: Any) -> None:
    """Somebody between the engine and here may redact them; what is stored and removed is still told."""
    as_map = {"type": "BlockStored", "block_hashes": [1], "parent_block_hash": 7, "token_ids": tokens, "block_size": 16}
    for event in (as_map, [*as_map.values()]):
        assert one(event) == Stored(block_hashes=[1], parent_block_hash=7, block_size=16)


@pytest.mark.parametrize("profile", ["vllm", "sglang"])
def test_a_refusal_never_quotes_the_payload(profile: EngineProfile) -> None:
    """Refusals leave the host; token ids and salts may not."""
    for event in (
        {"type": "BlockStored", "block_hashes": [1], "block_size": "x", "token_ids": [987654321, "tenant-secret"]},
        {"type": "BlockStored", "block_hashes": ["tenant-secret"], "block_size": 1},
        {"type": "BlockStored", "block_hashes": [1], "block_size": 1, "medium": ["tenant-secret"]},
        ["BlockStored", [1], None, [987654321], "tenant-secret"],
        ["BlockStored", [1], None, [987654321], -1, None, "GPU", {"cache_salt": "tenant-secret"}],
        {"type": "BlockStored", "block_hashes": [1], "block_size": -1, "cache_salt": "tenant-secret", "session_id": "tenant-secret"},
        {"type": "BlockStored", "block_hashes": [1], "block_size": 1, "extra_keys": "tenant-secret"},
        {"type": "BlockStored", "block_hashes": [1], "block_size": 1, "ownership": ["tenant-secret"]},
        "tenant-secret",
    ):
        with pytest.raises(WireError) as caught:
            decode(pack(TS, [event], 0), profile=profile)
        assert "tenant-secret" not in str(caught.value)
        assert "987654321" not in str(caught.value)


@pytest.mark.parametrize(
    ("payload", "says"),
    [
        (b"", "not msgpack"),
        (b"\xc1" * 8, "not msgpack"),
        (pack("hello"), "ts missing"),
        (msgspec.msgpack.encode("hello"), "batch is not an array"),
        (msgspec.msgpack.encode({"ts": TS, "events": []}), "batch is not an array"),
        (pack(), "ts missing"),
        (pack(TS), "events missing"),
        (pack(TS, "nope", 0), "events missing"),
        (pack(TS, {"type": "AllBlocksCleared"}), "events missing"),
        (pack(TS, [], 0) + b"\x00", "trailing"),
        (pack(TS, [["BlockRemoved", [1]]], 0)[:-3], "truncated"),
    ],
)
def test_what_is_no_batch_refuses(payload: bytes, says: str) -> None:
    with pytest.raises(WireError, match=says):
        decode(payload)


# -- hostile payloads


def test_an_oversize_payload_refuses_unread() -> None:
    payload = pack(TS, [["AllBlocksCleared"]] * 100, 0)
    assert len(decode(payload, max_bytes=len(payload)).events) == 100
    with pytest.raises(WireError, match="larger than"):
        decode(payload, max_bytes=len(payload) - 1)


HEAD = b"\x93\xcb" + struct.pack(">d", TS)


@pytest.mark.parametrize(
    "payload",
    [
        b"\x91" * 100_000,  # nothing but nesting
        HEAD + b"\x91" * 100_000 + b"\x00" * 2,
        HEAD + b"\x91\x82\xa4type\xa3new\xa1x" + b"\x91" * 100_000 + b"\xc0\x00",  # inside a field to be carried past
        HEAD + b"\x91\x81\xa1a" + b"\x81\xa1a" * 100_000 + b"\xc0\x00",
        HEAD + b"\xdd\xff\xff\xff\xff",  # an array said to have four billion events
        HEAD + b"\x91\x82\xa4type\xabBlockStored\xacblock_hashes\xdd\x7f\xff\xff\xff",
        HEAD + b"\x91\xdb\xff\xff\xff\xff",
        HEAD + b"\xdd\x00\x0f\x00\x00" * 200 + b"\xc0" * 1_000_000,  # forged lengths inside forged lengths
        HEAD + b"\x91\x81\x91\x91\x01\x01\x00",  # a map whose key is an array
        HEAD + b"\x91\xc7\x05\xff12345\x00",  # an extension that says it is a time and is not
        HEAD + b"\x91\xa2\xff\xfe\x00",  # text that is not UTF-8
    ],
)
def test_bombs_refuse(payload: bytes) -> None:
    with pytest.raises(WireError):
        decode(payload)


def test_deep_extra_keys_are_carried_or_refused() -> None:
    nested: Any = None
    for _ in range(200):
        nested = [nested]
    stored = one({"type": "BlockStored", "block_hashes": [1], "block_size": 16, "extra_keys": [nested]})
    assert stored.extra_keys == [nested]


@given(st.binary(max_size=200), st.sampled_from(["vllm", "sglang"]))
def test_any_bytes_decode_or_refuse(payload: bytes, profile: EngineProfile) -> None:
    for whole in (payload, HEAD + payload):
        with contextlib.suppress(WireError):
            decode(whole, profile=profile)


JSON_LIKE = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=5) | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=10,
)
FIELDS = ["type", "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "extra_keys", "group_idx", "reused"]
TAGS = st.sampled_from(["BlockStored", "BlockRemoved", "AllBlocksCleared", "TierBlocksCleared", "New"])
EVENTS = st.builds(lambda tag, fields: {"type": tag, **fields}, TAGS, st.dictionaries(st.sampled_from(FIELDS), JSON_LIKE)) | st.builds(
    lambda tag, rest: [tag, *rest], TAGS, st.lists(JSON_LIKE, max_size=13)
)


@given(st.lists(EVENTS | JSON_LIKE, max_size=3), st.none() | JSON_LIKE, st.sampled_from(["vllm", "sglang"]))
def test_any_structure_decodes_or_refuses(events: list[Any], rank: Any, profile: EngineProfile) -> None:
    try:
        batch = decode(pack(TS, events, rank), profile=profile)
    except WireError:
        return
    assert len(batch.events) + batch.unknown_events == len(events)
    for event in batch.events:
        if isinstance(event, Stored | Removed):
            assert all(isinstance(value, bytes) or 0 <= value < 2**64 for value in event.block_hashes)


@given(
    st.lists(st.integers(0, 2**64 - 1) | st.binary(min_size=16, max_size=32), max_size=5),
    st.none() | st.integers(0, 2**64 - 1),
    st.none() | st.lists(st.integers(0, 2**32 - 1), max_size=8),
    st.none() | st.text(max_size=8),
)
def test_the_two_encodings_mean_the_same(hashes: list[Any], parent: Any, tokens: Any, medium: Any) -> None:
    names = ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium")
    values = (hashes, parent, tokens, 16, None, medium)
    assert one(["BlockStored", *values]) == one({"type": "BlockStored", **dict(zip(names, values, strict=True))})


def test_the_slow_way_gives_what_the_fast_way_gives() -> None:
    """An unknown event sends a batch down the second way: what is known in it must come out the same."""
    for name in ("a_shared_prefix.frames.jsonl.gz", "j_v0.23.0_array.frames.jsonl.gz"):
        for frame in list(capture.read(capture_path(name)))[:40]:
            ts, events, rank = msgspec.msgpack.decode(frame.payload)
            fast, slow = decode(frame.payload), decode(pack(ts, [*events, {"type": "New"}], rank))
            assert slow == WireBatch(fast.at_us, fast.events, fast.dp_rank, 1)


# -- real engines, and the conformance corpus


@pytest.mark.parametrize("name", CAPTURE_NAMES)
def test_every_frame_of_every_capture_decodes(name: str) -> None:
    frames = list(capture.read(capture_path(name)))
    assert frames
    for frame in frames:
        batch = decode(frame.payload)
        outer = msgspec.msgpack.decode(frame.payload)
        assert len(batch.events) == len(outer[1])
        assert batch.dp_rank == outer[2]
        assert batch.at_us == round(outer[0] * 1e6)
        for event, raw in zip(batch.events, outer[1], strict=True):
            if not isinstance(event, Cleared):
                assert event.block_hashes == (raw["block_hashes"] if isinstance(raw, dict) else raw[1])


def corpus_names(kind: str) -> list[str]:
    folder = shared_folder()
    if folder is None or not (folder / CORPUS / "manifest.json").is_file():
        return []
    names: list[str] = json.loads((folder / CORPUS / "manifest.json").read_text())[kind]
    return names


ACCEPTED_HERE = {
    # Engines up to 0.23.0 publish tag-first arrays, and those are still in service. The corpus refuses them lest a decoder for them
    # misread the maps that came after; here the two cannot be mistaken for each other: an array is one, a map is the other.
    "event_is_tag_array",
    # Other engines, and older ones, publish the same 64 bits as signed numbers.
    "hash_is_negative",
}
"""Malformed by the corpus, which pins one engine version; real in the field, so read here, which is a stated difference from it."""


def fixture(name: str) -> Any:
    return json.loads(shared_path(f"{CORPUS}/{name}.json").read_text())


def fan_out(batch: WireBatch) -> list[dict[str, Any]]:
    """One event per hash, in the terms of the corpus."""
    events: list[dict[str, Any]] = []
    for event in batch.events:
        common: dict[str, Any] = {"dp_rank": batch.dp_rank, "group_idx": event.group_idx, "medium": event.medium}
        common["locality"] = event.locality
        if isinstance(event, Cleared):
            events.append({**common, "type": "Cleared"})
            continue
        parent = event.parent_block_hash if isinstance(event, Stored) else None
        for block_hash in event.block_hashes:
            if isinstance(event, Removed):
                events.append({**common, "type": "Removed", "block_hash": block_hash})
                continue
            whole = event.token_ids is not None and len(event.token_ids) == len(event.block_hashes) * event.block_size
            about = {"type": "Stored", "block_hash": block_hash, "block_size": event.block_size, "spec_kind": event.spec_kind}
            about |= {"parent_hash": parent} if whole else {"parent_unknown": True}
            events.append({**common, **about})
            parent = block_hash
    return [{name: value for name, value in event.items() if value is not None} for event in events]


@pytest.mark.parametrize("name", corpus_names("valid") or ["manifest"])
def test_a_valid_fixture_means_what_the_corpus_says(name: str) -> None:
    given = fixture(name)
    batch = decode(bytes.fromhex(given["wire_hex"]))
    expected = given["expect"]
    assert batch.unknown_events == expected["unknown_types"]
    for event in expected["events"]:
        assert event.pop("at_ms") == pytest.approx(batch.at_us / 1000, abs=1e-3)
        event.pop("content_id", None)  # that producer's own, of another construction
        event.pop("extra_keys", None)
    assert fan_out(batch) == expected["events"]


@pytest.mark.parametrize("name", corpus_names("malformed") or ["manifest"])
def test_a_malformed_fixture_refuses(name: str) -> None:
    given = fixture(name)
    payload = bytes.fromhex(given["wire_hex"])
    if name in ACCEPTED_HERE:
        assert decode(payload).events
        return
    with pytest.raises(WireError) as caught:
        decode(payload)
    assert given["expect"]["error"]["contains"] in str(caught.value)
