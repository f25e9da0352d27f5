"""The rollups counted the slow way, in Python, from the records that were inserted: what the tables must hold."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

from schemas.records import DuplicateWindow, GroupCounters, RankWindow
from sql.database import Database
from sql.result_rows import GROUP_STATES, GROUP_SUMS, HISTOGRAMS

S = 1_000_000
GRAINS = {"5m": 300, "1h": 3_600, "1d": 86_400}
SILENCE_S = 7 * 86_400

PART = ("life_id", "semantics_version", "workload", "model", "reuse_reporting", "removals", "kv_connector", "key_epoch", "canary")
COUNTS = (
    *("batches", "duplicate_batches", "lost_batches", "refused_batches", "unknown_events", "unresolved_blocks"),
    *("scrapes", "breaches_found"),
)
LAST = ("prefill_rate", "prefill_rate_source", "gpus_per_rank", "pool_blocks", "departed")
RANK_VALUES = (
    *("windows", "is_final", "expected_us", "observed_us", "first_window", "last_window", "first_batch", "last_batch", *COUNTS),
    *("warmup", "reasons", "register", *LAST),
)
SUMS = ("inside_token_us", "between_token_us", "inside_block_us", "between_block_us")
BYTE_SUMS = ("inside_byte_ms", "between_byte_ms")
MAXIMA = ("extra_tokens_max", "inside_tokens_max", "between_tokens_max", "extra_blocks_max", "inside_blocks_max", "between_blocks_max")
ENDS = ("inside_tokens_end", "between_tokens_end", "inside_blocks_end", "between_blocks_end", "inside_bytes_end", "between_bytes_end")
REGISTERS = ("register", "inside_register", "between_register")
DUPLICATE_VALUES = (
    *("windows", "is_final", "complete", "as_of", "covered_us", "expected_ranks", "expected_us", "observed_us", "ranks", "late_changes"),
    *(*SUMS, *BYTE_SUMS, *MAXIMA, "extra_bytes_max", *ENDS, *REGISTERS, "reasons"),
)

Key = tuple[Any, ...]
Values = dict[str, Any]


def newest(rows: Iterable[Any]) -> list[Any]:
    """Of each key the row of the highest version."""
    found: dict[Key, Any] = {}
    for row in rows:
        key: Key
        if isinstance(row, RankWindow):
            key = (row.instance_id, row.dp_rank, row.life_id, row.window_start_us, row.semantics_version)
        else:
            key = (row.scope, row.scope_key, row.tier, row.window_start_us, row.semantics_version)
        if key not in found or found[key].version <= row.version:
            found[key] = row
    return list(found.values())


def cells(start_us: int, end_us: int, seconds: int) -> list[int]:
    """Starts, in seconds, of the windows of ``seconds`` that [``start_us``, ``end_us``) reaches into; the first at least."""
    first = start_us // (seconds * S) * seconds
    return list(range(first, max(first + 1, -(-end_us // S)), seconds))


def share(value: int, start: int, end: int, since: int, until: int) -> int:
    """The part of ``value``, spread from ``start`` to ``end``, that lies in [``since``, ``until``): differences of a running whole."""

    def up_to(at: int) -> int:
        inside = min(max(at, start), end) - start
        return value if inside == end - start else value * inside // (end - start)

    return up_to(until) - (0 if since <= start else up_to(since))


def weakest(registers: Iterable[str]) -> str:
    """The weakest of them."""
    named = set(registers)
    return "indeterminate" if "indeterminate" in named else "lower_bound" if "lower_bound" in named else "exact"


# -- ranks ----------------------------------------------------------------------------------------------------------


def rank_rollups(records: Iterable[RankWindow]) -> dict[Key, Values]:
    """(grain, start, instance, rank, *part) to what the row says; ``groups``: by number, those in which nothing is zero only."""
    everything = list(records)
    rows = newest(everything)
    found: dict[Key, Values] = {}
    for grain, seconds in GRAINS.items():
        parts: dict[Key, list[RankWindow]] = defaultdict(list)
        for row in rows:
            for at in cells(row.window_start_us, row.window_start_us + row.window_us, seconds):
                parts[grain, at, row.instance_id, row.dp_rank, *_part(row)].append(row)
        for key, members in parts.items():
            found[key] = _part_of_ranks(key[1], seconds, members)
    _expect(found, everything, rows)
    _say_absent(found, everything, rows)
    return found


def _part(row: RankWindow) -> Key:
    return tuple(getattr(row, name) for name in PART)


def _part_of_ranks(at: int, seconds: int, rows: list[RankWindow]) -> Values:
    since, until = at * S, (at + seconds) * S
    last = max(rows, key=lambda row: row.window_start_us)
    begun = [row for row in rows if row.window_start_us >= since]
    values: Values = {
        "windows": sum(
            1 for row in rows for cell in cells(row.window_start_us, row.window_start_us + row.window_us, 300) if at <= cell < at + seconds
        ),
        "is_final": all(row.final for row in rows),
        "expected_us": 0,
        "observed_us": sum(share(row.observed_us, row.window_start_us, row.window_start_us + row.window_us, since, until) for row in rows),
        "first_window": min(row.window_start_us for row in rows),
        "last_window": last.window_start_us,
        "first_batch": min((row.first_batch_us for row in rows if row.first_batch_us), default=None),
        "last_batch": max((row.last_batch_us for row in rows if row.last_batch_us), default=None),
        "warmup": any(row.warmup for row in rows),
        "reasons": sorted({reason for row in rows for reason in row.reasons}),
        "register": weakest(row.register for row in rows),
    }
    values |= {name: sum(getattr(row, name) for row in begun) for name in COUNTS}
    values |= {name: getattr(last, name) for name in LAST}
    values["groups"] = _groups(begun, last)
    return values


def _groups(begun: list[RankWindow], last: RankWindow) -> dict[int, Values]:
    found: dict[int, Values] = {}
    for index in sorted({group.group_idx for row in [*begun, last] for group in row.groups}):
        members = [group for row in begun for group in row.groups if group.group_idx == index]
        state = next((group for group in last.groups if group.group_idx == index), GroupCounters(group_idx=index, gpu=False))
        values = {name: sum(getattr(group, name) for group in members) for name in GROUP_SUMS}
        values |= {name: getattr(state, name) for name in GROUP_STATES}
        for name in HISTOGRAMS:
            histogram: dict[int, int] = defaultdict(int)
            for group in members:
                for bucket, count in zip(getattr(group, f"{name}_buckets"), getattr(group, f"{name}_counts"), strict=True):
                    histogram[bucket] += count
            values[name] = dict(sorted(histogram.items()))
        if any(values.values()):
            found[index] = values
    return found


def _expect(found: dict[Key, Values], everything: list[RankWindow], rows: list[RankWindow]) -> None:
    """From the rank's first window, later from the beginning, to the end or its departure; parts of one version of the rules in turn."""
    first: dict[Key, int] = {}
    for row in everything:
        rank = row.instance_id, row.dp_rank
        first[rank] = min(first.get(rank, row.window_start_us), row.window_start_us)
    turns: dict[Key, list[Key]] = defaultdict(list)
    for key in found:
        if key[0] == "5m":
            turns[key[1], key[2], key[3], key[5]].append(key)
    for (at, instance, rank, semantics), keys in turns.items():
        over = (at + 300) * S
        mine = [
            row
            for row in rows
            if (row.instance_id, row.dp_rank, row.semantics_version) == (instance, rank, semantics)
            and at in cells(row.window_start_us, row.window_start_us + row.window_us, 300)
        ]
        last = max(mine, key=lambda row: (row.window_start_us, row.last_batch_us))
        if last.departed:
            over = min(over, max(row.window_start_us + row.window_us for row in mine))
        keys.sort(key=lambda key: (found[key]["first_window"], _sortable(key[4:])))
        begins = [max(at * S, first[instance, rank])] + [max(at * S, found[key]["first_window"]) for key in keys[1:]]
        for key, begin, end in zip(keys, begins, [*begins[1:], over], strict=True):
            found[key]["expected_us"] = max(0, end - begin)
    for key, values in found.items():
        if key[0] != "5m":
            values["expected_us"] = sum(
                found[("5m", at, *key[2:])]["expected_us"]
                for at in range(key[1], key[1] + GRAINS[key[0]], 300)
                if ("5m", at, *key[2:]) in found
            )


def _sortable(part: Key) -> Key:
    """NULL comes last, as in the engine."""
    return tuple((value is None, value or 0 if not isinstance(value, str) else value) for value in part)


def _say_absent(found: dict[Key, Values], everything: list[RankWindow], rows: list[RankWindow]) -> None:
    heard = sorted({at for row in everything for at in cells(row.window_start_us, row.window_start_us + row.window_us, 300)})
    live = set(heard)
    for before, after in pairwise(heard):
        if after - before - 300 <= SILENCE_S:
            live |= set(range(before, after, 300))
    absences: dict[Key, int] = defaultdict(int)
    for rank in sorted({(row.instance_id, row.dp_rank) for row in rows}):
        held: dict[int, RankWindow] = {}
        for row in rows:
            if (row.instance_id, row.dp_rank) == rank:
                for at in cells(row.window_start_us, row.window_start_us + row.window_us, 300):
                    order = (row.window_start_us, row.semantics_version, row.last_batch_us)
                    if at not in held or order > (held[at].window_start_us, held[at].semantics_version, held[at].last_batch_us):
                        held[at] = row
        last: RankWindow | None = None
        for at in sorted(live):
            if at in held:
                last = held[at]
            elif last is not None and not last.departed:
                for grain, seconds in GRAINS.items():
                    absences[grain, at // seconds * seconds, *rank, "", *_part(last)[1:]] += 1
                    key = (grain, at // seconds * seconds, *rank, "", *_part(last)[1:])
                    found.setdefault(key, _absence(at))["last_window"] = at * S
    for key, number in absences.items():
        found[key]["expected_us"] = number * 300 * S


def _absence(at: int) -> Values:
    values: Values = dict.fromkeys(RANK_VALUES, 0) | dict.fromkeys(("first_batch", "last_batch", *LAST))
    values |= {"is_final": True, "warmup": False, "departed": False, "reasons": ["absent"], "register": "indeterminate"}
    return values | {"first_window": at * S, "last_window": at * S, "groups": {}}


def stored_ranks(database: Database) -> dict[Key, Values]:
    """What ``rank_rollups`` holds, in the form of :func:`rank_rollups`. Part numbers must count up from 0."""
    plain = [name for name in RANK_VALUES if not name.startswith(("first_", "last_"))]
    times = ["first_window", "last_window", "first_batch", "last_batch"]
    groups = ["group_idx", *GROUP_SUMS, *GROUP_STATES, *(f"{name}_{side}" for name in HISTOGRAMS for side in ("buckets", "counts"))]
    asked = ["grain", "toUnixTimestamp(window_start)", "instance_id", "dp_rank", *PART, "part", "window_us", *plain]
    asked += [f"toUnixTimestamp64Micro({name})" for name in times] + [f"`groups.{name}`" for name in groups]
    found: dict[Key, Values] = {}
    numbers: dict[Key, list[int]] = defaultdict(list)
    for row in database.query(f"SELECT {', '.join(asked)} FROM rank_rollups FINAL ORDER BY ALL").rows:
        key, (part, window_us), rest = row[: 4 + len(PART)], row[4 + len(PART) : 6 + len(PART)], row[6 + len(PART) :]
        assert window_us == GRAINS[key[0]] * S
        assert key not in found, key
        numbers[key[:4]].append(part)
        values = dict(zip((*plain, *times), rest, strict=False))
        values["reasons"] = list(values["reasons"])
        values["groups"] = _stored_groups(dict(zip(groups, rest[len(plain) + len(times) :], strict=True)))
        found[key] = values
    for parts in numbers.values():
        assert sorted(parts) == list(range(len(parts)))
    return found


def _stored_groups(columns: dict[str, Sequence[Any]]) -> dict[int, Values]:
    found = {}
    for place, index in enumerate(columns["group_idx"]):
        values = {name: columns[name][place] for name in (*GROUP_SUMS, *GROUP_STATES)}
        for name in HISTOGRAMS:
            values[name] = dict(zip(columns[f"{name}_buckets"][place], columns[f"{name}_counts"][place], strict=True))
        if any(values.values()):
            found[index] = values
    return found


# -- duplicates -----------------------------------------------------------------------------------------------------


def duplicate_rollups(records: Iterable[DuplicateWindow]) -> dict[Key, Values]:
    """(grain, start, scope, key, tier, semantics_version, key_epoch) to what the row says."""
    parts: dict[Key, list[DuplicateWindow]] = defaultdict(list)
    for row in newest(records):
        for grain, seconds in GRAINS.items():
            for at in cells(row.window_start_us, row.as_of_us, seconds):
                parts[grain, at, row.scope, row.scope_key, row.tier, row.semantics_version, row.key_epoch].append(row)
    return {key: _part_of_duplicates(key[1], GRAINS[key[0]], rows) for key, rows in parts.items()}


def _part_of_duplicates(at: int, seconds: int, rows: list[DuplicateWindow]) -> Values:
    since, until = at * S, (at + seconds) * S
    last = max(rows, key=lambda row: row.as_of_us)

    def total(name: str) -> int:
        return sum(share(getattr(row, name), row.window_start_us, row.as_of_us, since, until) for row in rows)

    def covered(row: DuplicateWindow) -> int:
        return share(row.as_of_us - row.window_start_us, row.window_start_us, row.as_of_us, since, until)

    values: Values = {
        "windows": sum(1 for row in rows for cell in cells(row.window_start_us, row.as_of_us, 300) if at <= cell < at + seconds),
        "is_final": all(row.final for row in rows),
        "complete": all(row.shards_reported >= row.shards for row in rows),
        "as_of": last.as_of_us,
        "covered_us": sum(covered(row) for row in rows),
        "expected_ranks": last.expected_ranks,
        "expected_us": sum(covered(row) * row.expected_ranks for row in rows),
        "observed_us": total("observed_us"),
        "ranks": last.ranks,
        "late_changes": max(row.late_changes for row in rows),
        "reasons": sorted({reason for row in rows for reason in row.reasons}),
    }
    values |= {name: total(name) for name in SUMS}
    values |= {name: None if any(getattr(row, name) is None for row in rows) else total(name) for name in BYTE_SUMS}
    values |= {name: max(getattr(row, name) for row in rows) for name in MAXIMA}
    bytes_max = [row.extra_bytes_max for row in rows]
    values["extra_bytes_max"] = None if None in bytes_max else max(value for value in bytes_max if value is not None)
    values |= {name: getattr(last, name) for name in ENDS}
    values |= {name: weakest(getattr(row, name) for row in rows) for name in REGISTERS}
    return values


def stored_duplicates(database: Database) -> dict[Key, Values]:
    """What ``duplicate_rollups`` holds, in the form of :func:`duplicate_rollups`."""
    key_names = ["grain", "toUnixTimestamp(window_start)", "scope", "scope_key", "tier", "semantics_version", "key_epoch"]
    asked = [*key_names, "part", *("toUnixTimestamp64Micro(as_of)" if name == "as_of" else name for name in DUPLICATE_VALUES)]
    found: dict[Key, Values] = {}
    numbers: dict[Key, list[int]] = defaultdict(list)
    for row in database.query(f"SELECT {', '.join(asked)} FROM duplicate_rollups FINAL ORDER BY ALL").rows:
        assert row[:7] not in found
        numbers[row[:5]].append(row[7])
        values = dict(zip(DUPLICATE_VALUES, row[8:], strict=True))
        values["reasons"] = list(values["reasons"])
        found[row[:7]] = values
    for parts in numbers.values():
        assert sorted(parts) == list(range(len(parts)))
    return found
