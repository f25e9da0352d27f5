"""The counting rules for one rank, written down a second time and as plainly as possible.

Nothing here streams, windows or bounds anything. A rank is read from its first message to its last with plain dictionaries, each block
of each group being one `Block`; whatever counts is written down as a `Fact` with its time, and figures are sums over facts.
Time is integer microseconds of engine time.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

import msgspec

from schemas.histogram import bucket

from .identity import GPU, Clear, Contents, Removal, Run, decode_batch, resolve_batch

CAUSES = ("evicted", "cleared", "restarted", "ambiguous_reload")
COUNTERS = {
    "evicted": "recompute_evicted",
    "cleared": "recompute_cleared",
    "restarted": "recompute_restarted",
    "concurrent": "recompute_concurrent",
    "ambiguous_reload": "recompute_ambiguous",
}
PRIMARY_KINDS = ("full_attention", "mla_attention", "sink_full_attention")
RATE_SPAN_MS = 10_000
RATE_HORIZON_MS = 3_600_000


@dataclass(frozen=True)
class Declared:
    """What an operator says of a rank from here on."""

    reuse_reporting: str = "unlabelled"
    removals: str = "per_copy"
    workload: str | None = None
    model: str | None = None
    kv_connector: str | None = None
    key_epoch: int = 0
    canary: str = ""
    prefill_rate: float | None = None
    gpus_per_rank: float | None = None
    kv_bytes_per_token: int | None = None
    kv_bytes_by_group: tuple[tuple[int, int], ...] = ()
    staleness_ms: int = 0

    def counted_by(self) -> tuple[object, ...]:
        """What makes it another declaration for a row."""
        return self.reuse_reporting, self.removals, self.workload, self.model, self.kv_connector, self.key_epoch, self.canary


@dataclass(frozen=True)
class Scraped:
    """What the engine's own metrics said."""

    at_ms: int
    usage: float | None = None
    pool: int | None = None
    running: int | None = None
    prompt_tokens: int | None = None
    prompt_tokens_cached: int | None = None
    external_hits: int | None = None


@dataclass(frozen=True)
class Departed:
    """The forwarder stopped on purpose."""


Frame = tuple[int, bytes]
Step = Frame | Declared | Scraped | Departed


@dataclass
class RankInput:
    """What one rank sent, in arrival order, and what its operator declared about it first."""

    instance_id: str
    dp_rank: int
    frames: list[Step] | list[Frame]
    reuse_reporting: str = "unlabelled"
    removals: str = "per_copy"
    workload: str | None = None
    model: str | None = None
    declared: Declared | None = None
    history_us: int | None = None
    history_blocks: int | None = None

    def first(self) -> Declared:
        """The declaration the stream opens with."""
        return self.declared or Declared(self.reuse_reporting, self.removals, self.workload, self.model)


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
    stored_at: int = 0  # when its GPU residency began
    used: bool = False  # the stream showed a use of it since then
    continued: bool = False  # a store since then named it as what it continues
    order: int = 0  # the place of its last loss among all losses
    ordered_at: int = 0
    before: Hashable | None = None  # the block it continues, as the last store that named one says

    def resident(self, tier: str) -> bool:
        return self.copies.get(tier, 0) > 0

    def off_gpu(self) -> bool:
        return any(n > 0 for tier, n in self.copies.items() if tier != GPU)

    def anywhere(self) -> bool:
        return any(n > 0 for n in self.copies.values())


@dataclass(frozen=True)
class Fact:
    """`amount` more of a counter of one group; `bucket` where the counter is a histogram."""

    life: int
    at: int
    group: int
    name: str
    amount: int
    bucket: int = -1


@dataclass(frozen=True)
class Said:
    """Something that stands in the row of one life that holds one instant."""

    life: int
    at: int
    what: str


@dataclass(frozen=True)
class Breached:
    life: int
    at: int
    kind: Literal["cached_over_pool", "in_use_over_cached"]
    scraped_at_ms: int
    found: int
    bound: int
    row: int = 0  # an instant of the row it stands in, if that is another


@dataclass
class Tally:
    tokens: int = 0
    blocks: int = 0


@dataclass
class Life:
    number: int
    known: dict[Hashable, int] = field(default_factory=dict)
    blocks: dict[int, dict[Hashable, Block]] = field(default_factory=dict)  # group -> hash -> block, both as they came
    alike: dict[tuple[int, int], list[Block]] = field(default_factory=lambda: defaultdict(list))  # (group, content) -> ever had it
    groups: dict[int, str | None] = field(default_factory=dict)  # seen in GPU stores, with their kind
    scrapes: list[Scraped] = field(default_factory=list)
    in_use_too_high: bool = False  # at the scrape before
    connector_seen: bool = False
    warmup: bool = False

    def of_hash(self, block_hash: Hashable) -> Iterator[tuple[int, Block]]:
        for group, blocks in self.blocks.items():
            if block_hash in blocks:
                yield group, blocks[block_hash]

    def all_blocks(self) -> list[tuple[int, Hashable, Block]]:
        return [(group, block_hash, block) for group, blocks in self.blocks.items() for block_hash, block in blocks.items()]

    def primary(self) -> int | None:
        """The lowest group that keeps every token; without one, the lowest."""
        if not self.groups:
            return None
        candidates = [g for g, kind in self.groups.items() if kind is None or kind.lower() in PRIMARY_KINDS]
        return min(candidates or self.groups)

    def measured_rate(self) -> float | None:
        """The highest number of computed prompt tokens per second over at least ten seconds, in the last hour."""
        told = [s for s in self.scrapes if s.prompt_tokens is not None]
        best = 0.0
        for j, later in enumerate(told):
            if later.at_ms < self.scrapes[-1].at_ms - RATE_HORIZON_MS:
                continue
            before = [
                earlier
                for earlier in told[:j]
                if later.at_ms - earlier.at_ms >= RATE_SPAN_MS
                and (later.prompt_tokens or 0) >= (earlier.prompt_tokens or 0)
                and (later.prompt_tokens_cached or 0) >= (earlier.prompt_tokens_cached or 0)
            ]
            if before:
                computed = _computed(later) - _computed(before[-1])
                best = max(best, computed * 1000 / (later.at_ms - before[-1].at_ms))
        return best if best > 0 else None


def _computed(scrape: Scraped) -> int:
    return (scrape.prompt_tokens or 0) - (scrape.prompt_tokens_cached or 0)


class Rank:
    """Reads one rank's messages; afterwards `lives`, `facts`, `recomputes`, `intervals` and the rest hold what was found."""

    def __init__(self, given: RankInput, contents: Contents, *, states: bool = False) -> None:
        self.given = given
        self.contents = contents
        self.states = states
        self.declared = given.first()
        known = self.declared.reuse_reporting in ("none", "labelled", "unlabelled") and self.declared.removals in ("per_copy", "last_copy")
        if not known:
            raise ValueError("unknown declaration")
        self.declarations: list[tuple[int, Declared]] = [(0, self.declared)]  # since when
        self.byte_groups: set[int] = set()
        self.weights: list[tuple[int, int | None]] = [(0, self._weight())]  # since when, bytes per token
        self.life = Life(0)
        self.lives = [self.life]
        self.past: dict[tuple[int, int], Lost] = {}  # earlier lives, by (group, content)
        self.facts: list[Fact] = []
        self.said: list[Said] = []
        self.due: set[str] = set()  # reasons for the row of the next batch
        self.due_lost = self.due_refused = self.due_scrapes = 0
        self.due_breaches: list[Breached] = []
        self.breaches: list[Breached] = []
        self.recomputes: list[tuple[str, int, int, str, int, int, int]] = []
        self.forgot = False
        self.away = False  # departed, and nothing came since
        self.departures: list[tuple[int, int | None]] = []  # (engine time, that of the next batch)
        self.order = 0
        self.now = 0
        self.times: list[int] = []
        self.batches: list[tuple[int, int]] = []  # (life, time)
        self.stretches: list[tuple[int, int]] = []  # observed
        self.stretch_lives: list[int] = []
        self.standing: list[tuple[int, int, int, frozenset[str]]] = []  # (life, from, to, what holds of the rank in the rows there)
        self.resident: list[tuple[int, int, dict[int, tuple[int, int, int]]]] = []  # (life, time, group -> blocks, tokens, copies)
        self.open_count: dict[tuple[str, int], int] = defaultdict(int)
        self.open_since: dict[tuple[str, int], int] = {}
        self.intervals: dict[tuple[str, int], list[tuple[int, int | None]]] = defaultdict(list)
        self.opened_by: dict[tuple[str, int, int], str] = {}  # (tier, content, since) -> the workload it was opened under
        self.touched: set[tuple[str, int]] = set()  # by this batch
        self.first_seen: dict[tuple[str, int], int] = {}  # held after a batch, however shortly
        self.tiers: set[str] = set()
        self._summed: Counter[str] | None = None
        self._read()
        for key, since in self.open_since.items():
            self.intervals[key].append((since, None))

    @property
    def unlabelled(self) -> bool:
        return self.declared.reuse_reporting == "unlabelled"

    @property
    def unjoined(self) -> int:
        return sum(fact.amount for fact in self.facts if fact.name == "unjoined_evicts")

    # ---- continuity

    def _read(self) -> None:
        last: int | None = None  # of this life
        newest: int | None = None  # of this life
        seen: dict[int, bytes] = {}
        self.previous: int | None = None  # the number of the last message, if that was a batch received whole
        reset_due = False
        for step in self.given.frames:
            if not isinstance(step, tuple):
                self._told(step, last)
                continue
            seq, payload = step
            if last is not None and seq <= last and seen.get(seq) == payload:
                continue  # seen before
            try:
                time, events = decode_batch(payload)
            except (ValueError, KeyError, TypeError, OverflowError, msgspec.DecodeError):
                time, events = None, []
            if last is not None and seq <= last:
                if time is None:
                    self._heard()
                    continue  # unreadable, and of no new number: nothing that counts
                if seq not in seen and newest is not None and time <= newest:
                    continue  # late
                # The same number with something else, or a lower one later: the engine has begun anew.
                reset_due, last, newest, seen = True, None, None, {}
                self.previous = None
            self._heard()
            if last is None and not reset_due and len(self.lives) == 1 and seq > 0:
                self.life.warmup = True
                self.due.add("late_attach")
            if reset_due and time is not None:
                self._reset(max(time, self.now))
            reset_due = False
            expected = last + 1 if last is not None else 0 if len(self.lives) > 1 else seq
            if seq > expected:
                self._break("lost", lost=seq - expected)
            seen[seq] = payload
            last = seq
            if time is None:  # refused: what lies between its neighbours is not observed
                self._break("refused", refused=1)
                continue
            newest = time if newest is None else max(newest, time)
            self._batch(seq, time, events)

    def _heard(self) -> None:
        if self.away and self.now:
            self._stand(self.now)
        self.away = False

    def _say(self, what: str) -> None:
        self.said.append(Said(self.life.number, self.now, what))
        self._stand(self.now)

    def _stand(self, since: int) -> None:
        """The rows from ``since`` to now are told what holds of the rank as a whole."""
        holds = {
            "unlabelled": self.unlabelled,
            "warmup": self.life.warmup,
            "kv_connector": self.declared.kv_connector is not None or self.life.connector_seen,
            "history_forgotten": self.forgot,
        }
        self.standing.append((self.life.number, since, self.now, frozenset(what for what, here in holds.items() if here)))

    def _break(self, reason: str, *, lost: int = 0, refused: int = 0) -> None:
        """What follows does not continue what was read: it stands in the row of the newest batch and of the next."""
        self.previous = None
        self.due.add(reason)
        if self.now:
            self._say(reason)
            self._rank_fact("lost_batches", lost)
            self._rank_fact("refused_batches", refused)
        else:
            self.due_lost += lost
            self.due_refused += refused

    def _rank_fact(self, name: str, amount: int) -> None:
        if amount:
            self.facts.append(Fact(self.life.number, self.now, -1, name, amount))

    def _told(self, step: Declared | Scraped | Departed, last: int | None) -> None:
        self._heard()
        if isinstance(step, Departed):
            self.away = True
            if self.now:
                self._stand(self.now)
            if not self.departures or self.departures[-1][1] is not None:
                self.departures.append((self.now, None))
            return
        if isinstance(step, Scraped):
            self._scrape(step)
            return
        if last is not None and step.counted_by() != self.declared.counted_by():
            self.due.add("redeclared")
            if self.now:
                self._say("redeclared")
        self.declared = step
        self.declarations.append((self.now, step))
        self.weights.append((self.now, self._weight()))

    def _batch(self, seq: int, time: int, events: list[Run | Removal | Clear]) -> None:
        at = max(time, self.now)
        since = at
        if self.previous is not None and self.previous + 1 == seq and at > self.now:
            since = self.now
            self.stretches.append((since, at))
            self.stretch_lives.append(self.life.number)
        self.previous = seq
        heard_before, groups_before = self.now > 0, set(self.life.blocks)
        self.now = at
        self._stand(since)
        if at != time:
            self._say("clock_stepped_back")
        if self.departures and self.departures[-1][1] is None:
            self.departures[-1] = (self.departures[-1][0], at)
        for reason in sorted(self.due):
            self._say(reason)
        self.due.clear()
        self._rank_fact("lost_batches", self.due_lost)
        self._rank_fact("refused_batches", self.due_refused)
        self._rank_fact("scrapes", self.due_scrapes)
        self.due_lost = self.due_refused = self.due_scrapes = 0
        for breach in self.due_breaches:
            self.breaches.append(replace(breach, row=at))
            self._say(breach.kind)
        self.due_breaches.clear()
        self.times.append(at)
        self.batches.append((self.life.number, at))
        resolve_batch([e for e in events if isinstance(e, Run)], self.life.known, self.contents, self.declared.model)
        for event in events:
            if isinstance(event, Run):
                self._store(event)
            elif isinstance(event, Removal):
                self._remove(event)
            else:
                self._clear(event)
        if groups_before != set(self.life.blocks):
            self.byte_groups = set(self.life.blocks)
            self.weights.append((at if heard_before else 0, self._weight()))
        for key in self.touched:
            if self.open_count[key]:
                self.first_seen.setdefault(key, at)
        self.touched.clear()
        self._forget()
        self._stand(self.now)
        if self.states:
            self.resident.append((self.life.number, at, self._resident_now()))

    def observed_us(self) -> int:
        total, reached = 0, None
        for start, end in sorted(self.stretches):
            begin = start if reached is None else max(start, reached)
            total += max(0, end - begin)
            reached = end if reached is None else max(reached, end)
        return total

    # ---- what the engine's metrics say

    def _scrape(self, scrape: Scraped) -> None:
        life = self.life
        if any(each.at_ms == scrape.at_ms for each in life.scrapes):
            return  # the same again
        told = [each.external_hits for each in life.scrapes if each.external_hits is not None]
        if scrape.external_hits is not None and told and scrape.external_hits > told[-1]:
            life.connector_seen = True
        life.scrapes.append(scrape)
        blocks = [block for _, _, block in life.all_blocks()]
        copies = sum(block.copies.get(GPU, 0) for block in blocks)
        distinct = sum(block.resident(GPU) for block in blocks)
        if self.now:
            self._stand(self.now)
            self._rank_fact("scrapes", 1)
        else:
            self.due_scrapes += 1
        too_high = False
        if scrape.pool is not None:
            cached = distinct if self.unlabelled else copies
            if cached > scrape.pool:
                self._breach("cached_over_pool", scrape, cached, scrape.pool)
            if scrape.usage is not None and scrape.running is not None:
                in_use = round(scrape.usage * scrape.pool)
                bound = copies + scrape.running * len(life.groups) + max(8, scrape.pool // 100)
                too_high = in_use > bound
                if too_high and life.in_use_too_high:
                    self._breach("in_use_over_cached", scrape, in_use, bound)
        life.in_use_too_high = too_high

    def _breach(self, kind: Literal["cached_over_pool", "in_use_over_cached"], scrape: Scraped, found: int, bound: int) -> None:
        breach = Breached(self.life.number, self.now, kind, scrape.at_ms, found, bound)
        if self.now:
            self.breaches.append(breach)
            self._say(kind)
        else:
            self.due_breaches.append(breach)
        self.previous = None  # what lies between the newest batch and the next does not count as observed

    def rate(self) -> tuple[float | None, str | None]:
        if self.declared.prefill_rate:
            return self.declared.prefill_rate, "declared"
        measured = self.life.measured_rate() if self.life.scrapes else None
        return measured, None if measured is None else "measured"

    def _weight(self) -> int | None:
        """Bytes per token: of several groups the least, unknown where one is; before any is known, of those declared."""
        by_group, declared = dict(self.declared.kv_bytes_by_group), self.declared.kv_bytes_per_token
        if not self.byte_groups:
            return min(by_group.values(), default=declared)
        alone = declared if len(self.byte_groups) == 1 else None
        known = [by_group.get(group, alone) for group in self.byte_groups]
        return None if None in known else min(each for each in known if each is not None)

    # ---- what the footprint sees

    def _hold(self, block: Block, tier: str) -> None:
        if tier not in block.held:
            block.held.add(tier)
            self._count(tier, block.content, +1)

    def _let_go(self, block: Block, tier: str) -> None:
        if tier in block.held:
            block.held.remove(tier)
            self._count(tier, block.content, -1)

    def _set_content(self, block: Block, group: int, content: int | None) -> None:
        if content == block.content:
            return
        if content is not None:
            self.life.alike[group, content].append(block)
            if block.resident(GPU):
                self.past.pop((group, content), None)  # what an earlier life knew of it is overtaken
        for tier in block.held:
            self._count(tier, block.content, -1)
            self._count(tier, content, +1)
        block.content = content

    def _count(self, tier: str, content: int | None, change: int) -> None:
        if content is None:
            return
        key = (tier, content)
        self.touched.add(key)
        before = self.open_count[key]
        self.open_count[key] = before + change
        if before == 0:
            self.open_since[key] = self.now
            self.opened_by[tier, content, self.now] = self.declared.workload or ""
        elif before + change == 0:
            since = self.open_since.pop(key)
            if self.now > since:
                self.intervals[key].append((since, self.now))

    # ---- events

    def _fact(self, group: int, name: str, amount: int, in_bucket: int = -1) -> None:
        self.facts.append(Fact(self.life.number, self.now, group, name, amount, in_bucket))

    def _two(self, group: int, name: str, tokens: int, blocks: int = 1) -> None:
        self._fact(group, f"{name}_blocks", blocks)
        self._fact(group, f"{name}_tokens", tokens)

    def _store(self, run: Run) -> None:
        for block_hash, content, before in zip(run.hashes, run.contents, run.before, strict=True):
            if content is not None:
                self._fill_in(block_hash, content)
            if run.remote:
                continue
            if self.declared.reuse_reporting == "labelled" and run.reused:
                marked = self.life.blocks.get(run.group, {}).get(block_hash)
                if marked is not None:
                    self._show_use(run.group, marked)
                continue
            block = self.life.blocks.setdefault(run.group, {}).setdefault(block_hash, Block())
            if content is not None:
                self._set_content(block, run.group, content)
                block.size = self.contents.size[content]
            elif run.block_size and block.size != run.block_size:
                self._set_content(block, run.group, None)
                block.size = run.block_size
            self.tiers.add(run.tier)
            if run.tier == GPU:
                if run.kind is not None or run.group not in self.life.groups:
                    self.life.groups[run.group] = run.kind
                self._count_gpu_store(block, run.group, before)
            block.copies[run.tier] = block.copies.get(run.tier, 0) + 1
            self._hold(block, run.tier)

    def _fill_in(self, block_hash: Hashable, content: int) -> None:
        size = self.contents.size[content]
        for group, block in self.life.of_hash(block_hash):
            if block.content is None and block.size in (0, size):
                self._set_content(block, group, content)
                block.size = size

    def _count_gpu_store(self, block: Block, group: int, before: Hashable | None) -> None:
        self._two(group, "stored", block.size)
        self._fact(group, "resolved_tokens", block.size if block.content is not None else 0)
        if block.content is None:
            self._say("identity")
        # What the stream shows of use.
        if before is not None:
            block.before = before
            parent = self.life.blocks[group].get(before)
            if parent is not None and parent.resident(GPU):
                if parent.continued:
                    self._show_use(group, parent)
                parent.continued = True
        if block.resident(GPU):
            self._show_use(group, block)
        else:
            block.stored_at, block.used, block.continued = self.now, False, False
        # Whether it was computed again.
        past = self.past.pop((group, block.content), None) if block.content is not None else None
        lost, block.lost = block.lost, None
        if lost is not None:
            lost.marked = block.marked or (past is not None and past.marked)
        block.marked = False
        if block.off_gpu():
            if not block.resident(GPU):
                self._two(group, "reloaded", block.size)
            return
        if block.resident(GPU):
            if not self.unlabelled:
                self._recompute(group, "concurrent", block.size)
            return
        if lost is None and past is not None:
            twins = [b for b in self.life.alike[group, block.content or 0] if b is not block and b.content == block.content]
            lost = None if any(b.anywhere() for b in twins) else past
        if lost is not None:
            cause = "ambiguous_reload" if lost.marked else lost.cause
            if lost.marked:
                self._say(cause)
            self._recompute(group, cause, block.size)
            if cause != "ambiguous_reload":
                self._fact(group, f"back_{cause}", 1, bucket(self.now - lost.at_us))
            self.recomputes.append((self.given.instance_id, self.given.dp_rank, group, cause, block.size, lost.at_us, self.now))

    def _recompute(self, group: int, cause: str, size: int) -> None:
        self._two(group, COUNTERS[cause], size)
        rate, _ = self.rate()
        if rate is None:
            self._fact(group, "unrated_tokens", size)
        else:
            gpus = self.declared.gpus_per_rank or 1
            self._fact(group, f"{COUNTERS[cause]}_gpu_us", int(size * gpus * 1_000_000 / rate))

    def _show_use(self, group: int, block: Block | None) -> None:
        """A block shown used shows all before it in its chain used, as far as they are resident."""
        while block is not None and block.resident(GPU) and not block.used:
            block.used = True
            block = self.life.blocks[group].get(block.before)

    def _remove(self, removal: Removal) -> None:
        if removal.remote:
            return
        for block_hash in removal.hashes:
            block = self.life.blocks.get(removal.group, {}).get(block_hash)
            if block is None or not block.resident(removal.tier):
                self._fact(removal.group, "unjoined_evicts", 1)
                continue
            all_at_once = self.declared.removals == "last_copy"
            ended = block.copies[removal.tier] if all_at_once else 1
            block.copies[removal.tier] -= ended
            if self.unlabelled or not block.resident(removal.tier):
                self._let_go(block, removal.tier)
            if removal.tier == GPU:
                told = 1 if self.unlabelled else ended
                self._two(removal.group, "evicted", block.size * told, told)
                if not block.resident(GPU):
                    self._fact(removal.group, "lifetime", 1, bucket(self.now - block.stored_at))
                    if not block.used:
                        self._two(removal.group, "unreused", block.size)
            self._note_end(block, "evicted")

    def _clear(self, clear: Clear) -> None:
        if clear.remote:
            return
        everything = self.life.all_blocks()
        ambiguous = clear.tier is None and clear.group is None and any(b.off_gpu() for _, _, b in everything)
        for group, _, block in everything:
            if clear.group is None or clear.group == group:
                block.marked = block.marked or (ambiguous and block.off_gpu())
                self._close(group, block, [clear.tier] if clear.tier is not None else list(block.copies), "cleared")

    def _close(self, group: int, block: Block, tiers: Iterable[str], cause: str) -> None:
        was_open = False
        for tier in tiers:
            if tier == GPU and block.resident(GPU):
                self._two(group, cause, block.size * block.copies[GPU], block.copies[GPU])
            was_open = was_open or block.resident(tier)
            block.copies[tier] = 0
            self._let_go(block, tier)
        if was_open:
            self._note_end(block, cause)

    def _note_end(self, block: Block, cause: str) -> None:
        if not block.anywhere():
            if block.ordered_at != self.now:  # what is lost twice in one instant keeps its place among what is lost then
                self.order += 1
                block.order, block.ordered_at = self.order, self.now
            block.lost = Lost(self.now, cause, block.order)

    def _reset(self, boundary: int) -> None:
        """The process came back empty: everything ends at the boundary, and from here on only content matches the old life."""
        self.now = boundary
        self._say("restarted")
        everything = self.life.all_blocks()
        closed = [entry for entry in everything if not entry[2].anywhere()]
        still_open = [entry for entry in everything if entry[2].anywhere()]
        for group, _, block in [*closed, *still_open]:
            self._close(group, block, list(block.copies), "restarted")
            if block.lost is not None and block.content is not None:
                key = (group, block.content)
                block.lost.marked = block.marked or (key in self.past and self.past[key].marked)
                self.past[key] = block.lost
        # Of losses of one instant those that were known first come first, and all of them before those of the new life.
        self.past = dict(sorted(self.past.items(), key=lambda item: item[1].at_us))
        for lost in self.past.values():
            self.order += 1
            lost.order = self.order
        if self.states:
            self.resident.append((self.life.number, self.now, dict.fromkeys(self.life.blocks, (0, 0, 0))))
        self.life = Life(len(self.lives))
        self.lives.append(self.life)
        self.due.add("restarted")

    # ---- what is let go of

    def _forget(self) -> None:
        """History older than the horizon, and the oldest beyond the number that is kept."""
        horizon, most = self.given.history_us, self.given.history_blocks
        if horizon is None and most is None:
            return
        kept: list[tuple[Lost, int, Hashable, int]] = []  # (how lost, group, hash or None, content of an earlier life)
        for group, block_hash, block in self.life.all_blocks():
            if block.lost is not None and not block.anywhere():
                kept.append((block.lost, group, block_hash, -1))
        kept += [(lost, group, None, content) for (group, content), lost in self.past.items()]
        kept.sort(key=lambda entry: (entry[0].at_us, entry[0].order))
        too_many = len(kept) - most if most is not None else 0
        for place, (lost, group, block_hash, content) in enumerate(kept):
            if place < too_many or (horizon is not None and self.now - lost.at_us > horizon):
                if block_hash is None:
                    del self.past[group, content]
                else:
                    del self.life.blocks[group][block_hash]
                self._fact(group, "forgotten_blocks", 1)
                self.forgot = True

    def _resident_now(self) -> dict[int, tuple[int, int, int]]:
        found: dict[int, tuple[int, int, int]] = {}
        for group, blocks in self.life.blocks.items():
            here = [block for block in blocks.values() if block.resident(GPU)]
            found[group] = (len(here), sum(block.size for block in here), sum(block.copies[GPU] for block in here))
        return found

    # ---- figures of this rank, from the primary group of each life

    def total(self, name: str) -> int:
        """The sum of one counter over the primary groups."""
        return self._totals()[name]

    def _totals(self) -> Counter[str]:
        if self._summed is None:
            primaries = {life.number: life.primary() for life in self.lives}
            self._summed = Counter()
            for fact in self.facts:
                if primaries[fact.life] == fact.group:
                    self._summed[fact.name] += fact.amount
        return self._summed

    def cause(self, cause: str) -> Tally:
        return Tally(self.total(f"{COUNTERS[cause]}_tokens"), self.total(f"{COUNTERS[cause]}_blocks"))
