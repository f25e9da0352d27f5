"""Block hashes of a simulated engine: a chain over (parent, tokens, extra keys) from a root that may differ in each process life."""

from __future__ import annotations

from array import array
from hashlib import blake2b
from typing import Literal

from producers.simulate.events import BlockHash

HashForm = Literal["u64", "bytes32"]
"""``u64``: the last 8 bytes of the digest as a number, vLLM's default. ``bytes32``: the raw digest."""


class HashChain:
    """Block hashes of one engine process life.

    ``root`` plays the part of the seed that vLLM 0.16 to 0.28 draws per process: two chains of one root agree on all content.
    """

    def __init__(self, root: bytes, block_size: int, form: HashForm = "u64") -> None:
        self._root = blake2b(root, digest_size=32).digest()
        self.block_size = block_size
        self.form = form

    def digests(self, tokens: array[int], upto: int, salt: str | None, adapter: str | None, known: list[bytes]) -> None:
        """Extend ``known``, the 32-byte digests of the first full blocks of ``tokens``, to ``upto`` blocks, in place."""
        size = self.block_size
        parent = known[-1] if known else self._root
        extra = f"\0a{adapter}".encode() if adapter is not None else b""
        for index in range(len(known), upto):
            content = parent + tokens[index * size : (index + 1) * size].tobytes() + extra
            if index == 0 and salt is not None:
                content += f"\0s{salt}".encode()
            parent = blake2b(content, digest_size=32).digest()
            known.append(parent)

    def published(self, digest: bytes) -> BlockHash:
        """The form in which a digest leaves the engine."""
        return int.from_bytes(digest[-8:], "big") if self.form == "u64" else digest
