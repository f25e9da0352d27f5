"""What each window of the fleet holds, by looking at every instant: who bears which extra copy, pairs of workloads, shared prefixes.

Nothing is kept from one window to the next: everything is found again from what each rank held, and when.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import combinations

from schemas.reasons import SPOILS_EXACTNESS, UNSETTLED
from schemas.records import Register

from .footprint import Intervals, counts_over_time, spans_above_zero
from .identity import GPU, ROOT, Contents
from .rank import Declared, Rank

TOPS = ("inside_blocks", "inside_tokens", "between_blocks", "between_tokens", "extra_blocks", "extra_tokens")

Key = tuple[str, int]
Held = list[tuple[int, int | None, str]]
"""(from, to, workload it was opened under) of one rank and content; stretches that touch are one."""


@dataclass
class Amounts:
    """Extra copies at one instant, or a change of them."""

    inside_blocks: int = 0
    inside_tokens: int = 0
    between_blocks: int = 0
    between_tokens: int = 0

    def add(self, other: Amounts, sign: int = 1) -> None:
        self.inside_blocks += sign * other.inside_blocks
        self.inside_tokens += sign * other.inside_tokens
        self.between_blocks += sign * other.between_blocks
        self.between_tokens += sign * other.between_tokens


Changes = dict[int, Amounts]
"""At which instant what changes."""


def key_of(rank: Rank) -> Key:
    return rank.given.instance_id, rank.given.dp_rank


def held_by(rank: Rank, tier: str) -> dict[int, Held]:
    """content -> when this rank has it in the tier."""
    found: dict[int, Held] = {}
    for (where, content), intervals in rank.intervals.items():
        if where != tier:
            continue
        merged: Held = []
        for since, until in sorted(intervals, key=lambda pair: pair[0]):
            if merged and merged[-1][1] == since:
                merged[-1] = (merged[-1][0], until, merged[-1][2])
            else:
                merged.append((since, until, rank.opened_by[tier, content, since]))
        if merged:
            found[content] = merged
    return found


def _covers(since: int, until: int | None, at: int) -> bool:
    return since <= at and (until is None or at < until)


def borne(ranks: list[Rank], tier: str, skew_us: int, contents: Contents) -> dict[Key, Changes]:
    """Which rank bears how many extra copies: the changes of it, by rank."""
    held = {key_of(rank): held_by(rank, tier) for rank in ranks}
    out: dict[Key, Changes] = {key: {} for key in held}
    for content in sorted({content for of_rank in held.values() for content in of_rank}):
        size = contents.size[content]
        of_rank = {key: intervals[content] for key, intervals in held.items() if content in intervals}
        of_instance: dict[str, Intervals] = {}
        for instance in {key[0] for key in of_rank}:
            everyone = [(since, until) for key, intervals in of_rank.items() if key[0] == instance for since, until, _ in intervals]
            of_instance[instance] = spans_above_zero(counts_over_time(everyone))
        instants = {at for intervals in of_rank.values() for since, until, _ in intervals for at in (since, until) if at is not None}
        instants |= {since + skew_us for spans in of_instance.values() for since, _ in spans}
        before: dict[Key, Amounts] = {}
        for at in sorted(instants):
            now = _bearers(of_rank, of_instance, at, skew_us, size)
            for key in before.keys() | now.keys():
                change = Amounts()
                change.add(now.get(key, Amounts()))
                change.add(before.get(key, Amounts()), -1)
                if change != Amounts():
                    out[key].setdefault(at, Amounts()).add(change)
            before = now
    return out


def _bearers(of_rank: dict[Key, Held], of_instance: dict[str, Intervals], at: int, skew_us: int, size: int) -> dict[Key, Amounts]:
    """Who bears a copy of one content at ``at``: all but the one that has held it longest, in an instance and between them."""
    present = sorted((since, key) for key, spans in of_rank.items() for since, until, _ in spans if _covers(since, until, at))
    instances = sorted((since, name) for name, spans in of_instance.items() for since, until in spans if _covers(since, until, at))
    out: dict[Key, Amounts] = {}
    for place, (since, name) in enumerate(instances):
        ranks = [key for _, key in present if key[0] == name]
        for key in ranks[1:]:
            out.setdefault(key, Amounts()).add(Amounts(inside_blocks=1, inside_tokens=size))
        if place and since + skew_us <= at:
            out.setdefault(ranks[0], Amounts()).add(Amounts(between_blocks=1, between_tokens=size))
    return out


def pairs(ranks: list[Rank], tier: str, skew_us: int, contents: Contents) -> dict[tuple[str, str], Changes]:
    """Content that ranks of two workloads hold, by pair of workloads."""
    present: dict[int, dict[str, Intervals]] = defaultdict(lambda: defaultdict(list))
    for rank in ranks:
        for content, held in held_by(rank, tier).items():
            for since, until, workload in held:
                present[content][workload].append((since, until))
    out: dict[tuple[str, str], Changes] = defaultdict(dict)
    for content, of_workload in present.items():
        one = Amounts(between_blocks=1, between_tokens=contents.size[content])
        spans = {workload: spans_above_zero(counts_over_time(intervals)) for workload, intervals in of_workload.items()}
        for a, b in combinations(sorted(spans), 2):
            for since_a, until_a in spans[a]:
                for since_b, until_b in spans[b]:
                    from_at = max(since_a, since_b)
                    ends = [until for until in (until_a, until_b) if until is not None]
                    if ends and min(ends) <= from_at + skew_us:
                        continue
                    out[a, b].setdefault(from_at + skew_us, Amounts()).add(one)
                    if ends:
                        out[a, b].setdefault(min(ends), Amounts()).add(one, -1)
    return out


def declared_at(rank: Rank, at: int) -> Declared:
    """What was declared of a rank at an instant; the first declaration holds backwards."""
    held = [declared for since, declared in rank.declarations if since <= at]
    return held[-1] if held else rank.declarations[0][1]


def bytes_per_token(rank: Rank, at: int) -> int | None:
    """Bytes per token of a rank at an instant; what held first holds backwards."""
    held = [weight for since, weight in rank.weights if since <= at]
    return held[-1] if held else rank.weights[0][1]


@dataclass
class Extra:
    """Extra copies of one scope over one window: sums over time, maxima and the state at its end."""

    sums: Amounts = field(default_factory=Amounts)
    end: Amounts = field(default_factory=Amounts)
    tops: dict[str, int] = field(default_factory=lambda: dict.fromkeys(TOPS, 0))


def over(changes: Iterable[Changes], start: int, end: int, *, whole: bool) -> Extra:
    """What these changes come to over [start, end); a window that is not whole includes what happens at its end."""
    merged: dict[int, Amounts] = {}
    for part in changes:
        for at, change in part.items():
            merged.setdefault(at, Amounts()).add(change)
    extra = Extra()
    now = extra.end
    for at, change in merged.items():
        if at < start:
            now.add(change)
    since = start
    for at in sorted(at for at in merged if start <= at and (at < end or (at == end and not whole))):
        _hold(extra, at - since)
        now.add(merged[at])
        since = at
    _hold(extra, end - since)
    if not whole:
        _top(extra)
    return extra


def _hold(extra: Extra, span: int) -> None:
    if span > 0:
        for name in ("inside_blocks", "inside_tokens", "between_blocks", "between_tokens"):
            setattr(extra.sums, name, getattr(extra.sums, name) + getattr(extra.end, name) * span)
        _top(extra)


def _top(extra: Extra) -> None:
    now, tops = extra.end, extra.tops
    for name in TOPS[:4]:
        tops[name] = max(tops[name], getattr(now, name))
    tops["extra_blocks"] = max(tops["extra_blocks"], now.inside_blocks + now.between_blocks)
    tops["extra_tokens"] = max(tops["extra_tokens"], now.inside_tokens + now.between_tokens)


def in_scope(ranks: list[Rank], scope: str, key: str, window: int) -> list[Rank]:
    """The ranks that a scope holds in the window that begins at ``window``."""
    tests: dict[str, Callable[[Rank], bool]] = {
        "fleet": lambda _: True,
        "rank": lambda rank: f"{rank.given.instance_id}/{rank.given.dp_rank}" == key,
        "workload": lambda rank: (declared_at(rank, window).workload or "") == key,
        "model": lambda rank: (declared_at(rank, window).model or "") == key,
    }
    return [rank for rank in ranks if tests[scope](rank)]


def in_bytes(changes: Changes, weight: int) -> Changes:
    """The same changes, with bytes in the place of tokens."""
    return {
        at: Amounts(each.inside_blocks, each.inside_tokens * weight, each.between_blocks, each.between_tokens * weight)
        for at, each in changes.items()
    }


def bears(changes: Changes, start: int, end: int, *, whole: bool) -> bool:
    """Whether extra copies lie on a rank anywhere in [start, end)."""
    before, inside = Amounts(), False
    for at, change in changes.items():
        if at < start:
            before.add(change)
        elif at < end or (at == end and not whole):
            inside = inside or bool(change.inside_tokens or change.between_tokens)
    return inside or bool(before.inside_tokens or before.between_tokens)


# ------------------------------------------------------------------------------------------------------ coverage

NOT_OF_COPIES = {"kv_connector", "history_forgotten"}
"""Reasons that lower what was computed again, but say nothing of which rank holds what."""


@dataclass
class Seen:
    """How far the fleet was seen in one window."""

    expected: int
    observed_us: int
    reasons: set[str]
    inside: Register
    between: Register


def seen(ranks: list[Rank], first_extra: int | None, notes: set[str], start: int, end: int, as_of: int) -> Seen:
    """Coverage and registers of the window [start, end) up to ``as_of``; ``notes`` are the reasons of the ranks' rows in it."""
    expected = [
        rank
        for rank in ranks
        if rank.times
        and rank.times[0] < end
        and not any(left and left < start and (back is None or back >= end) for left, back in rank.departures)
    ]
    observed = sum(max(0, min(until, as_of) - max(since, start)) for rank in expected for since, until in rank.stretches)
    reasons = notes - NOT_OF_COPIES
    if not expected:
        reasons.add("no_ranks")
    elif not observed:
        reasons.add("not_observed")
    elif observed < len(expected) * (as_of - start):
        reasons.add("coverage")
    held = sorted(min(times) for rank in ranks if (times := [at for (tier, _), at in rank.first_seen.items() if tier == GPU]))
    shared_since = min([*held[1:2], *([first_extra] if first_extra is not None else [])], default=None)
    single = shared_since is None or shared_since >= end
    if single and expected:
        reasons.add("single_holder")
    keys: dict[str, set[tuple[int, str]]] = defaultdict(set)
    for rank in expected:
        keys[rank.given.instance_id].add((declared_at(rank, start).key_epoch, declared_at(rank, start).canary))
    uncomparable = set()
    if len(keys) > 1 and any(declared_at(rank, start).model is None for rank in expected):
        uncomparable.add("model_undeclared")
    if len(set().union(*keys.values())) > 1:
        uncomparable.add("key_change")
    unmeasured = single or not expected or not observed
    best: Register = "lower_bound" if reasons & (SPOILS_EXACTNESS | UNSETTLED) else "exact"
    inside: Register = "indeterminate" if unmeasured or any(len(each) > 1 for each in keys.values()) else best
    between: Register = "indeterminate" if unmeasured or uncomparable else best
    return Seen(len(expected), observed, reasons | uncomparable, inside, between)


# ------------------------------------------------------------------------------------------------ shared prefixes


@dataclass(frozen=True, order=True)
class Trunk:
    """A longest chain of content with the same holders."""

    extra_tokens: int
    blocks: int
    tokens: int
    copies: int
    instances: int
    extra_blocks: int
    rooted: bool
    ranks: tuple[str, ...]
    depth_tokens: int | None
    first_seen_us: int


def trunks(ranks: list[Rank], contents: Contents, at: int) -> list[Trunk]:
    """The trunks after all events up to and including ``at``, in no order."""
    holders: dict[int, set[Key]] = defaultdict(set)
    first: dict[int, int] = {}
    for rank in ranks:
        for content, held in held_by(rank, GPU).items():
            if any(_covers(since, until, at) for since, until, _ in held):
                holders[content].add(key_of(rank))
        for (tier, content), since in rank.first_seen.items():
            if tier == GPU:
                first[content] = min(first.get(content, since), since)
    shared = {content: frozenset(keys) for content, keys in holders.items() if len(keys) > 1}

    def next_of(content: int) -> int | None:
        alike = [child for child in shared if contents.parent[child] == content and shared[child] == shared[content]]
        return alike[0] if len(alike) == 1 else None

    out = []
    for content, keys in shared.items():
        parent = contents.parent[content]
        if parent in shared and next_of(parent) == content:
            continue  # not the head of its chain
        chain = [content]
        while (after := next_of(chain[-1])) is not None:
            chain.append(after)
        tokens = sum(contents.size[each] for each in chain)
        above, all_known = parent, True
        depth = tokens
        while above != ROOT:
            all_known = all_known and above in shared
            depth += contents.size[above]
            above = contents.parent[above]
        out.append(
            Trunk(
                extra_tokens=tokens * (len(keys) - 1),
                blocks=len(chain),
                tokens=tokens,
                copies=len(keys),
                instances=len({instance for instance, _ in keys}),
                extra_blocks=len(chain) * (len(keys) - 1),
                rooted=parent == ROOT,
                ranks=tuple(sorted(f"{instance}/{dp_rank}" for instance, dp_rank in keys)),
                depth_tokens=depth if all_known else None,
                first_seen_us=first[chain[-1]],
            )
        )
    return out
