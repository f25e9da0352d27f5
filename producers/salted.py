"""Engine hashes that do not cover the salt, made to. Pure.

An engine may keep two prompts of equal tokens and different salts apart and yet give their blocks one hash. In such a stream
a hash names a block only together with the salt that its store event names, so for all that follows (bridge, pseudonyms) the
two become one *salted hash*. Removals name no salt: one means the hash under every salt it was stored under, which closes too
much rather than too little. The duplicate footprint can only be understated by that; and a block that was closed too early and
is stored again had left the cache by then, for an engine stores no block twice under one salt.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Container

import msgspec

from producers.identity import ValuePseudonym, encode_value
from producers.wire import BlockHash, Stored

_MARK = b"\0salted\0"
_TAG_END = len(_MARK) + 16


class SaltedHashes:
    """The salted hashes of one rank and life. ``pseudonym`` stands for salts, so that none is kept in clear."""

    def __init__(self, pseudonym: ValuePseudonym) -> None:
        self._pseudonym = pseudonym
        self._known: dict[BlockHash, list[bytes]] = {}

    def apart(self, event: Stored) -> Stored:
        """``event`` with salted hashes, and the salt among the extra keys of the block that starts the prompt; itself if unsalted.

        With a salt that has no encoding it comes back without its tokens and under a salt of its own.
        """
        salt = event.cache_salt
        if salt is None or salt == "":
            return event
        try:
            tag, readable = self._pseudonym(encode_value(salt)), True
        except ValueError:
            tag, readable = self._pseudonym(b""), False
        extra_keys = event.extra_keys
        if event.parent_block_hash is None:
            first, *others = extra_keys or [None] * len(event.block_hashes)
            given = first if isinstance(first, list) else [] if first is None else [first]
            extra_keys = [given if salt in given else [salt, *given], *others]
        return msgspec.structs.replace(
            event,
            block_hashes=[_salted(block_hash, tag) for block_hash in event.block_hashes],
            parent_block_hash=None if event.parent_block_hash is None else _salted(event.parent_block_hash, tag),
            extra_keys=extra_keys,
            token_ids=event.token_ids if readable else None,
        )

    def note(self, block_hash: BlockHash) -> None:
        """Take in a hash that is now known; nothing to do for an unsalted one."""
        if (engine_hash := _engine_hash(block_hash)) is not None and isinstance(block_hash, bytes):
            known = self._known.setdefault(engine_hash, [])
            if block_hash not in known:
                insort(known, block_hash)  # in an order that a bridge which was read back has as well

    def forget(self, block_hash: BlockHash) -> None:
        """The opposite of :meth:`note`."""
        engine_hash = _engine_hash(block_hash)
        known = self._known.get(engine_hash) if engine_hash is not None else None
        if engine_hash is not None and known is not None and isinstance(block_hash, bytes):
            known.remove(block_hash)
            if not known:
                del self._known[engine_hash]

    def clear(self) -> None:
        """Forget all of them."""
        self._known.clear()

    def meant(self, hashes: list[BlockHash], unsalted: Container[BlockHash]) -> list[BlockHash]:
        """What a removal of these engine hashes means: each under every salt known, and as it is where ``unsalted`` holds it too."""
        if not self._known:
            return hashes
        meant: list[BlockHash] = []
        for block_hash in hashes:
            salted = self._known.get(block_hash, ())
            meant.extend(salted)
            if not salted or block_hash in unsalted:
                meant.append(block_hash)
        return meant


def _salted(block_hash: BlockHash, tag: bytes) -> bytes:
    if isinstance(block_hash, int):
        return _MARK + tag + b"i" + block_hash.to_bytes(8, "big")
    return _MARK + tag + b"b" + block_hash


def _engine_hash(block_hash: BlockHash) -> BlockHash | None:
    """The engine's own hash in a salted one; None for one that is not salted."""
    if not isinstance(block_hash, bytes) or not block_hash.startswith(_MARK):
        return None
    kind, rest = block_hash[_TAG_END : _TAG_END + 1], block_hash[_TAG_END + 1 :]
    return int.from_bytes(rest, "big") if kind == b"i" else rest
