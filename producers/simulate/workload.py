"""Requests over engine time, from a seed: shared system prompts, chats that grow turn by turn, popular prompts, unique ones.

Pure: the same spec and seed give the same requests on any machine. Token ids are 16-bit draws; the text means nothing.
"""

from __future__ import annotations

import sys
from array import array
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import accumulate
from random import Random
from typing import Literal

from schemas.errors import KvcensusError

Kind = Literal["chat", "shared", "popular", "unique"]
SECOND_US = 1_000_000


class Request:
    """One prompt sent to an engine. ``arrival_us`` is microseconds from the start of the fleet; ``output_tokens`` is at least 1.

    ``route_key`` is equal for requests that begin alike. ``adapter`` is (number, name).
    """

    __slots__ = ("adapter", "arrival_us", "output_tokens", "parts", "prompt_tokens", "route_key", "salt")

    def __init__(
        self,
        arrival_us: int,
        parts: tuple[array[int], ...],
        output: array[int],
        route_key: bytes,
        salt: str | None = None,
        adapter: tuple[int, str] | None = None,
    ) -> None:
        self.arrival_us = arrival_us
        self.parts = (*parts, output)
        self.prompt_tokens = sum(len(part) for part in parts)
        self.output_tokens = len(output)
        self.route_key = route_key
        self.salt = salt
        self.adapter = adapter

    def tokens(self) -> array[int]:
        """Prompt and answer, ``prompt_tokens + output_tokens`` long."""
        joined: array[int] = array("I")
        for part in self.parts:
            joined.extend(part)
        return joined


@dataclass(frozen=True)
class WorkloadSpec:
    """What one workload sends. Lengths are (least, most) tokens, rates per second of engine time.

    ``mix`` weighs the kinds of session: a *chat* shares a system prompt and has several turns, each with all before it in its
    prompt; *shared* is one prompt behind a system prompt; *popular* is one of ``popular_prompts`` whole prompts; *unique* shares
    nothing. Popularity of system prompts and popular prompts falls as 1 / rank. ``fanout`` is the share of requests sent twice
    at once (the same prompt and, as with greedy decoding, the same answer). ``salted`` is the share of sessions that carry one of
    ``salts`` cache salts. ``prompt_pool`` names the stock of system and popular prompts: workloads that name one pool share it.
    """

    name: str
    rate: float = 4.0
    mix: tuple[tuple[Kind, float], ...] = (("chat", 4.0), ("shared", 3.0), ("popular", 2.0), ("unique", 1.0))
    system_prompts: int = 4
    system_tokens: tuple[int, int] = (128, 512)
    popular_prompts: int = 12
    popular_tokens: tuple[int, int] = (128, 768)
    user_tokens: tuple[int, int] = (24, 200)
    output_tokens: tuple[int, int] = (8, 96)
    turns: tuple[int, int] = (2, 5)
    think_s: tuple[float, float] = (0.5, 4.0)
    fanout: float = 0.1
    salts: int = 0
    salted: float = 0.3
    adapters: tuple[str, ...] = ()
    prompt_pool: str = "fleet"


def draw_tokens(rng: Random, count: int) -> array[int]:
    """``count`` token ids, each below 65,536."""
    return tokens_from_bytes(rng.randbytes(2 * count))


def tokens_from_bytes(raw: bytes) -> array[int]:
    """Token ids from little-endian pairs of bytes."""
    narrow = array("H", raw)
    if sys.byteorder == "big":
        narrow.byteswap()
    return array("I", narrow)


@dataclass(frozen=True)
class _Popular:
    prompt: array[int]
    answer: array[int]


class _Stock:
    """System and popular prompts of one pool: equal for every workload of a fleet that names the pool."""

    def __init__(self, spec: WorkloadSpec, seed: int) -> None:
        # Each prompt has a generator of its own, so that two workloads with different counts still share the first ones.
        self.system: list[array[int]] = []
        for index in range(spec.system_prompts):
            rng = Random(f"{seed}/{spec.prompt_pool}/system/{index}")  # noqa: S311
            self.system.append(draw_tokens(rng, rng.randint(*spec.system_tokens)))
        self.popular: list[_Popular] = []
        for index in range(spec.popular_prompts):
            rng = Random(f"{seed}/{spec.prompt_pool}/popular/{index}")  # noqa: S311
            length = rng.randint(*spec.popular_tokens)
            if index % 2 == 0:
                # Whole blocks at any usual block size: when all of it is cached, the engine still computes its last block again.
                length = max(64, length // 64 * 64)
            self.popular.append(_Popular(draw_tokens(rng, length), draw_tokens(rng, rng.randint(*spec.output_tokens))))


def _by_popularity(rng: Random, count: int) -> int:
    weights = list(accumulate(1 / (rank + 1) for rank in range(count)))
    return min(bisect_left(weights, rng.random() * weights[-1]), count - 1)


def _check(spec: WorkloadSpec) -> None:
    def fail(what: str) -> None:
        raise KvcensusError(f"workload {spec.name!r}: {what}")

    if spec.rate <= 0:
        fail(f"the rate must be above 0, not {spec.rate:g}")
    if not spec.mix or any(weight < 0 for _, weight in spec.mix) or sum(weight for _, weight in spec.mix) <= 0:
        fail("the mix needs at least one kind with a weight above 0")
    kinds = {kind for kind, weight in spec.mix if weight > 0}
    if kinds & {"chat", "shared"} and spec.system_prompts < 1:
        fail("chats and shared prompts need at least one system prompt")
    if "popular" in kinds and spec.popular_prompts < 1:
        fail("the mix has popular prompts but there are none")
    ranges = (spec.system_tokens, spec.popular_tokens, spec.user_tokens, spec.output_tokens, spec.turns)
    if any(low < 1 or high < low for low, high in ranges):
        fail("every (least, most) needs 1 <= least <= most")
    if not 0 <= spec.think_s[0] <= spec.think_s[1]:
        fail("think time needs 0 <= least <= most")


def requests(spec: WorkloadSpec, seed: int, duration_us: int) -> list[Request]:
    """All requests of one workload that arrive in [0, ``duration_us``), in order of arrival."""
    _check(spec)
    rng = Random(f"{seed}/workload/{spec.name}")  # noqa: S311
    stock = _Stock(spec, seed)
    kinds = [kind for kind, _ in spec.mix]
    weights = [weight for _, weight in spec.mix]
    made: list[Request] = []
    at = 0.0
    while True:
        at += rng.expovariate(spec.rate)
        arrival_us = int(at * SECOND_US)
        if arrival_us >= duration_us:
            break
        kind = rng.choices(kinds, weights)[0]
        salt = f"tenant-{rng.randrange(spec.salts)}" if spec.salts and rng.random() < spec.salted else None
        adapter = None
        if spec.adapters:
            number = rng.randrange(len(spec.adapters) + 1)
            adapter = (number, spec.adapters[number - 1]) if number else None
        for request in _session(spec, stock, rng, kind, arrival_us, salt, adapter):
            if request.arrival_us >= duration_us:
                break
            made.append(request)
            if rng.random() < spec.fanout:
                made.append(request)
    made.sort(key=lambda request: request.arrival_us)
    return made


def _session(
    spec: WorkloadSpec,
    stock: _Stock,
    rng: Random,
    kind: Kind,
    arrival_us: int,
    salt: str | None,
    adapter: tuple[int, str] | None,
) -> Iterator[Request]:
    def key(first: Sequence[int]) -> bytes:
        begins = array("I", first[:256]).tobytes()
        return blake2b(begins + f"{salt}\0{adapter}".encode(), digest_size=8).digest()

    def user() -> array[int]:
        return draw_tokens(rng, rng.randint(*spec.user_tokens))

    def answer() -> array[int]:
        return draw_tokens(rng, rng.randint(*spec.output_tokens))

    if kind == "popular":
        prompt = stock.popular[_by_popularity(rng, len(stock.popular))]
        yield Request(arrival_us, (prompt.prompt,), prompt.answer, key(prompt.prompt), salt, adapter)
        return
    if kind == "unique":
        own = draw_tokens(rng, rng.randint(*spec.user_tokens) + rng.randint(*spec.system_tokens))
        yield Request(arrival_us, (own,), answer(), key(own), salt, adapter)
        return
    system = stock.system[_by_popularity(rng, len(stock.system))]
    route_key = key(system)
    turns = 1 if kind == "shared" else rng.randint(*spec.turns)
    history: tuple[array[int], ...] = (system,)
    for _ in range(turns):
        history = (*history, user())
        said = answer()
        yield Request(arrival_us, history, said, route_key, salt, adapter)
        history = (*history, said)
        arrival_us += int(rng.uniform(*spec.think_s) * SECOND_US)
