"""Portable identity of cached content, and the pseudonyms under which engine hashes leave the host.

Two id spaces under one operator's key, apart by construction:

- ``content_id``: keyed BLAKE2b over what a block holds. Equal content has an equal id on every rank, node and engine version.
- block pseudonym: HMAC-SHA256 over an engine's own hash, in a context of its own. Means something within one holder and life.

Neither can be inverted or recomputed without the key, so neither token ids nor salts leave in clear. Pure, but for
:func:`load_key` and :func:`create_key`.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import stat
import struct
import sys
import tempfile
from array import array
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from schemas.errors import KvcensusError
from schemas.records import ID_BYTES

SECRET_BYTES = 32
NONCE_BYTES = 32
KEY_FILE_BYTES = SECRET_BYTES + NONCE_BYTES
MAX_EPOCH = 2**32 - 1

BLOCK_ID_CONTEXT = b"infertap:block-id:v1"
"""Context of block pseudonyms: the record contract's own, so that every producer of it gives the same ones."""

EXTRA_KEY_CONTEXT = b"kvcensus:extra-key:v1"
SESSION_CONTEXT = b"kvcensus:session:v1"
"""Contexts of the pseudonyms of extra keys (cache salts, image hashes, ...) and of session ids; raw is :func:`encode_value`."""

_CANARY_CONTEXT = b"kvcensus:canary:v1"
_CONTENT_PERSON = b"kvcensus-content"
_CONTEXT_PERSON = b"kvcensus-context"
_SCHEME = 1
"""Version of the content id construction; a change makes every id new and is a new ``key_epoch`` in all but name."""

_UNDECLARED_MODEL = b"undeclared"
_ROOT = b"\x00" + bytes(ID_BYTES)
_CHILD = b"\x01"
_SHA256_BLOCK = 64
_REMEMBERED_PSEUDONYMS = 16_384
_REMEMBERED_BYTES = 256
_U32 = next(code for code in "IL" if array(code).itemsize == 4)
_MAX_DEPTH = 16


class IdentityKey:
    """An operator's key: ``secret`` and ``nonce`` of 32 bytes each, and the ``epoch`` (u32) folded into every id.

    Raises :class:`KvcensusError` for an epoch out of range. Never prints its bytes.
    """

    __slots__ = ("_inner", "_outer", "canary", "epoch", "nonce", "secret")

    def __init__(self, secret: bytes, nonce: bytes, epoch: int = 0) -> None:
        if len(secret) != SECRET_BYTES or len(nonce) != NONCE_BYTES:
            raise ValueError(f"a key is {SECRET_BYTES} + {NONCE_BYTES} bytes")
        if not 0 <= epoch <= MAX_EPOCH:
            raise KvcensusError(f"key epoch {epoch}: expected a number from 0 to {MAX_EPOCH}")
        self.secret = secret
        self.nonce = nonce
        self.epoch = epoch
        padded = secret.ljust(_SHA256_BLOCK, b"\0")
        self._inner = hashlib.sha256(bytes(byte ^ 0x36 for byte in padded))
        self._outer = hashlib.sha256(bytes(byte ^ 0x5C for byte in padded))
        self.canary = Pseudonym(self, _CANARY_CONTEXT)(nonce).hex()
        """Hex value that only holders of this key and epoch can emit: equal canaries mean comparable ids."""

    def __repr__(self) -> str:
        return f"IdentityKey(epoch={self.epoch}, canary={self.canary})"


class Pseudonym:
    """``HMAC-SHA256(key, context || 0 || epoch u32 || 0 || raw)[:16]`` for one context; ``raw`` is a u64 (big-endian) or bytes."""

    __slots__ = ("of",)

    def __init__(self, key: IdentityKey, context: bytes = BLOCK_ID_CONTEXT) -> None:
        # HMAC with the constant part hashed once: a third of the time of hmac.digest for these short messages.
        inner = key._inner.copy()
        inner.update(context + b"\0" + struct.pack(">I", key.epoch) + b"\0")
        self.of = _hmac(inner.copy, key._outer.copy)
        """The same as calling this object, a little sooner: for those who ask once for every block."""

    def __call__(self, raw: int | bytes) -> bytes:
        """The 16-byte pseudonym of ``raw``. An integer must be within 0 to 2^64 - 1."""
        return self.of(raw)


def _hmac(new_inner: Callable[[], hashlib._Hash], new_outer: Callable[[], hashlib._Hash]) -> Callable[[int | bytes], bytes]:
    def pseudonym(raw: int | bytes) -> bytes:
        inner, outer = new_inner(), new_outer()
        inner.update(raw if isinstance(raw, bytes) else raw.to_bytes(8, "big"))
        outer.update(inner.digest())
        return outer.digest()[:ID_BYTES]

    return pseudonym


class ValuePseudonym:
    """Pseudonyms of values (:func:`encode_value`) in one context. Short ones are remembered: salts and sessions repeat."""

    def __init__(self, key: IdentityKey, context: bytes) -> None:
        self._pseudonym = Pseudonym(key, context).of
        self._remembered = lru_cache(maxsize=_REMEMBERED_PSEUDONYMS)(self._pseudonym)

    def __call__(self, encoded: bytes) -> bytes:
        """The 16-byte pseudonym of a value in its encoded form."""
        return self._remembered(encoded) if len(encoded) <= _REMEMBERED_BYTES else self._pseudonym(encoded)


class Identity:
    """Content ids under one key for one declared model (None: undeclared, one fixed word that is equal for all).

    A content id is keyed BLAKE2b-128 over::

        root flag (1) | parent content id (16) | context digest (16) | length of extra (u32) | extra | token bytes

    and the context digest over the scheme's version, model, key epoch, adapter name and block size, each of variable length with its length
    before it. Every field but the last has a fixed or a written length, so no two inputs share an encoding.
    """

    def __init__(self, key: IdentityKey, model: str | None = None) -> None:
        self.key = key
        self.model = model or None
        self._content = hashlib.blake2b(key=key.secret, digest_size=ID_BYTES, person=_CONTENT_PERSON)
        self._context = lru_cache(maxsize=4096)(self._context_digest)

    def content_id(self, parent: bytes | None, token_bytes: bytes, extra: bytes, adapter: str | None, block_size: int) -> bytes:
        """The 16-byte id of one block.

        ``parent`` is the content id of the block before it, None for the root of a prompt (an unknown parent has no id at
        all: not a case for this method). ``token_bytes``: u32 little-endian token ids (:func:`pack_tokens`). ``extra``:
        :func:`encode_extra`. ``adapter``: LoRA name, None (or empty) for none. ``block_size`` in tokens.
        """
        digest = self._content.copy()
        digest.update(self.prefix(parent) + self.context(adapter, block_size) + len(extra).to_bytes(4, "little") + extra + token_bytes)
        return digest.digest()

    def context(self, adapter: str | None, block_size: int) -> bytes:
        """16-byte digest of what a whole run shares: model, key epoch, adapter and block size."""
        return self._context(adapter or None, block_size)

    @staticmethod
    def prefix(parent: bytes | None) -> bytes:
        """How a parent, or being the root, is written."""
        return _ROOT if parent is None else _CHILD + parent

    def chain(
        self, parent: bytes | None, tokens: bytes, adapter: str | None, block_size: int, extras: list[bytes] | None = None
    ) -> list[bytes]:
        """Ids of consecutive blocks: :meth:`content_id` for each, the shared parts written once. ``extras`` None: no block has any."""
        context = self.context(adapter, block_size)
        if extras is not None:
            return self._chain_with(extras, parent, tokens, context, 4 * block_size)
        middle = context + b"\0\0\0\0"
        width = 4 * block_size
        start = self._content
        prefix = self.prefix(parent)
        ids = []
        for at in range(0, len(tokens), width):
            digest = start.copy()
            digest.update(prefix + middle + tokens[at : at + width])
            content = digest.digest()
            ids.append(content)
            prefix = _CHILD + content
        return ids

    def _chain_with(self, extras: list[bytes], parent: bytes | None, tokens: bytes, context: bytes, width: int) -> list[bytes]:
        prefix = self.prefix(parent)
        ids = []
        at = 0
        for extra in extras:
            digest = self._content.copy()
            digest.update(prefix + context + len(extra).to_bytes(4, "little") + extra + tokens[at : at + width])
            content = digest.digest()
            ids.append(content)
            prefix = _CHILD + content
            at += width
        return ids

    def _context_digest(self, adapter: str | None, block_size: int) -> bytes:
        declared = self.model is not None
        model = (self.model or "").encode("utf-8", "surrogatepass") if declared else _UNDECLARED_MODEL
        name = (adapter or "").encode("utf-8", "surrogatepass")
        text = struct.pack("<BIB", _SCHEME, self.key.epoch, declared) + _sized(model)
        text += struct.pack("<B", adapter is not None) + _sized(name) + struct.pack("<I", block_size)
        return hashlib.blake2b(text, key=self.key.secret, digest_size=ID_BYTES, person=_CONTEXT_PERSON).digest()


def pack_tokens(token_ids: list[int]) -> bytes:
    """Token ids as u32 little-endian, 4 bytes each. Raises ``OverflowError`` for one outside 0 to 2^32 - 1."""
    packed = array(_U32, token_ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def _sized(part: bytes) -> bytes:
    return struct.pack("<I", len(part)) + part


def encode_extra(keys: Any, lora_name: str | None = None) -> bytes:
    """One block's extra keys as bytes: canonical (equal keys, equal bytes) and injective. None and no keys at all: ``b""``.

    See :func:`encode_keys`, whose parts it joins; each of them tells its own length.
    """
    return b"".join(encode_keys(keys, lora_name))


def encode_keys(keys: Any, lora_name: str | None = None) -> list[bytes]:
    """Each of one block's extra keys as bytes, in their order.

    Newer engines repeat the adapter's name among the extra keys of every block of an adapter's request, older ones do
    not. So that equal content stays equal over versions, one key equal to ``lora_name`` is left out: the adapter is in
    the id anyway, by a field of its own. Raises ``ValueError`` for keys of a kind that has no encoding.
    """
    if keys is None:
        return []
    items = list(keys) if isinstance(keys, list | tuple) else [keys]
    if lora_name and lora_name in items:
        items.remove(lora_name)
    return [_encode_value(item, 0) for item in items]


def encode_value(value: Any) -> bytes:
    """A value of an event as bytes: equal values give equal bytes, and no two others do. Raises ``ValueError`` as above."""
    return _encode_value(value, 0)


def _encode_value(value: Any, depth: int) -> bytes:
    if depth > _MAX_DEPTH:
        raise ValueError("extra keys nest too deep")
    if value is None:
        return b"n"
    if isinstance(value, bool):
        return b"T" if value else b"F"
    if isinstance(value, int):
        return b"i" + _sized(value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True))
    if isinstance(value, float):
        return b"f" + struct.pack("<d", value)
    if isinstance(value, str):
        return b"s" + _sized(value.encode("utf-8", "surrogatepass"))
    if isinstance(value, bytes):
        return b"b" + _sized(value)
    if isinstance(value, list | tuple):
        return b"l" + struct.pack("<I", len(value)) + b"".join(_encode_value(item, depth + 1) for item in value)
    if isinstance(value, Mapping):
        items = sorted((_encode_value(key, depth + 1), _encode_value(item, depth + 1)) for key, item in value.items())
        return b"d" + struct.pack("<I", len(items)) + b"".join(key + item for key, item in items)
    raise ValueError(f"extra key of type {type(value).__name__}")


def ephemeral_key(epoch: int = 0) -> IdentityKey:
    """A key of this process alone: its ids compare with nobody else's."""
    return IdentityKey(secrets.token_bytes(SECRET_BYTES), secrets.token_bytes(NONCE_BYTES), epoch)


def load_key(path: str | os.PathLike[str], epoch: int = 0) -> IdentityKey:
    """The key in file ``path``: 32 bytes of key, then 32 of canary nonce, readable by its owner only.

    Raises :class:`KvcensusError` if it is missing, unreadable, of another size, or open to group or others.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise KvcensusError(f"key file {path}: {error.strerror or error}; create one or name another with --key-file") from None
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise KvcensusError(f"key file {path}: not a regular file")
        mode = stat.S_IMODE(status.st_mode)
        if mode & ~0o600:
            raise KvcensusError(f"key file {path}: mode {mode:04o} lets others at it; run: chmod 600 {path}")
        data = os.read(descriptor, KEY_FILE_BYTES + 1)
    finally:
        os.close(descriptor)
    if len(data) != KEY_FILE_BYTES:
        size = f"{len(data)} bytes" if len(data) < KEY_FILE_BYTES else f"more than {KEY_FILE_BYTES} bytes"
        raise KvcensusError(f"key file {path}: {size}, a key is exactly {KEY_FILE_BYTES} (32 of key, 32 of canary nonce)")
    return IdentityKey(data[:SECRET_BYTES], data[SECRET_BYTES:], epoch)


def create_key(path: str | os.PathLike[str], epoch: int = 0) -> IdentityKey:
    """Write a new random key to ``path`` with mode 0600, and return it. Never replaces a file.

    The name appears with its whole content at once, so that a process starting beside this one reads a key or no file.
    Raises :class:`KvcensusError` if ``path`` exists or cannot be written.
    """
    target = Path(path)
    key = ephemeral_key(epoch)
    try:
        descriptor, draft = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)  # mkstemp: O_EXCL, 0600
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(key.secret + key.nonce)
                file.flush()
                os.fsync(file.fileno())
            os.link(draft, target)  # like O_EXCL: fails if the name is taken
        finally:
            Path(draft).unlink()
    except FileExistsError:
        raise KvcensusError(f"key file {path}: exists already; a key is never replaced") from None
    except OSError as error:
        raise KvcensusError(f"key file {path}: cannot be written: {error.strerror or error}") from None
    return key


def load_or_create_key(path: str | os.PathLike[str], epoch: int = 0) -> tuple[IdentityKey, bool]:
    """The key in ``path``, made now if there is none, and whether it was made. Safe when several processes start at once."""
    if not Path(path).exists():
        try:
            return create_key(path, epoch), True
        except KvcensusError:
            if not Path(path).exists():
                raise
    return load_key(path, epoch), False
