"""Content ids and pseudonyms: the published vectors, what is equal and what never is, and the key file."""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import stat
import struct
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from producers.identity import (
    BLOCK_ID_CONTEXT,
    EXTRA_KEY_CONTEXT,
    SESSION_CONTEXT,
    Identity,
    IdentityKey,
    Pseudonym,
    ValuePseudonym,
    create_key,
    encode_extra,
    encode_keys,
    encode_value,
    ephemeral_key,
    load_key,
    load_or_create_key,
    pack_tokens,
)
from schemas.errors import KvcensusError
from tests.shared_data import shared_path

KEY = IdentityKey(bytes(range(32)), bytes(32))
TOKENS = pack_tokens(list(range(16)))


# -- pseudonyms


def test_every_published_pseudonym_vector() -> None:
    corpus = json.loads(shared_path("corpora/inference-events-1.10/pseudonym/vectors.json").read_text())
    material = bytes.fromhex(corpus["test_key_hex"])
    assert corpus["vectors"]
    for vector in corpus["vectors"]:
        key = IdentityKey(material[:32], material[32:], vector["epoch"])
        assert Pseudonym(key, vector["context"].encode())(vector["raw_id"]).hex() == vector["pseudonym"], vector


@given(st.binary(min_size=32, max_size=32), st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1), st.binary(min_size=1, max_size=64))
def test_a_pseudonym_is_the_hmac_it_says(secret: bytes, epoch: int, raw: int, raw_bytes: bytes) -> None:
    pseudonym = Pseudonym(IdentityKey(secret, bytes(32), epoch))
    head = BLOCK_ID_CONTEXT + b"\0" + struct.pack(">I", epoch) + b"\0"
    for value, data in ((raw, struct.pack(">Q", raw)), (raw_bytes, raw_bytes)):
        assert pseudonym(value) == hmac.digest(secret, head + data, "sha256")[:16]


def test_contexts_are_apart() -> None:
    spaces = [Pseudonym(KEY, context) for context in (BLOCK_ID_CONTEXT, EXTRA_KEY_CONTEXT, SESSION_CONTEXT)]
    assert len({space(1) for space in spaces}) == len({space(b"1") for space in spaces}) == 3


@given(st.binary(min_size=32, max_size=32), st.integers(0, 2**32 - 1), st.text(max_size=400))
def test_values_have_pseudonyms_of_the_same_construction(secret: bytes, epoch: int, text: str) -> None:
    for context in (b"kvcensus:extra-key:v1", b"kvcensus:session:v1"):
        pseudonym = ValuePseudonym(IdentityKey(secret, bytes(32), epoch), context)
        data = text.encode()
        raw = b"s" + struct.pack("<I", len(data)) + data
        expected = hmac.digest(secret, context + b"\0" + struct.pack(">I", epoch) + b"\0" + raw, "sha256")[:16]
        assert pseudonym(encode_value(text)) == pseudonym(encode_value(text)) == expected


def test_the_canary_tells_keys_apart_and_nothing_else() -> None:
    secret, nonce = os.urandom(32), os.urandom(32)
    canary = IdentityKey(secret, nonce, 3).canary
    assert canary == IdentityKey(secret, nonce, 3).canary
    assert len(bytes.fromhex(canary)) == 16
    others = [IdentityKey(secret, nonce, 4), IdentityKey(os.urandom(32), nonce, 3), IdentityKey(secret, os.urandom(32), 3)]
    assert len({canary, *(key.canary for key in others)}) == 4
    shown = repr(IdentityKey(secret, nonce))
    assert secret.hex() not in shown
    assert str(secret) not in shown


# -- content ids


def test_a_content_id_is_the_hash_it_says() -> None:
    """The construction written out once more: a change of it would make every id of every fleet new."""

    def blake(data: bytes, person: bytes) -> bytes:
        return hashlib.blake2b(data, key=KEY.secret, digest_size=16, person=person).digest()

    def sized(part: bytes) -> bytes:
        return len(part).to_bytes(4, "little") + part

    context = b"\x01" + bytes(4) + b"\x01" + sized(b"org/model") + b"\x01" + sized(b"adapter-a") + (16).to_bytes(4, "little")
    digest = blake(context, b"kvcensus-context")
    parent = bytes(range(16))
    expected = blake(b"\x01" + parent + digest + sized(b"extra") + TOKENS, b"kvcensus-content")
    assert Identity(KEY, "org/model").content_id(parent, TOKENS, b"extra", "adapter-a", 16) == expected

    undeclared = b"\x01" + bytes(4) + b"\x00" + sized(b"undeclared") + b"\x00" + sized(b"") + (16).to_bytes(4, "little")
    expected = blake(bytes(17) + blake(undeclared, b"kvcensus-context") + sized(b"") + TOKENS, b"kvcensus-content")
    assert Identity(KEY).content_id(None, TOKENS, b"", None, 16) == expected


PARENTS = st.none() | st.binary(min_size=16, max_size=16)
NAMES = st.none() | st.text(min_size=1, max_size=6)
INPUTS = st.tuples(
    st.sampled_from([KEY, IdentityKey(bytes(32), bytes(32)), IdentityKey(KEY.secret, bytes(32), 1)]),
    NAMES,
    PARENTS,
    st.lists(st.integers(0, 3), min_size=1, max_size=3),
    st.binary(max_size=4),
    NAMES,
    st.integers(1, 3),
)


def of(given: tuple[Any, ...]) -> bytes:
    key, model, parent, tokens, extra, adapter, block_size = given
    return Identity(key, model).content_id(parent, pack_tokens(tokens), extra, adapter, block_size)


@given(INPUTS, INPUTS)
def test_ids_are_equal_where_all_inputs_are_and_nowhere_else(one: tuple[Any, ...], other: tuple[Any, ...]) -> None:
    assert (of(one) == of(other)) == (one == other)


@given(INPUTS, st.integers(0, 6), INPUTS)
def test_any_single_difference_gives_another_id(given: tuple[Any, ...], position: int, other: tuple[Any, ...]) -> None:
    changed = (*given[:position], other[position], *given[position + 1 :])
    assume(changed != given)
    assert of(changed) != of(given)


def test_the_root_is_no_block() -> None:
    identity = Identity(KEY)
    assert identity.content_id(None, TOKENS, b"", None, 16) != identity.content_id(bytes(16), TOKENS, b"", None, 16)


def test_no_model_and_no_adapter_are_not_names() -> None:
    assert Identity(KEY, "undeclared").content_id(None, TOKENS, b"", None, 16) != Identity(KEY).content_id(None, TOKENS, b"", None, 16)
    assert Identity(KEY, "").content_id(None, TOKENS, b"", "", 16) == Identity(KEY).content_id(None, TOKENS, b"", None, 16)


@given(
    PARENTS, st.lists(st.integers(0, 2**32 - 1), min_size=2, max_size=12), NAMES, st.lists(st.binary(max_size=3), min_size=6, max_size=6)
)
def test_a_chain_is_block_after_block(parent: bytes | None, tokens: list[int], adapter: str | None, extras: list[bytes]) -> None:
    tokens = tokens[: len(tokens) // 2 * 2]
    identity = Identity(KEY, "m")
    for each in (extras[: len(tokens) // 2], None):
        expected, previous = [], parent
        for at in range(0, len(tokens), 2):
            extra = each[at // 2] if each is not None else b""
            previous = identity.content_id(previous, pack_tokens(tokens[at : at + 2]), extra, adapter, 2)
            expected.append(previous)
        assert identity.chain(parent, pack_tokens(tokens), adapter, 2, each) == expected


def test_tokens_are_fixed_width_little_endian() -> None:
    assert pack_tokens([1, 2**32 - 1]) == b"\x01\0\0\0\xff\xff\xff\xff"
    for bad in (-1, 2**32):
        with pytest.raises(OverflowError):
            pack_tokens([bad])


# -- extra keys


EXTRA = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.sampled_from([0, 1, -1, 127, 128, 255, 256])
    | st.text(max_size=3)
    | st.binary(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=2),
    max_leaves=6,
)


def typed(value: Any) -> Any:
    """``value`` in a form where 1, True and the like stay different."""
    if isinstance(value, list):
        return ["list", *(typed(item) for item in value)]
    if isinstance(value, dict):
        return ["dict", *sorted((key, typed(item)) for key, item in value.items())]
    return [type(value).__name__, repr(value)]


@given(st.lists(EXTRA, max_size=3), st.lists(EXTRA, max_size=3))
def test_extra_keys_are_injective(one: list[Any], other: list[Any]) -> None:
    assert (encode_extra(one) == encode_extra(other)) == (typed(one) == typed(other))


@given(st.lists(EXTRA, max_size=3), EXTRA, EXTRA)
def test_each_extra_key_has_an_encoding_of_its_own(keys: list[Any], one: Any, other: Any) -> None:
    assert encode_keys(keys) == [encode_value(key) for key in keys]
    assert b"".join(encode_keys(keys)) == encode_extra(keys)
    assert (encode_value(one) == encode_value(other)) == (typed(one) == typed(other))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (["ab", "c"], ["a", "bc"]),
        (["a", ["b"]], [["a", "b"]]),
        (["1"], [1]),
        ([1], [True]),
        ([0], [False]),
        ([None], []),
        (["a"], [b"a"]),
        ([1], [1.0]),
        ([{"a": "b"}], [["a", "b"]]),
        ([-1], [255]),
        ([[], []], [[[]]]),
    ],
)
def test_extra_keys_that_must_differ(one: list[Any], other: list[Any]) -> None:
    assert encode_extra(one) != encode_extra(other)


def test_extra_keys_that_are_the_same() -> None:
    assert encode_extra(None) == encode_extra([]) == b""
    assert encode_extra([{"a": 1, "b": 2}]) == encode_extra([{"b": 2, "a": 1}])
    assert encode_extra(("salt", ("image", 3))) == encode_extra(["salt", ["image", 3]])
    assert encode_extra("salt") == encode_extra(["salt"])


def test_the_adapter_is_not_an_extra_key_of_its_own_requests() -> None:
    assert encode_extra(["adapter-a", "tenant-1"], "adapter-a") == encode_extra(["tenant-1"], "adapter-a") == encode_extra(["tenant-1"])
    assert encode_extra(["adapter-a"], "adapter-a") == b""
    assert encode_extra(["adapter-a", "adapter-a"], "adapter-a") == encode_extra(["adapter-a"])
    assert encode_extra(["adapter-a"], "adapter-b") == encode_extra(["adapter-a"]) != b""


def test_extra_keys_without_an_encoding_are_an_error() -> None:
    nested: Any = "x"
    for _ in range(40):
        nested = [nested]
    for bad in (nested, object()):
        with pytest.raises(ValueError, match="extra key"):
            encode_extra([bad])


# -- the key file


def test_a_created_key_loads_again(tmp_path: Path) -> None:
    path = tmp_path / "key"
    made = create_key(path, 2)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert path.stat().st_size == 64
    loaded = load_key(path, 2)
    assert (loaded.secret, loaded.nonce, loaded.epoch, loaded.canary) == (made.secret, made.nonce, 2, made.canary)
    assert [entry.name for entry in tmp_path.iterdir()] == ["key"]
    path.chmod(0o400)
    assert load_key(path, 2).canary == made.canary


def test_a_key_is_never_replaced(tmp_path: Path) -> None:
    path = tmp_path / "key"
    canary = create_key(path).canary
    with pytest.raises(KvcensusError, match="exists already"):
        create_key(path)
    assert load_key(path).canary == canary
    assert len(list(tmp_path.iterdir())) == 1


def test_many_starters_agree_on_one_key(tmp_path: Path) -> None:
    found: list[tuple[str, bool]] = []
    gate = threading.Barrier(8)

    def start() -> None:
        gate.wait()
        key, made = load_or_create_key(tmp_path / "key")
        found.append((key.canary, made))

    threads = [threading.Thread(target=start) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert len({canary for canary, _ in found}) == 1
    assert sum(made for _, made in found) == 1


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644, 0o660, 0o700, 0o4600])
def test_a_key_open_to_others_refuses(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "key"
    create_key(path)
    path.chmod(mode)
    with pytest.raises(KvcensusError, match=f"mode {mode:04o}.*chmod 600"):
        load_key(path)


@pytest.mark.parametrize(
    ("size", "says"), [(0, "0 bytes"), (32, "32 bytes"), (63, "63 bytes"), (65, "more than 64"), (9000, "more than 64")]
)
def test_a_key_of_another_size_refuses(tmp_path: Path, size: int, says: str) -> None:
    path = tmp_path / "key"
    path.write_bytes(bytes(size))
    path.chmod(0o600)
    with pytest.raises(KvcensusError, match=says):
        load_key(path)


def test_what_is_no_key_file_refuses(tmp_path: Path) -> None:
    with pytest.raises(KvcensusError, match=r"absent: No such file.*--key-file"):
        load_key(tmp_path / "absent")
    with pytest.raises(KvcensusError, match="not a regular file"):
        load_key(tmp_path)
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(KvcensusError, match="not a regular file"):
        load_key(tmp_path / "pipe")
    with pytest.raises(KvcensusError, match="cannot be written"):
        create_key(tmp_path / "no" / "folder" / "key")
    with pytest.raises(KvcensusError, match="cannot be written"):
        load_or_create_key(tmp_path / "no" / "folder" / "key")


@pytest.mark.parametrize("epoch", [-1, 2**32])
def test_an_epoch_out_of_range_refuses(epoch: int) -> None:
    with pytest.raises(KvcensusError, match="epoch"):
        ephemeral_key(epoch)


def test_ephemeral_keys_are_all_different() -> None:
    assert ephemeral_key().canary != ephemeral_key().canary
