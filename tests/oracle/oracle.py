"""The counting rules, written down a second time and as plainly as possible: the reference the real pipeline is compared with.

Nothing here streams, windows or forgets. One rank is read from its first message to its last with plain dictionaries, each
block of each group being one `Block`; what the ranks held is kept as a list of intervals per (tier, content), and the duplicate
footprint is a sweep over those. Time is integer microseconds of engine time.

Contents are chains compared by value (parent, tokens, extra keys, adapter, model, block size) and interned to small integers:
no hashing, no key. Only equality matters.
"""

from __future__ import annotations

import base64
import gzip
import json
import sys
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec

GPU = "GPU"
CAUSES = ("evicted", "cleared", "restarted", "ambiguous_reload")
PRIMARY_KINDS = ("full_attention", "mla_attention", "sink_full_attention")
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


@dataclass
class RankInput:
    """What one rank sent, in arrival order, and what its operator declared about it."""

    instance_id: str
    dp_rank: int
    frames: list[tuple[int, bytes]]
    reuse_reporting: str = "unlabelled"
    removals: str = "per_copy"
    workload: str | None = None
    model: str | None = None


# --------------------------------------------------------------------------------------------------- identity


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

    def of(self, parent: int, tokens: list[int], extra: Hashable, adapter: str | None, model: str | None, block_size: int) -> int:
        key = (parent, tuple(tokens), extra, adapter, model, block_size)
        if key not in self._ids:
            self._ids[key] = len(self.size)
            self.size.append(block_size)
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
    assignable = size > 0 and len(run.tokens) == len(run.hashes) * size
    if assignable and (run.parent is None or run.parent in known):
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


def ranks_of_capture(
    path: str | Path,
    instance_id: str,
    *,
    reuse_reporting: str = "unlabelled",
    removals: str = "per_copy",
    model: str | None = None,
    workload: str | None = None,
) -> list[RankInput]:
    """One capture file as one instance."""
    ranks: dict[int, RankInput] = {}
    for dp_rank, seq, payload in read_capture(path):
        if dp_rank not in ranks:
            ranks[dp_rank] = RankInput(instance_id, dp_rank, [], reuse_reporting, removals, workload, model)
        ranks[dp_rank].frames.append((seq, payload))
    return [ranks[k] for k in sorted(ranks)]


# --------------------------------------------------------------------------------------------------- one rank


@dataclass
class Lost:
    """How and when the last residency of something ended; `order` tells two ends at one time apart."""

    at_us: int
    cause: str
    order: int
    marked: bool = False


@dataclass
class Block:
    """One engine hash in one group, within one life."""

    content: int | None = None
    size: int = 0
    copies: dict[str, int] = field(default_factory=dict)  # per tier, as repeat compute reads the stream
    held: set[str] = field(default_factory=set)  # tiers in which it is resident, as the duplicate footprint reads it
    lost: Lost | None = None  # its last residency ended under observation, and no GPU store has consumed that yet
    marked: bool = False  # it was open off the GPU at an ambiguous clear, and no GPU store has come since

    def resident(self, tier: str) -> bool:
        return self.copies.get(tier, 0) > 0

    def off_gpu(self) -> bool:
        return any(n > 0 for tier, n in self.copies.items() if tier != GPU)

    def anywhere(self) -> bool:
        return any(n > 0 for n in self.copies.values())


@dataclass
class Tally:
    tokens: int = 0
    blocks: int = 0

    def add(self, tokens: int, blocks: int = 1) -> None:
        self.tokens += tokens
        self.blocks += blocks


@dataclass
class GroupTally:
    """One group's counters within one life."""

    stored: Tally = field(default_factory=Tally)
    evicted: Tally = field(default_factory=Tally)
    causes: dict[str, Tally] = field(default_factory=lambda: {c: Tally() for c in (*CAUSES, "concurrent")})


@dataclass
class Life:
    known: dict[Hashable, int] = field(default_factory=dict)
    blocks: dict[Hashable, dict[int, Block]] = field(default_factory=lambda: defaultdict(dict))  # hash -> group -> block
    alike: dict[tuple[int, int], list[Block]] = field(default_factory=lambda: defaultdict(list))  # (group, content) -> ever had it
    groups: dict[int, str | None] = field(default_factory=dict)  # seen in GPU stores, with their kind
    tallies: dict[int, GroupTally] = field(default_factory=lambda: defaultdict(GroupTally))

    def all_blocks(self) -> list[tuple[int, Block]]:
        return [(group, block) for of_hash in self.blocks.values() for group, block in of_hash.items()]

    def primary(self) -> int | None:
        """The lowest group that keeps every token; without one, the lowest."""
        if not self.groups:
            return None
        candidates = [g for g, kind in self.groups.items() if kind is None or kind.lower() in PRIMARY_KINDS]
        return min(candidates or self.groups)


class Rank:
    """Reads one rank's messages; afterwards `lives`, `recomputes`, `intervals` and the rest hold what was found."""

    def __init__(self, given: RankInput, contents: Contents) -> None:
        if given.reuse_reporting not in ("none", "labelled", "unlabelled") or given.removals not in ("per_copy", "last_copy"):
            raise ValueError("unknown declaration")
        self.given = given
        self.contents = contents
        self.unlabelled = given.reuse_reporting == "unlabelled"
        self.life = Life()
        self.lives = [self.life]
        self.past: dict[tuple[int, int], Lost] = {}  # earlier lives, by (group, content)
        self.recomputes: list[tuple[str, int, int, str, int, int, int]] = []
        self.unjoined = 0
        self.order = 0
        self.times: list[int] = []
        self.stretches: list[tuple[int, int]] = []  # observed
        self.open_count: dict[tuple[str, int], int] = defaultdict(int)
        self.open_since: dict[tuple[str, int], int] = {}
        self.intervals: dict[tuple[str, int], list[tuple[int, int | None]]] = defaultdict(list)
        self.tiers: set[str] = set()
        self._read()
        for key, since in self.open_since.items():
            self.intervals[key].append((since, None))

    # ---- continuity

    def _read(self) -> None:
        last: int | None = None  # of this life
        newest: int | None = None
        seen: set[tuple[int, bytes]] = set()
        previous: tuple[int, int] | None = None  # (seq, time) of the last batch received whole
        reset_due = False
        for seq, payload in self.given.frames:
            try:
                time, events = decode_batch(payload)
            except (ValueError, KeyError, TypeError, OverflowError, msgspec.DecodeError):
                time, events = None, []
            if last is not None and seq <= last:
                if (seq, payload) in seen or (time is not None and newest is not None and time <= newest):
                    continue
                reset_due, last, newest, seen, previous = True, None, None, set(), None
            seen.add((seq, payload))
            last = seq
            if time is None:  # refused: what lies between its neighbours is not observed
                previous = None
                continue
            if reset_due:
                self._reset(time)
                reset_due = False
            if previous is not None and previous[0] + 1 == seq and time > previous[1]:
                self.stretches.append((previous[1], time))
            previous = (seq, time)
            newest = time if newest is None else max(newest, time)
            self.times.append(time)
            resolve_batch([e for e in events if isinstance(e, Run)], self.life.known, self.contents, self.given.model)
            for event in events:
                if isinstance(event, Run):
                    self._store(event, time)
                elif isinstance(event, Removal):
                    self._remove(event, time)
                else:
                    self._clear(event, time)

    def observed_us(self) -> int:
        total, reached = 0, None
        for start, end in sorted(self.stretches):
            begin = start if reached is None else max(start, reached)
            total += max(0, end - begin)
            reached = end if reached is None else max(reached, end)
        return total

    # ---- what the footprint sees

    def _hold(self, block: Block, tier: str, time: int) -> None:
        if tier not in block.held:
            block.held.add(tier)
            self._count(tier, block.content, +1, time)

    def _let_go(self, block: Block, tier: str, time: int) -> None:
        if tier in block.held:
            block.held.remove(tier)
            self._count(tier, block.content, -1, time)

    def _set_content(self, block: Block, group: int, content: int | None, time: int) -> None:
        if content == block.content:
            return
        if content is not None:
            self.life.alike[group, content].append(block)
        for tier in block.held:
            self._count(tier, block.content, -1, time)
            self._count(tier, content, +1, time)
        block.content = content

    def _count(self, tier: str, content: int | None, change: int, time: int) -> None:
        if content is None:
            return
        key = (tier, content)
        before = self.open_count[key]
        self.open_count[key] = before + change
        if before == 0:
            self.open_since[key] = time
        elif before + change == 0:
            since = self.open_since.pop(key)
            if time > since:
                self.intervals[key].append((since, time))

    # ---- events

    def _store(self, run: Run, time: int) -> None:
        for block_hash, content in zip(run.hashes, run.contents, strict=True):
            if content is not None:
                self._fill_in(block_hash, content, time)
            if run.remote or (self.given.reuse_reporting == "labelled" and run.reused):
                continue
            block = self.life.blocks[block_hash].setdefault(run.group, Block())
            if content is not None:
                self._set_content(block, run.group, content, time)
                block.size = self.contents.size[content]
            elif run.block_size and block.size != run.block_size:
                self._set_content(block, run.group, None, time)
                block.size = run.block_size
            self.tiers.add(run.tier)
            if run.tier == GPU:
                if run.kind is not None or run.group not in self.life.groups:
                    self.life.groups[run.group] = run.kind
                self._count_gpu_store(block, run.group, time)
            block.copies[run.tier] = block.copies.get(run.tier, 0) + 1
            self._hold(block, run.tier, time)

    def _fill_in(self, block_hash: Hashable, content: int, time: int) -> None:
        size = self.contents.size[content]
        for group, block in self.life.blocks[block_hash].items():
            if block.content is None and block.size in (0, size):
                self._set_content(block, group, content, time)
                block.size = size

    def _count_gpu_store(self, block: Block, group: int, time: int) -> None:
        tally = self.life.tallies[group]
        tally.stored.add(block.size)
        past = self.past.pop((group, block.content), None) if block.content is not None else None
        lost, block.lost = block.lost, None
        if lost is not None:
            lost.marked = block.marked or (past is not None and past.marked)
        block.marked = False
        if block.off_gpu():
            return  # a reload
        if block.resident(GPU):
            if not self.unlabelled:
                tally.causes["concurrent"].add(block.size)
            return
        if lost is None and past is not None:
            twins = [b for b in self.life.alike[group, block.content or 0] if b is not block and b.content == block.content]
            lost = None if any(b.anywhere() for b in twins) else past
        if lost is not None:
            cause = "ambiguous_reload" if lost.marked else lost.cause
            tally.causes[cause].add(block.size)
            self.recomputes.append((self.given.instance_id, self.given.dp_rank, group, cause, block.size, lost.at_us, time))

    def _remove(self, removal: Removal, time: int) -> None:
        if removal.remote:
            return
        for block_hash in removal.hashes:
            block = self.life.blocks[block_hash].get(removal.group)
            if block is None or not block.resident(removal.tier):
                self.unjoined += 1
                continue
            all_at_once = self.given.removals == "last_copy"
            ended = block.copies[removal.tier] if all_at_once else 1
            block.copies[removal.tier] -= ended
            if self.unlabelled or not block.resident(removal.tier):
                self._let_go(block, removal.tier, time)
            if removal.tier == GPU:
                self.life.tallies[removal.group].evicted.add(block.size * (1 if self.unlabelled else ended))
            self._note_end(block, time, "evicted")

    def _clear(self, clear: Clear, time: int) -> None:
        if clear.remote:
            return
        ambiguous = clear.tier is None and clear.group is None and any(b.off_gpu() for _, b in self.life.all_blocks())
        for group, block in self.life.all_blocks():
            if clear.group is None or clear.group == group:
                block.marked = block.marked or (ambiguous and block.off_gpu())
                self._close(block, [clear.tier] if clear.tier is not None else list(block.copies), time, "cleared")

    def _close(self, block: Block, tiers: Iterable[str], time: int, cause: str) -> None:
        was_open = False
        for tier in tiers:
            was_open = was_open or block.resident(tier)
            block.copies[tier] = 0
            self._let_go(block, tier, time)
        if was_open:
            self._note_end(block, time, cause)

    def _note_end(self, block: Block, time: int, cause: str) -> None:
        if not block.anywhere():
            self.order += 1
            block.lost = Lost(time, cause, self.order)

    def _reset(self, time: int) -> None:
        """The process came back empty: everything ends at the boundary, and from here on only content matches the old life."""
        for group, block in self.life.all_blocks():
            self._close(block, list(block.copies), time, "restarted")
            if block.lost is not None and block.content is not None:
                block.lost.marked = block.marked
                key = (group, block.content)
                old = self.past.get(key)
                if old is None or old.order < block.lost.order:
                    if old is not None and old.marked:
                        block.lost.marked = True
                    self.past[key] = block.lost
                elif block.lost.marked:
                    old.marked = True
        self.life = Life()
        self.lives.append(self.life)

    # ---- figures of this rank, from the primary group of each life

    def primary_tallies(self) -> Iterator[GroupTally]:
        for life in self.lives:
            group = life.primary()
            if group is not None:
                yield life.tallies[group]

    def cause(self, cause: str) -> Tally:
        total = Tally()
        for tally in self.primary_tallies():
            total.add(tally.causes[cause].tokens, tally.causes[cause].blocks)
        return total


# ---------------------------------------------------------------------------------------- duplicate footprint

Intervals = list[tuple[int, int | None]]


def counts_over_time(intervals: Intervals) -> list[tuple[int, int]]:
    """[(time, how many are open from then on)], after netting everything that happens at one time."""
    changes: dict[int, int] = defaultdict(int)
    for start, end in intervals:
        changes[start] += 1
        if end is not None:
            changes[end] -= 1
    out, n = [], 0
    for time in sorted(changes):
        if changes[time]:
            n += changes[time]
            out.append((time, n))
    return out


def spans_above_zero(counts: list[tuple[int, int]]) -> Intervals:
    out: Intervals = []
    since: int | None = None
    for time, n in counts:
        if n > 0 and since is None:
            since = time
        elif n == 0 and since is not None:
            out.append((since, time))
            since = None
    if since is not None:
        out.append((since, None))
    return out


class Steps:
    """A step function of time given by its changes."""

    def __init__(self) -> None:
        self.tokens: dict[int, int] = defaultdict(int)
        self.blocks: dict[int, int] = defaultdict(int)

    def add_excess(self, counts: list[tuple[int, int]], size: int) -> None:
        """max(0, count - 1) blocks of `size` tokens."""
        before = 0
        for time, n in counts:
            now = max(0, n - 1)
            self.blocks[time] += now - before
            self.tokens[time] += (now - before) * size
            before = now


def summary(changes: list[dict[int, int]], span: tuple[int, int]) -> dict[str, Any]:
    start, end = span
    merged: dict[int, int] = defaultdict(int)
    for part in changes:
        for time, change in part.items():
            merged[time] += change
    instants = sorted({start, end} | {t for t in merged if start < t < end})
    value = sum(change for time, change in merged.items() if time <= start)
    area, highest = 0, 0
    for here, there in pairwise(instants):
        if here != start:
            value += merged.get(here, 0)
        area += value * (there - here)
        highest = max(highest, value)
    final = sum(change for time, change in merged.items() if time <= end)
    return {"mean": (area, end - start) if end > start else (0, 1), "max": max(highest, final), "end": final}


def footprint(ranks: list[Rank], tier: str, span: tuple[int, int], skew_us: int, contents: Contents) -> dict[str, Any]:
    held: dict[int, dict[str, Intervals]] = defaultdict(lambda: defaultdict(list))  # content -> instance -> its ranks' intervals
    for rank in ranks:
        for (where, content), intervals in rank.intervals.items():
            if where == tier:
                held[content][rank.given.instance_id].extend(intervals)
    inside, between = Steps(), Steps()
    for content, instances in held.items():
        matured: Intervals = []
        for intervals in instances.values():
            counts = counts_over_time(intervals)
            inside.add_excess(counts, contents.size[content])
            for opened, ended in spans_above_zero(counts):
                if ended is None or opened + skew_us < ended:
                    matured.append((opened + skew_us, ended))
        between.add_excess(counts_over_time(matured), contents.size[content])

    def figures_of(*steps: Steps) -> dict[str, Any]:
        return {
            "extra_tokens": summary([s.tokens for s in steps], span),
            "extra_blocks": summary([s.blocks for s in steps], span),
        }

    return {**figures_of(inside, between), "inside_instances": figures_of(inside), "between_instances": figures_of(between)}


# ------------------------------------------------------------------------------------------------------ figures


def figures(ranks: list[RankInput], skew_us: int = 1_000_000) -> dict[str, Any]:
    """All figures over the whole span. `recomputes` lists every group; the sums count each life's primary group only."""
    contents = Contents()
    read = [Rank(r, contents) for r in ranks]
    times = [t for r in read for t in r.times]
    span = (min(times), max(times)) if times else (0, 0)
    observed = sum(r.observed_us() for r in read)
    expected = len(read) * (span[1] - span[0])

    repeat: dict[str, Any] = {}
    for cause in CAUSES:
        parts = [r.cause(cause) for r in read]
        repeat[cause] = {"tokens": sum(p.tokens for p in parts), "blocks": sum(p.blocks for p in parts)}
    known = [r.cause("concurrent") for r in read if not r.unlabelled]
    repeat["concurrent"] = {"tokens": sum(p.tokens for p in known), "blocks": sum(p.blocks for p in known)} if known else None

    duplicate = footprint(read, GPU, span, skew_us, contents)
    others = sorted({tier for r in read for tier in r.tiers} - {GPU})
    duplicate["other_tiers"] = {tier: footprint(read, tier, span, skew_us, contents) for tier in others}
    return {
        "span": [span[0], span[1]],
        "repeat_compute": repeat,
        "coverage": Fraction(observed, expected) if expected else Fraction(0),
        "duplicate_footprint": duplicate,
        "ranks": [rank_figures(r) for r in read],
        "recomputes": sorted(row for r in read for row in r.recomputes),
    }


def rank_figures(rank: Rank) -> dict[str, Any]:
    causes: dict[str, Any] = {}
    for cause in (*CAUSES, "concurrent"):
        tally = rank.cause(cause)
        causes[cause] = {"tokens": tally.tokens, "blocks": tally.blocks}
    if rank.unlabelled:
        causes["concurrent"] = None
    return {
        "instance_id": rank.given.instance_id,
        "dp_rank": rank.given.dp_rank,
        "stored_tokens": None if rank.unlabelled else sum(t.stored.tokens for t in rank.primary_tallies()),
        "evicted_tokens": sum(t.evicted.tokens for t in rank.primary_tallies()),
        "unjoined_evicts": rank.unjoined,
        "recompute": causes,
        "observed_us": rank.observed_us(),
        "lives": len(rank.lives),
    }


if __name__ == "__main__":  # oracle.py [none|labelled|unlabelled] CAPTURE...: each capture one instance, one fleet of them all
    reuse = sys.argv[1] if sys.argv[1] in ("none", "labelled", "unlabelled") else "unlabelled"
    paths = [a for a in sys.argv[1:] if a not in ("none", "labelled", "unlabelled")]
    fleet = [r for p in paths for r in ranks_of_capture(p, Path(p).name.removesuffix(".gz").removesuffix(".jsonl"), reuse_reporting=reuse)]
    json.dump(figures(fleet), sys.stdout, indent=1, default=str)
    print()
