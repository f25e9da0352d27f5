"""One simulated engine rank: vLLM's scheduler over the block pool, step by step, in engine time.

Each step first serves the running requests in order (one token each while decoding, a chunk while their prompt is being
computed), evicting and, when blocks run out, preempting the newest; then it admits waiting requests. Blocks that become full are
published when their last token is scheduled, one run per request and step. A step's events leave as one batch, if there are any.

A waiting request finds blocks published earlier in the same step, as in vLLM. Second copies of one content come about as they do
there: two prompts computed chunk by chunk side by side, two requests decoding the same answer, and the last block of a prompt that
is cached as a whole (at least one token has to be computed).

Pure and deterministic: engine time is an integer of microseconds, nothing is read from the machine.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from producers.simulate.encode import WIRES, Wire, encode_batch
from producers.simulate.events import BlockHash, BlockRemoved, ExtraKeys
from producers.simulate.hashing import HashChain, HashForm
from producers.simulate.metrics import Reading
from producers.simulate.pool import BlockPool
from producers.simulate.source import SourceBatch
from producers.simulate.workload import Request
from schemas.errors import KvcensusError

HashSeed = Literal["per_life", "fixed"]


@dataclass(frozen=True)
class EngineSpec:
    """One rank's engine. Times are microseconds of engine time, sizes tokens unless they say blocks.

    ``prefill_chunk`` is the most tokens of one prompt in one step (vLLM's long-prefill threshold). ``hash_seed`` ``per_life`` gives
    each process life and rank hashes of its own (vLLM 0.16 to 0.28), ``fixed`` the same to all (0.30 and later). ``tick_us`` rounds
    step times up to its multiples, so that ranks share time stamps. ``restart_us`` is how long the process is away.
    """

    pool_blocks: int = 512
    block_size: int = 16
    wire: Wire = "map"
    hash_form: HashForm = "u64"
    hash_seed: HashSeed = "per_life"
    max_batched_tokens: int = 1024
    prefill_chunk: int = 256
    max_running: int = 32
    step_us: int = 8_000
    prefill_us_per_token: int = 40
    decode_us_per_request: int = 150
    tick_us: int = 1
    restart_us: int = 1_500_000

    def check(self, where: str) -> None:
        """Raise :class:`KvcensusError` for a setting that makes no engine."""
        least = {
            "pool_blocks": self.pool_blocks,
            "block_size": self.block_size,
            "max_batched_tokens": self.max_batched_tokens,
            "prefill_chunk": self.prefill_chunk,
            "max_running": self.max_running,
            "step_us": self.step_us,
            "tick_us": self.tick_us,
        }
        for name, value in least.items():
            if value < 1:
                raise KvcensusError(f"{where}: {name} must be at least 1, not {value}")
        if self.max_running > self.max_batched_tokens:
            raise KvcensusError(f"{where}: max_running ({self.max_running}) is above max_batched_tokens ({self.max_batched_tokens})")
        if self.wire not in WIRES:
            raise KvcensusError(f"{where}: unknown wire {self.wire!r}; one of {', '.join(WIRES)}")


@dataclass
class EngineStats:
    """What one rank did, over all lives. ``rejected`` requests could never fit the pool; ``cut_off`` were unfinished at the end."""

    finished: int = 0
    rejected: int = 0
    cut_off: int = 0
    preempted: int = 0
    retried: int = 0
    flushes: int = 0
    restarts: int = 0
    batches: int = 0
    stored_blocks: int = 0
    removed_blocks: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0


@dataclass(frozen=True)
class Control:
    """Something an operator does to a rank at ``at_us``. A flush drains first: a busy engine refuses to reset its cache."""

    at_us: int
    kind: Literal["flush", "restart"]


class _Job:
    """A request inside the engine. ``known`` tokens exist (prompt and what was generated), ``computed`` of them are in the cache."""

    __slots__ = (
        "admitted",
        "blocks",
        "computed",
        "digests",
        "extra",
        "first_extra",
        "hashes",
        "known",
        "published",
        "request",
        "tokens",
        "total",
    )

    def __init__(self, request: Request) -> None:
        self.request = request
        self.tokens = request.tokens()
        self.known = request.prompt_tokens
        self.total = request.prompt_tokens + request.output_tokens
        self.digests: list[bytes] = []
        self.hashes: list[BlockHash] = []
        adapter = [request.adapter[1]] if request.adapter else []
        salt = [request.salt] if request.salt is not None else []
        self.extra: list[str] | None = adapter or None
        self.first_extra: list[str] | None = (adapter + salt) or None
        self.admitted = False
        self.forget_blocks()

    def forget_blocks(self) -> None:
        self.blocks: list[int] = []
        self.computed = 0
        self.published = 0


class EngineRank:
    """One rank through all its process lives. ``root_of_life`` gives the hash chain's root of life 0, 1, ..."""

    def __init__(self, spec: EngineSpec, dp_rank: int, root_of_life: Callable[[int], bytes]) -> None:
        self.spec = spec
        self.dp_rank = dp_rank
        self.stats = EngineStats()
        self._root_of_life = root_of_life
        self._waiting: deque[_Job] = deque()
        self._running: list[_Job] = []
        self._life = 0
        self._start_process()

    def _start_process(self) -> None:
        self.pool = BlockPool(self.spec.pool_blocks, self.spec.block_size)
        self._chain = HashChain(self._root_of_life(self._life), self.spec.block_size, self.spec.hash_form)
        self._seq = 0
        self._draining = False
        self._blocked = False
        # What the process's own metrics count, from nothing with each start.
        self._preempted = self._queries = self._hits = self._prompts = self._prompts_cached = self._generated = 0

    def run(self, requests: Iterable[Request], controls: Iterable[Control], start_us: int, duration_us: int) -> Iterator[SourceBatch]:
        """Every batch of this rank, in order. ``requests`` and ``controls`` count their times from ``start_us``, in order."""
        arriving = iter(requests)
        ahead = next(arriving, None)
        orders = deque(sorted(controls, key=lambda control: control.at_us))
        now = 0
        while now < duration_us:
            while orders and orders[0].at_us <= now:
                order = orders.popleft()
                if order.kind == "flush":
                    self._draining = True
                else:
                    self._restart()
                    now = max(now, self._aligned(order.at_us + self.spec.restart_us))
            if now >= duration_us:
                break
            while ahead is not None and ahead.arrival_us <= now:
                self._take_in(ahead)
                ahead = next(arriving, None)
            if self._draining and not self._running:
                self.pool.reset()
                self.stats.flushes += 1
                self._draining = False
            outside = [duration_us]
            if ahead is not None:
                outside.append(ahead.arrival_us)
            if orders:
                outside.append(orders[0].at_us)
            if not self._running and not self._waiting:
                now = self._aligned(min(outside))
                continue
            at_us = start_us + now
            now += self._step()
            batch = self._batch(at_us)
            if batch is not None:
                yield batch
            now += self._skip_quiet(now, min(outside))
        self.stats.cut_off = len(self._running) + len(self._waiting)

    def _aligned(self, at_us: int) -> int:
        tick = self.spec.tick_us
        return -(-at_us // tick) * tick

    def _take_in(self, request: Request) -> None:
        # The last token generated is never computed, so it needs no room.
        if request.prompt_tokens + request.output_tokens - 1 > self.spec.pool_blocks * self.spec.block_size:
            self.stats.rejected += 1
            return
        self._waiting.append(_Job(request))
        self._blocked = False

    def _restart(self) -> None:
        """The process dies with all it holds; its clients send again what it had not answered."""
        unanswered = [job.request for job in (*self._running, *self._waiting)]
        self._running.clear()
        self._waiting.clear()
        self.stats.retried += len(unanswered)
        self.stats.restarts += 1
        self._life += 1
        self._start_process()
        for request in unanswered:
            self._waiting.append(_Job(request))

    def _step(self) -> int:
        """One scheduler step; returns how long it takes."""
        spec = self.spec
        budget = spec.max_batched_tokens
        prefill = decoding = 0
        preempted = False
        index = 0
        while index < len(self._running) and budget > 0:
            job = self._running[index]
            new = min(job.known - job.computed, spec.prefill_chunk, budget)
            blocks = self._blocks_for(job, new)
            while blocks is None:
                preempted = True
                victim = self._running.pop()
                self._preempt(victim)
                if victim is job:
                    break
                blocks = self._blocks_for(job, new)
            if blocks is None:
                break
            if job.known - job.computed == 1:
                decoding += 1
            else:
                prefill += new
            self._schedule(job, blocks, new)
            budget -= new
            index += 1
        self._blocked = False
        while self._waiting and not preempted and budget > 0:
            admitted = None if self._draining or len(self._running) >= spec.max_running else self._admit(self._waiting[0], budget)
            if admitted is None:
                self._blocked = True
                break
            self._running.append(self._waiting.popleft())
            budget -= admitted
            prefill += admitted
        self._finish_step()
        duration = spec.step_us + prefill * spec.prefill_us_per_token + decoding * spec.decode_us_per_request
        return self._aligned(duration)

    def _blocks_for(self, job: _Job, new: int) -> list[int] | None:
        needed = -(-(job.computed + new) // self.spec.block_size) - len(job.blocks)
        return self.pool.allocate((), needed) if needed > 0 else []

    def _admit(self, job: _Job, budget: int) -> int | None:
        """Start a waiting request on whatever prefix is cached; returns the tokens scheduled, ``None`` without room for it."""
        size = self.spec.block_size
        # At least the last token is computed, however much is cached.
        upto = (job.known - 1) // size
        self._hash_upto(job, upto)
        hits = self.pool.lookup(job.hashes[:upto])
        cached = len(hits) * size
        new = min(job.known - cached, self.spec.prefill_chunk, budget)
        taken = self.pool.allocate(hits, -(-(cached + new) // size) - len(hits))
        if taken is None:
            return None
        job.blocks = hits
        job.computed = cached
        job.published = len(hits)
        self.stats.prompt_tokens += job.known
        self.stats.hit_tokens += cached
        self._queries += job.known
        self._hits += cached
        if not job.admitted:
            job.admitted = True
            self._prompts += job.request.prompt_tokens
            self._prompts_cached += cached
        self._schedule(job, taken, new)
        return new

    def _schedule(self, job: _Job, blocks: list[int], new: int) -> None:
        size = self.spec.block_size
        job.blocks.extend(blocks)
        job.computed += new
        full = job.computed // size
        first = job.published
        if full == first:
            return
        self._hash_upto(job, full)
        extra: ExtraKeys = [job.extra] * (full - first)
        if first == 0:
            extra[0] = job.first_extra
        adapter = job.request.adapter
        self.pool.publish(
            job.blocks[first:full],
            job.hashes[first:full],
            job.hashes[first - 1] if first else None,
            job.tokens[first * size : full * size].tolist(),
            extra,
            adapter[0] if adapter else None,
            adapter[1] if adapter else None,
        )
        self.stats.stored_blocks += full - first
        job.published = full

    def _hash_upto(self, job: _Job, blocks: int) -> None:
        have = len(job.hashes)
        if have < blocks:
            request = job.request
            self._chain.digests(job.tokens, blocks, request.salt, request.adapter[1] if request.adapter else None, job.digests)
            job.hashes.extend(self._chain.published(digest) for digest in job.digests[have:])

    def _preempt(self, job: _Job) -> None:
        self.pool.free(job.blocks)
        job.forget_blocks()
        self._waiting.appendleft(job)
        self.stats.preempted += 1
        self._preempted += 1

    def _finish_step(self) -> None:
        """Each request whose known tokens are all computed gains one; those with their whole answer leave."""
        staying: list[_Job] = []
        for job in self._running:
            if job.computed == job.known:
                job.known += 1
                self._generated += 1
                if job.known == job.total:
                    self.pool.free(job.blocks)
                    self.stats.finished += 1
                    continue
            staying.append(job)
        if len(staying) != len(self._running):
            self._running = staying
            self._blocked = False

    def _skip_quiet(self, now: int, outside: int) -> int:
        """Run all steps at once in which every request decodes inside its last block and nobody comes or goes.

        Returns the time they take. Such steps publish nothing; walking through them one by one would give the same batches.
        """
        if not self._running or (self._waiting and not self._blocked) or (self._draining and not self._running):
            return 0
        size = self.spec.block_size
        steps = self.spec.max_batched_tokens
        for job in self._running:
            if job.known - job.computed != 1:
                return 0
            offset = job.computed % size
            steps = min(steps, (size - 1 - offset) if offset else 0, job.total - job.known - 1)
            if steps <= 0:
                return 0
        duration = self._aligned(self.spec.step_us + len(self._running) * self.spec.decode_us_per_request)
        steps = min(steps, max(0, -(-(outside - now) // duration)))
        for job in self._running:
            job.computed += steps
            job.known += steps
        self._generated += steps * len(self._running)
        return steps * duration

    def _batch(self, at_us: int) -> SourceBatch | None:
        events = self.pool.take_events()
        if not events:
            return None
        self.stats.batches += 1
        self.stats.removed_blocks += sum(1 for event in events if isinstance(event, BlockRemoved))
        payload = encode_batch(at_us, events, self.dp_rank, self.spec.wire)
        batch = SourceBatch(self._life, self._seq, at_us, payload, self._reading())
        self._seq += 1
        return batch

    def _reading(self) -> Reading:
        return Reading(
            len(self._running),
            len(self._waiting),
            self.spec.pool_blocks - self.pool.free_blocks,
            self.spec.pool_blocks,
            self.spec.block_size,
            self._preempted,
            self._queries,
            self._hits,
            self._prompts,
            self._prompts_cached,
            self._generated,
        )
