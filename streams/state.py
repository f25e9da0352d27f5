"""What lies on the state topic: snapshots in chunks, and the manifests that say which of them hold together. Pure.

A *snapshot* is one owner's part of what an agent knows: one rank, one slice of a content shard, the merger. It is written as chunks
under keys of its own, so writing one never touches another. A *manifest* names, for one agent and partition, the snapshots that hold,
and the position from which to read on. It is written after its chunks were acknowledged; what it replaced is deleted after that. So
whatever moment a worker is killed at, the last manifest on the topic is whole.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import msgspec

FORMAT = 1
"""Of keys, chunks and manifests, and of the cores' dumps; raise it when one of them changes. Others are not used."""

CHUNK_BYTES = 256 * 1024
"""Largest part of a snapshot in one message: well below the usual limit of a broker (1 MiB)."""


class Rules(msgspec.Struct, frozen=True):
    """What a snapshot must have been made under to be of use: everything that changes what a core holds or says.

    ``input_id`` is the broker's own id of the topic that is read: positions mean nothing in another topic. Empty, where the broker told
    none, it fits any.
    """

    semantics_version: int
    window_us: int
    partitions: int
    grace_us: int
    history_us: int
    history_blocks: int
    input_id: str = ""


class Saved(msgspec.Struct, frozen=True):
    """One snapshot on the topic. ``position``: the first input offset that is not in it. ``first_offset``: of its first chunk."""

    snapshot: str
    chunks: int
    size: int
    checksum: int
    position: int
    first_offset: int


class Manifest(msgspec.Struct, frozen=True):
    """What holds for one agent and partition. ``resume``: the input offset to read on from.

    ``epoch`` grows whenever a worker takes the partition over, ``number`` with each manifest within it.
    """

    format: int
    epoch: int
    number: int
    rules: Rules
    resume: int
    owners: dict[str, Saved]


NOTHING_NEEDED = 2**63 - 1
"""Of an agent that has nothing on the state topic: the offset from which it would have to be read."""

Pair = tuple[bytes, bytes | None]
"""Key and value of a message; no value deletes the key."""


def manifest_key(agent: str) -> bytes:
    """Key of an agent's manifest, in the state partition of its input partition."""
    return msgspec.msgpack.encode((agent,))


def chunk_key(agent: str, owner: str, snapshot: str, number: int) -> bytes:
    """Key of one chunk."""
    return msgspec.msgpack.encode((agent, owner, snapshot, number))


def chunks(agent: str, owner: str, snapshot: str, data: bytes) -> list[Pair]:
    """``data`` as messages; at least one."""
    return [
        (chunk_key(agent, owner, snapshot, number), data[start : start + CHUNK_BYTES])
        for number, start in enumerate(range(0, max(len(data), 1), CHUNK_BYTES))
    ]


def deletions(agent: str, owner: str, saved: Saved) -> Iterator[Pair]:
    """Messages that delete a snapshot."""
    return ((chunk_key(agent, owner, saved.snapshot, number), None) for number in range(saved.chunks))


@dataclass(slots=True)
class Restored:
    """What a partition begins with. ``owners``: position and dump of each; ``why`` names what was not used, for the log, if anything.

    ``strays`` are chunks that no manifest names: of a snapshot whose writer was ended. ``saved`` are the snapshots behind ``owners``.
    """

    resume: int = 0
    owners: dict[str, tuple[int, bytes]] = field(default_factory=dict)
    saved: dict[str, Saved] = field(default_factory=dict)
    epoch: int = 0
    strays: list[bytes] = field(default_factory=list)
    why: str | None = None
    found: bool = False


class StateLog:
    """One partition of the state topic, as far as it was read: :meth:`take` every message in order, then :meth:`restore` each agent."""

    def __init__(self) -> None:
        self._chunks: dict[bytes, bytes] = {}
        self._manifests: dict[str, list[Manifest]] = {}
        self._foreign: set[str] = set()
        self.unreadable = 0

    def take(self, key: bytes | None, value: bytes | None) -> None:
        """One message. What is not ours is counted and left alone."""
        try:
            parts = msgspec.msgpack.decode(key or b"", type=list[str | int])
        except msgspec.DecodeError:
            parts = []
        if len(parts) not in (1, 4):
            self.unreadable += 1
            return
        if len(parts) == 1:
            self._take_manifest(str(parts[0]), value)
        elif value is None:
            self._chunks.pop(key or b"", None)
        else:
            self._chunks[key or b""] = value

    def _take_manifest(self, agent: str, value: bytes | None) -> None:
        try:
            manifest = msgspec.msgpack.decode(value or b"", type=Manifest)
        except msgspec.DecodeError:
            self.unreadable += 1
            self._foreign.add(agent)
            return
        self._manifests.setdefault(agent, []).append(manifest)

    def restore(self, agent: str, rules: Rules) -> Restored:
        """The furthest manifest of ``agent`` that is whole and was made under ``rules``; else nothing, and why.

        A worker that lost its partition without knowing may have written after the one that took it over. Whatever is whole is right:
        what an owner knows hangs on the input alone. So the one counts from which the least must be read again.
        """
        manifests = sorted(self._manifests.get(agent, ()), key=lambda each: (each.resume, each.epoch, each.number), reverse=True)
        out = Restored(epoch=max((each.epoch for each in manifests), default=0))
        if agent in self._foreign:
            out.why = "of another kind"
        for manifest in manifests:
            if manifest.format != FORMAT:
                out.why = out.why or f"of format {manifest.format}, not {FORMAT}"
            elif differences := [*_differences(manifest.rules, rules)]:
                out.why = out.why or f"made under other rules: {', '.join(differences)}"
            elif (owners := self._assembled(agent, manifest)) is None:
                out.why = out.why or "not whole"
            else:
                out.resume, out.owners, out.saved, out.found = manifest.resume, owners, dict(manifest.owners), True
                break
        named = {chunk_key(agent, owner, saved.snapshot, number) for owner, saved in out.saved.items() for number in range(saved.chunks)}
        out.strays = [key for key in self._chunks if _agent_of(key) == agent and key not in named]
        return out

    def _assembled(self, agent: str, manifest: Manifest) -> dict[str, tuple[int, bytes]] | None:
        owners: dict[str, tuple[int, bytes]] = {}
        if manifest.resume < 0:
            return None
        for owner, saved in manifest.owners.items():
            if saved.chunks > len(self._chunks) or saved.position < 0:
                return None  # also where somebody else's number would have us look for chunks for ever
            data = b"".join(self._chunks.get(chunk_key(agent, owner, saved.snapshot, number), b"") for number in range(saved.chunks))
            if len(data) != saved.size or zlib.crc32(data) != saved.checksum:
                return None
            owners[owner] = (saved.position, data)
        return owners


def _agent_of(key: bytes) -> str:
    return str(msgspec.msgpack.decode(key)[0])


def _differences(one: Rules, other: Rules) -> Iterator[str]:
    for name in one.__struct_fields__:
        if name == "input_id" and not (one.input_id and other.input_id):
            continue
        if getattr(one, name) != getattr(other, name):
            yield f"{name} {getattr(one, name)}, now {getattr(other, name)}"


class Book:
    """The snapshots of one agent and partition that this worker wrote or found: what the next manifest says. Pure.

    ``writer`` tells this worker from others. ``needs`` is the offset on the state topic before which nothing of this is needed; ``None``
    until a manifest was written here, if one was found.
    """

    def __init__(self, agent: str, rules: Rules, restored: Restored, writer: str) -> None:
        self.agent = agent
        self.epoch = restored.epoch + 1
        self.saved = dict(restored.saved)
        self.needs: int | None = None if restored.found else NOTHING_NEEDED
        self._rules = rules
        self._writer = writer
        self._number = 0
        self._snapshots = 0
        self._replaced: list[Pair] = [(key, None) for key in restored.strays]

    def snapshot_id(self) -> str:
        """A new one: no other worker, and no other time, has it."""
        self._snapshots += 1
        return f"{self.epoch}.{self._writer}.{self._snapshots}"

    def ours(self, owner: str) -> bool:
        """Whether the snapshot of ``owner`` was written here."""
        kept = self.saved.get(owner)
        return kept is not None and kept.snapshot.startswith(f"{self.epoch}.{self._writer}.")

    def keep(self, owner: str, saved: Saved) -> None:
        """``saved`` was acknowledged: the next manifest names it."""
        before = self.saved.get(owner)
        if before is not None:
            self._replaced += deletions(self.agent, owner, before)
        self.saved[owner] = saved

    def forget(self, owners: Iterable[str]) -> None:
        """These are no longer there."""
        for owner in owners:
            before = self.saved.pop(owner, None)
            if before is not None:
                self._replaced += deletions(self.agent, owner, before)

    def manifest(self, resume: int) -> Manifest:
        """The next one."""
        self._number += 1
        return Manifest(FORMAT, self.epoch, self._number, self._rules, resume, dict(self.saved))

    def replaced(self) -> list[Pair]:
        """What may be deleted once the manifest that no longer names it was acknowledged; asked for once."""
        replaced, self._replaced = self._replaced, []
        return replaced


def saved_as(snapshot: str, data: bytes, position: int, first_offset: int) -> Saved:
    """The entry of a manifest for ``data``."""
    return Saved(snapshot, -(-max(len(data), 1) // CHUNK_BYTES), len(data), zlib.crc32(data), position, first_offset)
