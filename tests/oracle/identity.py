"""What a payload says, and which content each of its blocks is: the first half of the reference, read from frames alone.

Contents are chains compared by value (parent, tokens, extra keys, adapter, model, block size) and interned to small integers:
no hashing, no key. Only equality matters.
"""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Hashable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

GPU = "GPU"
ROOT = -1
STORED_FIELDS = (
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
    "extra_keys",
    "group_idx",
    "kv_cache_spec_kind",
    "kv_cache_spec_sliding_window",
)
REMOVED_FIELDS = ("block_hashes", "medium", "group_idx")


def freeze(value: Any) -> Hashable:
    """A hashable form of a decoded value in which 1, True and "1" stay different."""
    if isinstance(value, list | tuple):
        return ("list", tuple(freeze(v) for v in value))
    if isinstance(value, dict):
        return ("map", tuple(sorted(((repr(k), freeze(v)) for k, v in value.items()), key=repr)))
    return (type(value).__name__, value)


class Contents:
    """Every distinct block content, numbered in order of appearance."""

    def __init__(self) -> None:
        self._ids: dict[Hashable, int] = {}
        self.size: list[int] = []
        self.parent: list[int] = []

    def of(self, parent: int, tokens: list[int], extra: Hashable, adapter: str | None, model: str | None, block_size: int) -> int:
        key = (parent, tuple(tokens), extra, adapter, model, block_size)
        if key not in self._ids:
            self._ids[key] = len(self.size)
            self.size.append(block_size)
            self.parent.append(parent)
        return self._ids[key]


@dataclass
class Run:
    """One store event, and the contents its blocks were found to have (None: unresolved)."""

    hashes: list[Hashable]
    parent: Hashable | None
    tokens: list[int]
    block_size: int
    adapter: str | None
    extra: list[Hashable]
    tier: str
    group: int
    kind: str | None
    remote: bool
    reused: bool
    contents: list[int | None] = field(default_factory=list)

    @property
    def assignable(self) -> bool:
        """Whether the tokens are those of the hashes, one block's after another's."""
        return self.block_size > 0 and bool(self.tokens) and len(self.tokens) == len(self.hashes) * self.block_size

    @property
    def before(self) -> list[Hashable | None]:
        """The block that each block of the run continues, as far as the run names one."""
        if not self.assignable:
            return [None] * len(self.hashes)
        return [self.parent, *self.hashes[:-1]]


@dataclass
class Removal:
    hashes: list[Hashable]
    tier: str
    group: int
    remote: bool


@dataclass
class Clear:
    tier: str | None
    group: int | None
    remote: bool


Event = Run | Removal | Clear


def extra_of_block(keys: Any, adapter: str | None) -> Hashable:
    """None and [] are the same; some engines repeat the adapter's name in each block's keys: one such element is dropped."""
    if keys is None or keys == []:
        return None
    items = list(keys) if isinstance(keys, list) else [keys]
    if adapter is not None and adapter in items:
        items.remove(adapter)
    return freeze(items) if items else None


def resolve_batch(runs: list[Run], known: dict[Hashable, int], contents: Contents, model: str | None) -> None:
    """Once in order, then the runs that still have unresolved blocks again, in order, until a pass resolves nothing."""
    for run in runs:
        run.contents = [None] * len(run.hashes)
    while True:
        progress = False
        for run in runs:
            if None not in run.contents:
                continue
            before = run.contents.count(None)
            resolve_run(run, known, contents, model)
            progress = progress or run.contents.count(None) < before
        if not progress:
            return


def resolve_run(run: Run, known: dict[Hashable, int], contents: Contents, model: str | None) -> None:
    size = run.block_size
    if run.assignable and (run.parent is None or run.parent in known):
        parent = ROOT if run.parent is None else known[run.parent]
        for i, block_hash in enumerate(run.hashes):
            parent = contents.of(parent, run.tokens[i * size : (i + 1) * size], run.extra[i], run.adapter, model, size)
            known[block_hash] = parent
            run.contents[i] = parent
        return
    for i, block_hash in enumerate(run.hashes):
        if run.contents[i] is None and block_hash in known and size in (0, contents.size[known[block_hash]]):
            run.contents[i] = known[block_hash]


# ------------------------------------------------------------------------------------------------------- wire


def decode_batch(payload: bytes) -> tuple[int, list[Event]]:
    """(engine time in us, events). Raises on a payload that has to be refused. Unknown events are skipped."""
    batch = msgspec.msgpack.decode(payload)
    if not isinstance(batch, list) or len(batch) < 2:
        raise ValueError("not a batch")
    ts, events = batch[0], batch[1]
    if isinstance(ts, bool) or not isinstance(ts, int | float) or not isinstance(events, list):
        raise ValueError("not a batch")
    out = [decode_event(e) for e in events]
    return round(ts * 1e6), [e for e in out if e is not None]


def decode_event(raw: Any) -> Event | None:
    if isinstance(raw, dict):
        tag, fields = raw["type"], raw
    elif isinstance(raw, list) and raw:
        tag = raw[0]
        names = STORED_FIELDS if tag == "BlockStored" else REMOVED_FIELDS if tag == "BlockRemoved" else ()
        fields = dict(zip(names, raw[1:], strict=False))
    else:
        raise ValueError("not an event")
    medium, group = fields.get("medium"), fields.get("group_idx")
    remote = str(fields.get("locality") or "LOCAL").upper() == "REMOTE"
    if tag in ("AllBlocksCleared", "TierBlocksCleared"):
        return Clear(str(medium).upper() if medium is not None else None, group, remote)
    if tag not in ("BlockStored", "BlockRemoved"):
        return None
    tier = str(medium).upper() if medium is not None else GPU
    hashes = list(fields["block_hashes"])
    if any(isinstance(h, bool) or not isinstance(h, int | bytes) for h in hashes):
        raise ValueError("not a block hash")
    if tag == "BlockRemoved":
        return Removal(hashes, tier, group or 0, remote)
    adapter = fields.get("lora_name")
    keys = list(fields.get("extra_keys") or [])
    keys += [None] * (len(hashes) - len(keys))
    return Run(
        hashes=hashes,
        parent=fields.get("parent_block_hash"),
        tokens=list(fields.get("token_ids") or []),
        block_size=int(fields.get("block_size") or 0),
        adapter=adapter,
        extra=[extra_of_block(k, adapter) for k in keys],
        tier=tier,
        group=group or 0,
        kind=fields.get("kv_cache_spec_kind"),
        remote=remote,
        reused=bool(fields.get("reused")),
    )


def read_capture(path: str | Path) -> list[tuple[int, int, bytes]]:
    """(dp_rank, seq, payload) in arrival order, from any of the three forms of capture file, gzipped or not."""
    data = Path(path).read_bytes()
    if data[:2] == b"\x1f\x8b":
        data = gzip.decompress(data)
    out: list[tuple[int, int, bytes]] = []
    for line in data.splitlines():
        if not line.strip():
            continue
        message = json.loads(line)
        if "payload_hex" in message:
            seq, payload = int(message["seq"]), bytes.fromhex(message["payload_hex"])
        else:
            if message.get("dir") == "send":
                continue
            # live: topic, seq, payload; replayed: the same behind an empty frame, or without the topic. The last two are what counts.
            frames = [base64.b64decode(f) for f in message["frames"]]
            seq, payload = int.from_bytes(frames[-2], "big", signed=True), frames[-1]
            if seq < 0 or not payload:
                continue
        batch = msgspec.msgpack.decode(payload)
        rank = batch[2] if len(batch) > 2 and batch[2] is not None else 0
        out.append((rank, seq, payload))
    return out
