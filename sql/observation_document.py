"""One JSON document of coverage: what was observed of every rank, and why the rest was not. Pure.

Every list says whose clock its times are of: ``engine``, or ``forwarder`` (that of the forwarder that noted it).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any, Literal

from schemas.records import rank_key
from sql.observation import Gap, Observation, Rank, Run, by_rank, counted, liveness, merged, share, unwatched
from sql.observation_figures import insertions, residual
from sql.times import iso

Document = dict[str, Any]
Clock = Literal["engine", "forwarder"]

_RANK_FIELDS = ("coverage", "register", "reasons", "identity_coverage", "batches", "lost_batches", "refused_batches", "lives", "model")
_REGISTERS = ("indeterminate", "lower_bound", "exact")


def coverage_document(figures: Document, observation: Observation) -> Document:
    """The document of ``figures`` (of :func:`sql.figures.assemble`, in whatever cut) and of what was seen beside them."""
    fleet = figures["fleet"] if "by" in figures else figures
    footprint, repeat = fleet["duplicate_footprint"], fleet["repeat_compute"]
    return {
        "span": figures["span"],
        "semantics_version": figures["semantics_version"],
        "provisional": figures["provisional"],
        "warnings": figures["warnings"],
        "coverage": repeat["coverage"],
        "repeat_compute": {name: repeat[name] for name in ("register", "reasons")},
        "duplicate_footprint": {name: footprint[name] for name in ("register", "reasons")},
        "zero_duplicates": residual(figures, observation),
        "insertions": asdict(insertions(figures)),
        "ranks": _ranks(figures, observation),
        "gaps": _listed("engine", [_gap(gap) for gap in observation.gaps], observation.gaps_found),
        "forwarders": _listed("forwarder", _runs(observation)),
        "unwatched": _listed("forwarder", _unwatched(observation)),
        "identity_refused": _listed(
            "engine",
            [
                {"rank": _key(each.instance_id, each.dp_rank), "group_idx": each.group_idx, "refused": each.refused}
                | _between(each.from_us, each.to_us)
                for each in observation.refused_identities
            ],
        ),
        "key_spaces": [
            {"key_epoch": space.key_epoch, "canary": space.canary or None, "ranks": [rank_key(*rank) for rank in space.ranks]}
            for space in observation.key_spaces
        ],
        "models_undeclared": [rank_key(*rank) for rank in observation.models_undeclared],
        "breaches": _listed(
            "engine",
            [
                {
                    "rank": _key(each.instance_id, each.dp_rank),
                    "kind": each.kind,
                    "at": _iso(each.at_us),
                    "scraped_at_forwarder": _iso_ms(each.scraped_at_ms),
                    "found": each.found,
                    "bound": each.bound,
                }
                for each in observation.breaches
            ],
            observation.breaches_found,
        ),
        "facts_since": _iso(observation.facts_since_us),
        "audit": [asdict(each) | {"audited": each.audited} for each in observation.audit],
        "parent_conflicts": {"contents": observation.parent_conflicts, "sampled": observation.parent_conflicts_sampled},
        "dead_letters": {
            "found": observation.dead_letters_found,
            "entries": [asdict(each) for each in observation.dead_letters],
        },
    }


def _listed(clock: Clock, entries: Sequence[Document], found: int | None = None) -> Document:
    return {"clock": clock, "found": len(entries) if found is None else found, "entries": list(entries)}


def _key(instance_id: str, dp_rank: int) -> str:
    return rank_key(instance_id, dp_rank)


def _iso(us: int | None) -> str | None:
    return None if us is None else iso(us)


def _iso_ms(ms: int | None) -> str | None:
    return None if ms is None else iso(ms * 1_000)


def _between(from_us: int | None, to_us: int | None) -> Document:
    return {"from": _iso(from_us), "to": _iso(to_us)}


def _gap(gap: Gap) -> Document:
    return {
        "rank": rank_key(*gap.rank),
        "kind": gap.kind,
        "reason": gap.reason,
        "batches": gap.batches,
        **_between(gap.from_us, gap.to_us),
        "narrowed": gap.narrowed,
        "forwarder_from": _iso_ms(gap.from_ms),
        "forwarder_to": _iso_ms(gap.to_ms),
        "incarnation": gap.incarnation or None,
        "life_id": gap.life_id or None,
    }


def _runs(observation: Observation) -> list[Document]:
    return [
        {
            "rank": rank_key(*run.rank),
            "incarnation": run.incarnation,
            "started": _iso_ms(run.first_ms),
            "last_heard": _iso_ms(run.last_ms),
            "state": _state(run, observation),
            "stop_reason": run.stop_reason,
            "staleness_ms": run.staleness_ms or None,
            "lost": sum(drop.lost for drop in run.drops),
            "refused": sum(drop.refused for drop in run.drops),
        }
        for runs in by_rank(observation.runs).values()
        for run in runs
    ]


def _state(run: Run, observation: Observation) -> str:
    return liveness(run, observation.horizon_ms if observation.horizon_ms is not None else run.last_ms)


def _unwatched(observation: Observation) -> list[Document]:
    return [
        {"rank": rank_key(*rank), "from": _iso_ms(start), "to": _iso_ms(end), "ms": end - start}
        for rank, runs in by_rank(observation.runs).items()
        for start, end in unwatched(runs)
    ]


def _ranks(figures: Document, observation: Observation) -> list[Document]:
    """Every rank that windows or forwarders tell of, worst first."""
    told = {(rank["instance_id"], rank["dp_rank"]): rank for rank in figures["ranks"]}
    runs = by_rank(observation.runs)
    gaps = _counts(gap.rank for gap in observation.gaps)
    breaches = _counts((each.instance_id, each.dp_rank) for each in observation.breaches)
    found = []
    for rank in sorted(told.keys() | runs.keys()):
        figure = told.get(rank, {"register": "indeterminate", "reasons": ["not_observed"], "coverage": 0.0})
        own = runs.get(rank, [])
        span = (min((run.first_ms for run in own), default=0), max((run.last_ms for run in own), default=0))
        stretches = counted(own, [gap for gap in observation.gaps if gap.rank == rank])
        found.append(
            {"rank": rank_key(*rank), "instance_id": rank[0], "dp_rank": rank[1]}
            | {name: figure.get(name) for name in _RANK_FIELDS}
            | {
                "gaps": gaps.get(rank, 0),
                "breaches": breaches.get(rank, 0),
                "forwarder": _state(own[-1], observation) if own else None,
                "forwarder_runs": len(own),
                "counted_by_forwarder": share(merged(stretches), span) if own else None,
                "unwatched_ms": sum(end - start for start, end in unwatched(own)),
            }
        )
    return sorted(found, key=lambda rank: (rank["coverage"] or 0, _REGISTERS.index(rank["register"]), -rank["gaps"], rank["rank"]))


def _counts(ranks: Iterable[Rank]) -> dict[Rank, int]:
    found: dict[Rank, int] = {}
    for rank in ranks:
        found[rank] = found.get(rank, 0) + 1
    return found
