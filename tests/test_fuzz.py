"""Whatever bytes arrive: refused or read, in bounded work and memory, and what was read goes all the way to a record.

Inputs are frames of real engines with bits flipped, ends cut off, pieces moved between them and lengths forged, and payloads made to
hurt. What work costs is counted in calls and in bytes allocated, not in seconds.
"""

from __future__ import annotations

import random
import struct
import sys
import tracemalloc
from collections.abc import Iterator
from functools import cache
from types import FrameType
from typing import Any

import msgspec
import pytest

from producers import capture
from producers.identity import Identity, IdentityKey
from producers.resolver import RankResolver
from producers.wire import WireBatch, WireError, decode
from schemas import codec
from schemas.records import EngineProfile, RankMessage
from tests.shared_data import SHIPPED, shared_folder

KEY = IdentityKey(bytes(range(32)), bytes(32))
PROFILES: tuple[EngineProfile, ...] = ("vllm", "sglang")
HEAD = b"\x93\xcb" + struct.pack(">d", 1796022527.5)

PEAK_PER_BYTE = 128
"""Bytes allocated at once for each byte of a payload, at most: a map of one entry takes three bytes and becomes a dict."""

PEAK_FLOOR = 64 * 1024
CALLS_PER_BYTE = 8
CALLS_FLOOR = 500

LENGTHS = (0xDC, 0xDD, 0xDE, 0xDF, 0xD9, 0xDA, 0xDB, 0xC4, 0xC5, 0xC6, 0xC7, 0xC8, 0xC9)
"""What opens an array, map, text, bytes or extension with its length after it."""


@cache
def frames() -> tuple[bytes, ...]:
    """A few payloads of every capture there is, both encodings of events among them."""
    folder = shared_folder()
    paths = sorted(SHIPPED.glob("*.frames.jsonl.gz"))
    if folder is not None:
        paths += sorted(folder.joinpath("captures").glob("*frames.jsonl.gz"))
    found = [frame.payload for path in paths for frame in list(capture.read(path))[1:60:12]]
    assert found
    return tuple(payload for payload in found if len(payload) < 20_000)


def mutated(rng: random.Random) -> bytes:
    payload = bytearray(rng.choice(frames()))
    for _ in range(rng.choice((1, 1, 2, 5))):
        at = rng.randrange(len(payload) or 1)
        match rng.randrange(6):
            case 0:
                if payload:
                    payload[at] ^= 1 << rng.randrange(8)
            case 1:
                del payload[at:]
            case 2:
                other = rng.choice(frames())
                start = rng.randrange(len(other))
                payload[at : at + rng.randrange(40)] = other[start : start + rng.randrange(80)]
            case 3:
                payload[at : at + 1] = bytes([rng.choice(LENGTHS)]) + rng.randbytes(rng.randrange(5))
            case 4:
                payload[at:at] = bytes([rng.choice(LENGTHS)]) + rng.choice((b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff", b"\x00\xff\xff\xff"))
            case _:
                payload[at:at] = payload[at : at + rng.randrange(200)] * rng.randrange(1, 4)
    return bytes(payload)


def hostile() -> Iterator[bytes]:
    """Payloads that mean little and cost as much as they can."""
    stored = HEAD + b"\x91\x84\xa4type\xabBlockStored\xacblock_hashes\x91\x01\xaablock_size\x01"
    many = 4000
    count = struct.pack(">H", many)
    for filling in (b"\x90", b"\x80", b"\xc0", b"\x81\x00\x00", b"\x91\x91\x90", b"\xa1a", b"\xa2ab", b"\xcb" + bytes(8), b"\xd4\x05\x00"):
        yield HEAD + b"\xdc" + count + filling * many + b"\x00"
        for field in (b"extra_keys", b"session_id", b"cache_salt", b"token_ids", b"new"):
            yield stored + bytes([0xA0 + len(field)]) + field + b"\xdc" + count + filling * many + b"\x00"
    for event in (b"\x92\xacBlockRemoved\x90", b"\x91\xb0AllBlocksCleared", b"\x91\xa1A", b"\x81\xa4type\xa1A"):
        yield HEAD + b"\xdc" + count + event * many + b"\x00"
    for opener in (
        b"\xdd\x7f\xff\xff\xff",
        b"\xdf\x7f\xff\xff\xff",
        b"\xdb\x7f\xff\xff\xff",
        b"\xc6\x7f\xff\xff\xff",
        b"\xc9\x7f\xff\xff\xff\x05",
    ):
        for before in (HEAD, HEAD + b"\x91", stored + b"\xaaextra_keys", stored + b"\xa3new", stored + b"\xa9token_ids"):
            yield before + opener
            yield before + opener * 400
    for nest in (b"\x91", b"\x81\x00", b"\xdd\x00\x00\x00\x01", b"\xdd\x00\xff\xff\xff"):
        for before in (b"", HEAD, stored + b"\xaaextra_keys", stored + b"\xaasession_id", stored + b"\xa3new"):
            yield before + nest * 5_000 + b"\xc0\x00"


def attempt(payload: bytes, profile: EngineProfile) -> WireBatch | None:
    try:
        return decode(payload, profile=profile)
    except WireError:
        return None


def peak_of(payload: bytes, profile: EngineProfile) -> int:
    """Bytes allocated at once, at most, while it is decoded; tracing must be on."""
    before = tracemalloc.get_traced_memory()[0]
    tracemalloc.reset_peak()
    attempt(payload, profile)
    return tracemalloc.get_traced_memory()[1] - before


def calls_of(payload: bytes, profile: EngineProfile) -> int:
    """Calls, of Python and of C functions, made while it is decoded."""
    calls = 0

    def count(_frame: FrameType, event: str, _arg: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        attempt(payload, profile)
    finally:
        sys.setprofile(None)
    return calls


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("seed", range(4))
def test_a_damaged_frame_is_read_or_refused_and_what_is_read_becomes_a_record(profile: EngineProfile, seed: int) -> None:
    rng = random.Random(seed)
    target = RankResolver(Identity(KEY, "m"), KEY, 500, profile=profile, collect_learned=True)
    read = refused = 0
    for _ in range(1500):
        batch = attempt(mutated(rng), profile)
        if batch is None:
            refused += 1
            continue
        read += 1
        message = RankMessage("i", 0, "l", 1, batch.at_us, 1, "x", batch=target.resolve(batch))
        assert codec.decode(codec.encode(message), RankMessage) == message
    assert read > 50
    assert refused > 500


@pytest.mark.parametrize("profile", PROFILES)
def test_memory_is_bounded_by_the_size_of_the_payload(profile: EngineProfile) -> None:
    rng = random.Random(7)
    for payload in frames()[:5]:
        attempt(payload, profile)  # what is made once and kept is nobody's payload
    tracemalloc.start()
    try:
        for payload in [*hostile(), *(mutated(rng) for _ in range(500))]:
            assert peak_of(payload, profile) <= PEAK_PER_BYTE * len(payload) + PEAK_FLOOR, payload[:60]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("profile", PROFILES)
def test_work_is_bounded_by_the_size_of_the_payload(profile: EngineProfile) -> None:
    rng = random.Random(8)
    for payload in [*hostile(), *(mutated(rng) for _ in range(500))]:
        assert calls_of(payload, profile) <= CALLS_PER_BYTE * len(payload) + CALLS_FLOOR, payload[:60]


def test_what_hurts_a_resolver_is_resolved_as_well() -> None:
    target = RankResolver(Identity(KEY, "m"), KEY, 500, profile="sglang")
    for payload in hostile():
        batch = attempt(payload, "sglang")
        if batch is not None:
            message = RankMessage("i", 0, "l", 1, batch.at_us, 1, "x", batch=target.resolve(batch))
            codec.encode(message)
    nested: Any = "x"
    for _ in range(100):
        nested = [nested]
    event = {"type": "BlockStored", "block_hashes": [1], "block_size": 1, "token_ids": [1], "extra_keys": [nested], "session_id": nested}
    resolved = target.resolve(decode(msgspec.msgpack.encode([1.0, [event]])))
    assert (resolved.unresolved_blocks, resolved.ops[0].session_id) == (1, None)


def test_the_largest_payload_is_a_parameter() -> None:
    payload = max(frames(), key=len)
    assert decode(payload, max_bytes=len(payload)).events
    for profile in PROFILES:
        with pytest.raises(WireError, match=f"payload of {len(payload)} bytes"):
            decode(payload, max_bytes=len(payload) - 1, profile=profile)
