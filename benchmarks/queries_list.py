"""Which queries are timed, and what each may take. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from benchmarks.queries_facts import a_deploy
from benchmarks.queries_rows import RANKS_PER_INSTANCE, WORKLOADS, Fleet
from benchmarks.queries_run import Query
from sql import rollup_parts

HOUR_MS = 50.0
"""What one rank's hour may take, median."""

SPAN_MS = 300.0
"""What a view or panel over the whole span may take at its grain, median."""

GRAINS = tuple(grain.name for grain in rollup_parts.GRAINS)
_GRAIN = re.compile(rf"(\w+)_({'|'.join(GRAINS)})")


def in_span(time: str) -> str:
    """The condition that ``time`` lies in the span, whose bounds are parameters."""
    return f"{time} >= fromUnixTimestamp64Micro({{since:Int64}}, 'UTC') AND {time} < fromUnixTimestamp64Micro({{until:Int64}}, 'UTC')"


_OF_RANK = "instance_id = {instance:String} AND dp_rank = {rank:Int32}"
_FLEET = "scope = 'fleet' AND tier = 'GPU'"
_TOP = "GROUP BY instance_id, dp_rank ORDER BY most DESC LIMIT 20"

_EVERYTHING = "SELECT * FROM {view} WHERE {span}"

_QUESTIONS: Mapping[str, tuple[tuple[str, str, str], ...]] = {
    "repeat_compute": (
        ("one rank", "1h", f"SELECT * FROM {{view}} WHERE {_OF_RANK} AND {{span}}"),
        ("top ranks", "1d", f"SELECT instance_id, dp_rank, sum(evicted_tokens) AS most, min(coverage) FROM {{view}} WHERE {{span}} {_TOP}"),
    ),
    "duplicate_footprint": (
        ("the fleet", "1h", f"SELECT * FROM {{view}} WHERE {_FLEET} AND {{span}}"),
        ("workloads", "1h", "SELECT * FROM {view} WHERE scope = 'workload' AND tier = 'GPU' AND {span}"),
        ("one rank", "1h", "SELECT * FROM {view} WHERE scope = 'rank' AND scope_key = {key:String} AND tier = 'GPU' AND {span}"),
        (
            "top ranks",
            "1d",
            "SELECT scope_key, max(extra_tokens_max) AS most FROM {view} WHERE scope = 'rank' AND tier = 'GPU' AND {span} "
            "GROUP BY scope_key ORDER BY most DESC LIMIT 20",
        ),
    ),
    "workload_pairs": (("", "1h", "SELECT * FROM {view} WHERE tier = 'GPU' AND {span}"),),
    "return_times": (
        ("", "1d", "SELECT what, from_us, to_us, sum(blocks), min(coverage) FROM {view} WHERE {span} GROUP BY what, from_us, to_us"),
    ),
    "rank_health": (
        ("one rank", "1h", f"SELECT * FROM {{view}} WHERE {_OF_RANK} AND {{span}}"),
        (
            "worst ranks",
            "1d",
            "SELECT instance_id, dp_rank, sum(observed_us) / sum(expected_us) AS share, sum(lost_batches), sum(restarts) "
            "FROM {view} WHERE {span} GROUP BY instance_id, dp_rank ORDER BY share LIMIT 20",
        ),
    ),
}
"""What people ask of the views of a grain over the whole span: question, the grain at which two weeks are asked, SQL.

A series over two weeks is read by the hour, as the dashboards do, and what goes over every rank by the day. A view that is not here is a
series, and asked for everything.
"""

_ALONE: Mapping[str, tuple[tuple[str, str, str], ...]] = {
    "interruptions": (("newest 500", "observed_at", "SELECT * FROM {view} WHERE {span} ORDER BY observed_at DESC LIMIT 500"),),
    "top_shared_prefixes": (("", "", "SELECT * FROM {view}"),),
    "deploys_declared": (("", "", "SELECT * FROM {view}"),),
    "deploy_effect": (("", "", "SELECT * FROM {view}"),),
    "deploy_effect_of": (("one deploy", "", "SELECT * FROM {view}(deploy = {deploy:String})"),),
    "life_primary_groups": (("", "", "SELECT * FROM {view}"),),
}
"""Views of no grain that answer for the whole span: question, column of time, SQL."""

_OF_A_DAY: Mapping[str, tuple[str, str, str]] = {
    "coverage_gaps": ("newest 500", "window_start", "SELECT * FROM {view} WHERE {span} ORDER BY window_start DESC LIMIT 500"),
}
"""Views of single windows of 5 minutes, every rank's: asked for the newest day, as the dashboards do."""

_NOT_TIMED = frozenset({"recomputed_blocks"})
"""Holds every block against every window, whatever is asked of it: recomputed_blocks_between is for spans."""

_BACK_SINCE, _BACK_UNTIL = (f"fromUnixTimestamp64Micro({{{bound}:Int64}}, 'UTC')" for bound in ("since", "until"))
_OF_ROWS: Mapping[str, tuple[str, str]] = {
    "repeat_compute": ("window_start", _OF_RANK),
    "rank_window_groups": ("window_start", _OF_RANK),
    "return_times": ("window_start", _OF_RANK),
    "metric_breaches": ("window_start", _OF_RANK),
    f"recomputed_blocks_between(since = {_BACK_SINCE}, until = {_BACK_UNTIL})": ("back_at", _OF_RANK),
    "duplicate_footprint": ("window_start", "scope = 'rank' AND scope_key = {key:String} AND tier = 'GPU'"),
    "workload_pairs": ("window_start", "tier = 'GPU' AND workload_a = 'agents' AND workload_b = 'chat'"),
}
"""Views of single windows and blocks: column of time, and what picks one rank."""

_TABLES: Mapping[str, tuple[str, str]] = {
    "rank_windows": ("window_start", _OF_RANK),
    "block_events": ("at", _OF_RANK),
    "lifecycle": ("at", _OF_RANK),
    "engine_metrics": ("at", _OF_RANK),
}


@dataclass(frozen=True)
class Span:
    """A stretch of engine time, microseconds."""

    name: str
    since_us: int
    until_us: int


def span(fleet: Fleet, name: str, length_s: int, before_end_s: int = 0) -> Span:
    """``length_s`` seconds that end ``before_end_s`` before the data does."""
    until = fleet.end_s - before_end_s
    return Span(name, (until - length_s) * 1_000_000, until * 1_000_000)


def whole(fleet: Fleet) -> Span:
    """Everything that was filled."""
    return span(fleet, f"{fleet.days} d", fleet.end_s - fleet.start_s)


def a_rank(fleet: Fleet) -> tuple[str, int]:
    """A rank in the middle of the fleet that has facts: its instance and number."""
    number = fleet.fact_stride * (min(fleet.fact_ranks, fleet.ranks) // 2)
    instance = number // RANKS_PER_INSTANCE
    return f"{(*WORKLOADS, 'misc')[instance % 7]}-{instance:04d}", number % RANKS_PER_INSTANCE


def _parameters(fleet: Fleet, of: Span) -> dict[str, object]:
    instance_id, dp_rank = a_rank(fleet)
    return {
        "since": of.since_us,
        "until": of.until_us,
        "instance": instance_id,
        "rank": dp_rank,
        "key": f"{instance_id}/{dp_rank}",
        "deploy": a_deploy(fleet),
    }


def of_views(views: Iterable[str], fleet: Fleet, *, all_grains: bool = False) -> Iterator[Query]:
    """The whole span of each of ``views`` that has a grain or answers for a whole span. ``rollup_*`` are what others are made of.

    Each at the grain at which so much is asked; ``all_grains``: at the others too, for information.
    """
    everything, day = whole(fleet), span(fleet, "1 d", fleet.day_hours * 3_600)
    other = {_named(view) for view in _OF_ROWS} | _NOT_TIMED
    for view in sorted(views):
        if view in other or view.startswith("rollup_"):
            continue
        parameters = _parameters(fleet, everything)
        if match := _GRAIN.fullmatch(view):
            base, grain = match.groups()
            for question, usual, sql in _QUESTIONS.get(base, (("", "1h", _EVERYTHING),)):
                if grain == usual or all_grains:
                    text, target = _fill(sql, view, "window_start"), SPAN_MS if grain == usual else None
                    yield Query(_name(view, question), grain, everything.name, text, parameters, target)
        elif view in _OF_A_DAY:
            question, time, sql = _OF_A_DAY[view]
            yield Query(_name(view, question), "5m", day.name, _fill(sql, view, time), _parameters(fleet, day), SPAN_MS)
        else:
            for question, time, sql in _ALONE.get(view, (("", "window_start", _EVERYTHING),)):
                yield Query(_name(view, question), "", everything.name, _fill(sql, view, time), parameters, SPAN_MS)


def rank_hour(views: Iterable[str], fleet: Fleet) -> Iterator[Query]:
    """One rank's hour, from the middle of the last day, of each view and large table of single windows, blocks and life signs."""
    hour = span(fleet, "1 h", 3_600, before_end_s=(fleet.day_hours - 1) // 2 * 3_600)
    present = set(views)
    for view, (time, where) in {**{name: how for name, how in _OF_ROWS.items() if _named(name) in present}, **_TABLES}.items():
        sql = f"SELECT * FROM {view} WHERE {where} AND {in_span(time)}"
        yield Query(_name(_named(view), "a rank's hour"), "rows", hour.name, sql, _parameters(fleet, hour), HOUR_MS)


def recent(fleet: Fleet) -> Iterator[Query]:
    """The windows themselves, for the whole fleet and short spans: told for information."""
    causes = ", ".join(f"sum({cause}_tokens)" for cause in ("evicted", "cleared", "restarted"))
    inside = in_span("window_start")
    for name, seconds in (("15 min", 900), ("1 h", 3_600)):
        of = span(fleet, name, seconds)
        for label, sql in (
            (
                "repeat_compute: the fleet",
                f"SELECT window_start, {causes}, avg(coverage) FROM repeat_compute WHERE {inside} GROUP BY window_start",
            ),
            (
                "repeat_compute: by workload",
                f"SELECT workload, {causes}, avg(coverage) FROM repeat_compute WHERE {inside} GROUP BY workload",
            ),
            (
                "duplicate_footprint: the fleet",
                f"SELECT window_start, inside_tokens_mean, between_tokens_mean FROM duplicate_footprint WHERE {_FLEET} AND {inside}",
            ),
            (
                "duplicate_footprint: top ranks",
                "SELECT scope_key, max(extra_tokens_max) AS most FROM duplicate_footprint "
                f"WHERE scope = 'rank' AND tier = 'GPU' AND {inside} GROUP BY scope_key ORDER BY most DESC LIMIT 20",
            ),
            ("return_times: the fleet", f"SELECT what, from_us, sum(blocks) FROM return_times WHERE {inside} GROUP BY what, from_us"),
        ):
            yield Query(label, "10 s", name, sql, _parameters(fleet, of))


def _fill(sql: str, view: str, time: str) -> str:
    return sql.replace("{view}", view).replace("{span}", in_span(time))


def _named(view: str) -> str:
    """The name of a view, without the values that it takes."""
    return view.partition("(")[0]


def _name(view: str, question: str) -> str:
    return f"{view}: {question}" if question else view
