"""Every number of every row the real cores give, held against the reference. Each difference is one line of text."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from schemas.reasons import register
from schemas.records import DuplicateWindow, GroupCounters, RankWindow, Recompute, SharedPrefix

from . import fleet
from .driver import life_id
from .identity import Contents
from .rank import Rank

HISTOGRAMS = ("lifetime", "back_evicted", "back_cleared", "back_restarted")
STATES = ("resident_blocks", "resident_tokens", "resident_copies")
NOT_SUMS = {"group_idx", "spec_kind", "gpu", "kv_bytes_per_token", *STATES}
SUMS = [name for name in GroupCounters.__struct_fields__ if name not in NOT_SUMS and not name.endswith(("_buckets", "_counts"))]
OF_BATCHES = ("lost_batches", "refused_batches", "scrapes")


def latest_rank_rows(rows: Iterable[RankWindow]) -> list[RankWindow]:
    """The rows that hold, in order."""
    found: dict[tuple[str, int, str, int], RankWindow] = {}
    for row in rows:
        key = (row.instance_id, row.dp_rank, row.life_id, row.window_start_us)
        if key not in found or row.version >= found[key].version:
            found[key] = row
    return [found[key] for key in sorted(found)]


def latest_duplicate_rows(rows: Iterable[DuplicateWindow]) -> list[DuplicateWindow]:
    """The rows that hold, in order."""
    found: dict[tuple[str, str, str, int], DuplicateWindow] = {}
    for row in rows:
        key = (row.scope, row.scope_key, row.tier, row.window_start_us)
        if key not in found or row.version >= found[key].version:
            found[key] = row
    return [found[key] for key in sorted(found)]


class Differences(list[str]):
    """What differs; ``at`` says of what."""

    def same(self, at: str, ours: object, theirs: object) -> None:
        if ours != theirs:
            self.append(f"{at}: {ours!r} instead of {theirs!r}")


# ---------------------------------------------------------------------------------------------------- one rank


def rank_differences(rank: Rank, rows: Sequence[RankWindow]) -> list[str]:
    """Rows of this rank, of any version, against the facts."""
    found = Differences()
    numbers = {life_id(rank.given, life.number): life.number for life in rank.lives}
    mine = [row for row in latest_rank_rows(rows) if (row.instance_id, row.dp_rank) == fleet.key_of(rank)]
    everything: Counter[tuple[str, int]] = Counter()
    observed = 0
    for row in mine:
        life = numbers[row.life_id]
        start, end = row.window_start_us, row.window_start_us + row.window_us
        at = f"{row.life_id} {start}+{row.window_us}"
        _row_differences(found, at, rank, life, row)
        observed += row.observed_us
        for group in row.groups:
            for name in SUMS:
                everything[name, group.group_idx] += getattr(group, name)
        for name in OF_BATCHES:
            everything[name, -1] += getattr(row, name)
        wanted = sum(
            max(0, min(end, until) - max(start, since))
            for (since, until), of_life in zip(rank.stretches, rank.stretch_lives, strict=True)
            if of_life == life
        )
        found.same(f"{at} observed", row.observed_us, wanted)
    found.same("observed", observed, sum(until - since for since, until in rank.stretches))
    totals: Counter[tuple[str, int]] = Counter()
    for fact in rank.facts:
        if fact.bucket < 0:
            totals[fact.name, fact.group] += fact.amount
    found.same(f"{fleet.key_of(rank)} totals", {k: v for k, v in everything.items() if v}, {k: v for k, v in totals.items() if v})
    return found


def _row_differences(found: Differences, at: str, rank: Rank, life: int, row: RankWindow) -> None:
    start, end = row.window_start_us, row.window_start_us + row.window_us
    facts = [fact for fact in rank.facts if fact.life == life and start <= fact.at < end]
    sums: dict[int, Counter[str]] = defaultdict(Counter)
    histograms: dict[tuple[int, str], Counter[int]] = defaultdict(Counter)
    for fact in facts:
        if fact.bucket < 0:
            sums[fact.group][fact.name] += fact.amount
        else:
            histograms[fact.group, fact.name][fact.bucket] += fact.amount
    states = [state for of_life, when, state in rank.resident if of_life == life and when < end]
    resident = states[-1] if states else {}
    groups = {group.group_idx: group for group in row.groups}
    for index in sorted(groups.keys() | {group for group in sums if group >= 0} | {g for g, s in resident.items() if any(s)}):
        group = groups.get(index, GroupCounters(index))
        for name in SUMS:
            found.same(f"{at} group {index} {name}", getattr(group, name), sums[index][name])
        for name in HISTOGRAMS:
            buckets, counts = getattr(group, f"{name}_buckets"), getattr(group, f"{name}_counts")
            found.same(f"{at} group {index} {name}", list(zip(buckets, counts, strict=True)), sorted(histograms[index, name].items()))
        found.same(f"{at} group {index} resident", tuple(getattr(group, name) for name in STATES), resident.get(index, (0, 0, 0)))
    for name in OF_BATCHES:
        found.same(f"{at} {name}", getattr(row, name), sums[-1][name])
    times = [when for of_life, when in rank.batches if of_life == life and start <= when < end]
    found.same(
        f"{at} batches", (row.batches, row.first_batch_us, row.last_batch_us), (len(times), min(times, default=0), max(times, default=0))
    )
    breaches = [each for each in rank.breaches if each.life == life and start <= (each.row or each.at) < end]
    found.same(
        f"{at} breaches",
        [(each.kind, each.at_us, each.scraped_at_ms, each.found, each.bound) for each in row.breaches],
        [(each.kind, each.at, each.scraped_at_ms, each.found, each.bound) for each in breaches[:10]],
    )
    found.same(f"{at} breaches found", row.breaches_found, len(breaches))
    found.same(f"{at} departed", row.departed, rank.away and life == rank.life.number and start <= rank.now < end)
    found.same(f"{at} warmup", row.warmup, rank.lives[life].warmup)
    reasons = {said.what for said in rank.said if said.life == life and start <= said.at < end}
    for of_life, since, until, standing in rank.standing:
        if of_life == life and since < end and until >= start:
            reasons |= standing
    found.same(f"{at} reasons", sorted(row.reasons), sorted(reasons))
    lacking = {"not_observed"} if not row.observed_us else {"coverage"} if row.observed_us < row.window_us else set()
    found.same(f"{at} register", row.register, register(reasons | lacking, measured=row.kv_connector is None))


def recompute_differences(ranks: Sequence[Rank], rows: Iterable[Recompute]) -> list[str]:
    """The records of recomputes against the reference's."""
    found = Differences()
    ours = sorted(
        (row.instance_id, row.dp_rank, row.group_idx, row.cause, row.tokens, row.lost_at_us, row.back_at_us)
        for row in rows
        if row.cause != "concurrent"
    )
    found.same("recomputes", ours, sorted(row for rank in ranks for row in rank.recomputes))
    return found


# --------------------------------------------------------------------------------------------------- the fleet


def fleet_differences(
    ranks: Sequence[Rank], contents: Contents, rows: Sequence[DuplicateWindow], *, skew_us: int, window_us: int
) -> list[str]:
    """Duplicate windows of any version against what the ranks held."""
    found = Differences()
    present = list(ranks)
    latest = latest_duplicate_rows(rows)
    for tier in sorted({row.tier for row in latest} | {tier for rank in ranks for tier in rank.tiers}):
        changes = fleet.borne(present, tier, skew_us, contents)
        of_pairs = fleet.pairs(present, tier, skew_us, contents)
        shown: dict[tuple[str, str], int] = defaultdict(int)
        reached = 0
        for row in latest:
            if row.tier != tier:
                continue
            start, end = row.window_start_us, row.as_of_us
            reached = max(reached, end)
            whole = end == start + row.window_us
            if row.scope == "workload_pair":
                parts = [of_pairs.get(_pair(row.scope_key), {})]
            else:
                members = fleet.in_scope(present, row.scope, row.scope_key, start)
                parts = [changes[fleet.key_of(rank)] for rank in members]
            extra = fleet.over(parts, start, end, whole=whole)
            shown[row.scope, row.scope_key] += row.inside_token_us + row.between_token_us
            at = f"{row.scope} {row.scope_key!r} {tier} {start}+{end - start}"
            found.same(at, _numbers(row), _wanted(extra))
            if row.scope != "workload_pair":
                found.same(f"{at} bytes", _bytes(row), _wanted_bytes(members, changes, start, end, whole=whole))
        for scope, total in _all_scopes(present, changes, of_pairs, window_us, reached).items():
            found.same(f"{scope} {tier} over all windows", shown.get(scope, 0), total)
    return found


def _bytes(row: DuplicateWindow) -> tuple[int | None, ...]:
    return row.inside_byte_ms, row.between_byte_ms, row.extra_bytes_max, row.inside_bytes_end, row.between_bytes_end


def _wanted_bytes(
    members: list[Rank], changes: dict[fleet.Key, fleet.Changes], start: int, end: int, *, whole: bool
) -> tuple[int | None, ...]:
    """Null where the size of a block is not known of every rank that bears a copy."""
    parts = []
    for rank in members:
        weight, of_rank = fleet.bytes_per_token(rank, start), changes[fleet.key_of(rank)]
        if weight is None and fleet.bears(of_rank, start, end, whole=whole):
            return (None,) * 5
        parts.append(fleet.in_bytes(of_rank, weight or 0))
    extra = fleet.over(parts, start, end, whole=whole)
    sums, last = extra.sums, extra.end
    return sums.inside_tokens // 1000, sums.between_tokens // 1000, extra.tops["extra_tokens"], last.inside_tokens, last.between_tokens


def coverage_differences(
    ranks: Sequence[Rank], contents: Contents, rank_rows: Iterable[RankWindow], rows: Iterable[DuplicateWindow], *, skew_us: int
) -> list[str]:
    """Expected ranks, observed time, reasons and registers of the fleet's windows."""
    found = Differences()
    present = list(ranks)
    tiers = {tier for rank in ranks for tier in rank.tiers}
    extra = [at for tier in tiers for part in fleet.borne(present, tier, skew_us, contents).values() for at in part]
    notes: dict[int, set[str]] = defaultdict(set)
    for noted in latest_rank_rows(rank_rows):
        notes[noted.window_start_us] |= set(noted.reasons)
    for row in latest_duplicate_rows(rows):
        if (row.scope, row.tier) != ("fleet", "GPU"):
            continue
        start, end = row.window_start_us, row.window_start_us + row.window_us
        said = set().union(*(reasons for at, reasons in notes.items() if start <= at < end))
        wanted = fleet.seen(present, min(extra, default=None), said, start, end, row.as_of_us)
        at = f"coverage {start}+{row.window_us}"
        found.same(f"{at} time", (row.expected_ranks, row.observed_us), (wanted.expected, wanted.observed_us))
        found.same(f"{at} reasons", row.reasons, sorted(wanted.reasons))
        found.same(f"{at} registers", (row.inside_register, row.between_register), (wanted.inside, wanted.between))
    return found


def _pair(key: str) -> tuple[str, str]:
    a, b = json.loads(key)
    return a, b


def _numbers(row: DuplicateWindow) -> dict[str, int]:
    names = [f"{part}_us" for part in ("inside_token", "between_token", "inside_block", "between_block")]
    names += [f"{name}_max" for name in fleet.TOPS]
    names += [f"{name}_end" for name in fleet.TOPS[:4]]
    return {name: getattr(row, name) for name in names}


def _wanted(extra: fleet.Extra) -> dict[str, int]:
    sums, end = extra.sums, extra.end
    return {
        "inside_token_us": sums.inside_tokens,
        "between_token_us": sums.between_tokens,
        "inside_block_us": sums.inside_blocks,
        "between_block_us": sums.between_blocks,
        **{f"{name}_max": extra.tops[name] for name in fleet.TOPS},
        **{f"{name}_end": getattr(end, name) for name in fleet.TOPS[:4]},
    }


def _all_scopes(
    ranks: list[Rank],
    changes: dict[fleet.Key, fleet.Changes],
    of_pairs: dict[tuple[str, str], fleet.Changes],
    window_us: int,
    reached: int,
) -> dict[tuple[str, str], int]:
    """Token-microseconds up to ``reached`` of every scope that has any: a row that is missing shows as a difference."""
    out: Counter[tuple[str, str]] = Counter()
    everything = [*changes.values(), *of_pairs.values()]
    first = min((at for part in everything for at in part), default=None)
    if first is None:
        return {}
    for pair, part in of_pairs.items():
        extra = fleet.over([part], first, max(first, reached), whole=False).sums
        out["workload_pair", json.dumps(list(pair))] += extra.inside_tokens + extra.between_tokens
    for rank in ranks:
        part = changes[fleet.key_of(rank)]
        borders = [first - first % window_us]
        # The scope of a rank changes at the first window that begins at or after the declaration.
        borders = sorted(
            {borders[0]} | {-(-at // window_us) * window_us for at, _ in rank.declarations if first - first % window_us < at < reached}
        )
        for start, end in zip(borders, [*borders[1:], reached], strict=True):
            if start >= reached:
                continue
            sums = fleet.over([part], start, min(end, reached), whole=True).sums
            total = sums.inside_tokens + sums.between_tokens
            declared = fleet.declared_at(rank, start)
            for scope in (
                ("fleet", ""),
                ("rank", f"{rank.given.instance_id}/{rank.given.dp_rank}"),
                ("workload", declared.workload or ""),
                ("model", declared.model or ""),
            ):
                out[scope] += total
    return {scope: total for scope, total in out.items() if total}


# ----------------------------------------------------------------------------------------------- shared prefixes


def prefix_differences(ranks: Sequence[Rank], contents: Contents, rows: Iterable[SharedPrefix]) -> list[str]:
    """Shared prefixes of any version against the trunks at their instants."""
    found = Differences()
    latest: dict[tuple[int, int], SharedPrefix] = {}
    for row in rows:
        if (row.as_of_us, row.place) not in latest or row.version >= latest[row.as_of_us, row.place].version:
            latest[row.as_of_us, row.place] = row
    for at in sorted({as_of for as_of, _ in latest}):
        ours = [latest[key] for key in sorted(latest) if key[0] == at]
        found.same(f"places at {at}", [row.place for row in ours], list(range(1, len(ours) + 1)))
        found.same(f"order at {at}", ours, sorted(ours, key=lambda row: (-row.extra_tokens, row.content_id)))
        told = sorted(_trunk(row) for row in ours)
        wanted = sorted(_plain(trunk) for trunk in fleet.trunks(list(ranks), contents, at))
        found.same(f"trunks at {at}", told, wanted)
    return found


def _trunk(row: SharedPrefix) -> tuple[Any, ...]:
    return (
        row.extra_tokens,
        row.blocks,
        row.tokens,
        row.copies,
        row.instances,
        row.extra_blocks,
        row.parent_content_id is None,
        tuple(row.ranks),
        -1 if row.depth_tokens is None else row.depth_tokens,
        row.first_seen_us,
    )


def _plain(trunk: fleet.Trunk) -> tuple[Any, ...]:
    return (
        trunk.extra_tokens,
        trunk.blocks,
        trunk.tokens,
        trunk.copies,
        trunk.instances,
        trunk.extra_blocks,
        trunk.rooted,
        trunk.ranks,
        -1 if trunk.depth_tokens is None else trunk.depth_tokens,
        trunk.first_seen_us,
    )


__all__ = ["coverage_differences", "fleet_differences", "prefix_differences", "rank_differences", "recompute_differences"]
