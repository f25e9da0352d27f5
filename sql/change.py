"""Two spans held against each other: every figure before and after, and the difference where that means something. Pure.

Repeat compute and duplicate footprint are judged apart, and within them each cause and each part; the causes are never added together.
A figure that is refused keeps both its sides and has no difference.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from schemas.records import rank_key
from sql import change_refusals as refuse
from sql.change_refusals import SIDES, listed, refusal
from sql.change_spans import duration
from sql.duplicate_figures import HEADLINE_TIER, duplicate_footprint
from sql.figure_parts import Document, by_rank, coverage, measurable, tells_copies
from sql.figures import span_document
from sql.repeat_figures import CAUSES, repeat_compute
from sql.total_types import By, LifeTotals, Totals

MIN_COVERAGE = 0.8
"""A side that was observed for less of its span is not compared, unless one asks for it."""

PARTS = ("inside_instances", "between_instances")

_HOUR_US = 3_600_000_000


@dataclass(frozen=True)
class Cut:
    """Which ranks are looked at: those of ``workload`` and of ``model``; ``None``: all."""

    workload: str | None = None
    model: str | None = None

    @property
    def by(self) -> By | None:
        """Scope of duplicates that has to be loaded for it."""
        if (self.workload is None) == (self.model is None):
            return None
        return "workload" if self.model is None else "model"

    def has(self, life: LifeTotals) -> bool:
        """Whether ``life`` is of it."""
        return self.workload in (None, life.workload) and self.model in (None, life.model)

    def __str__(self) -> str:
        parts = [f"{name} {value}" for name, value in (("workload", self.workload), ("model", self.model)) if value is not None]
        return " and ".join(parts) or "any rank"


class _Side:
    """One span: its figures, and what decides whether they compare."""

    def __init__(self, totals: Totals, cut: Cut) -> None:
        self.totals = totals
        self.lives = [life for life in totals.lives if cut.has(life)]
        self.seen = [life for life in self.lives if life.life_id]
        self.fleet_seen = [life for life in totals.lives if life.life_id]
        self.repeat = repeat_compute(self.lives, totals.span)
        both = cut.workload is not None and cut.model is not None
        self.duplicates = None if both else duplicate_footprint(totals, cut.by or "fleet", cut.workload or cut.model or "")
        ranks = by_rank(self.lives)
        able = [rank for rank in ranks if measurable(rank)]
        self._of_able = [life for rank in able for life in rank]
        self._of_telling = [life for rank in able if tells_copies(rank) for life in rank]

    def hours(self, cause: str) -> float:
        """Hours for which the ranks that tell ``cause`` were observed, on average."""
        lives = self._of_telling if cause == "concurrent" else self._of_able
        return self.totals.span.length_us / _HOUR_US * coverage(lives, self.totals.span)

    @property
    def counted(self) -> float:
        """The share of the span up to which duplicates are counted."""
        span = self.totals.span
        fleet = [window.as_of_us for window in self.totals.duplicates if (window.scope, window.tier) == ("fleet", HEADLINE_TIER)]
        reached = max(fleet, default=span.start_us)
        return min(1.0, max(0, reached - span.start_us) / span.length_us) if span.length_us else 0.0

    @property
    def provisional(self) -> bool:
        """Whether a row of it will be replaced."""
        return not (all(life.final for life in self.lives) and all(window.final for window in self.totals.duplicates))

    def document(self) -> Document:
        """What stands beside its figures."""
        totals = self.totals
        said = ("coverage", "identity_coverage", "register", "reasons")
        duplicates = self.duplicates
        return {
            "span": span_document(totals),
            "length": duration(totals.span.length_us),
            "semantics_version": totals.semantics_version,
            "left_out_versions": totals.left_out_versions,
            "key_epochs": sorted({life.key_epoch for life in self.seen}),
            "canaries": sorted({life.canary for life in self.seen}),
            "ranks": _ranks(self.lives),
            "absent_ranks": sorted(set(_ranks(self.lives)) - set(_ranks(self.seen))),
            "provisional": self.provisional,
            "repeat_compute": {name: self.repeat[name] for name in (*said, "concurrent_ranks", "measurable_ranks")},
            "duplicate_footprint": duplicates and {name: duplicates[name] for name in said} | {"counted": self.counted},
        }


def compare(before: Totals, after: Totals, cut: Cut | None = None, min_coverage: float = MIN_COVERAGE) -> Document:
    """The document of a change. Both totals are loaded with ``cut.by``.

    ``comparable`` says that no figure is refused as a whole; what is, says why under ``refused``, as do single causes and parts.
    """
    cut = cut or Cut()
    sides = [_Side(before, cut), _Side(after, cut)]
    warnings: list[str] = []
    repeat = _repeat(sides, cut, min_coverage, warnings)
    duplicates = _duplicates(sides, cut, min_coverage)
    refused = _distinct(repeat["refused"] + duplicates["refused"])
    return {
        "comparable": repeat["comparable"] and (duplicates["comparable"] or sides[0].duplicates is None),
        "refused": refused,
        "warnings": _warnings(sides) + warnings,
        "workload": cut.workload,
        "model": cut.model,
        "min_coverage": min_coverage,
        "before": sides[0].document(),
        "after": sides[1].document(),
        "repeat_compute": repeat,
        "duplicate_footprint": duplicates,
    }


def change(before: float | None, after: float | None, *, comparable: bool) -> Document:
    """A value before and after; ``difference`` = after - before, ``ratio`` = after / before (``None`` where before is 0)."""
    told = {"before": before, "after": after}
    if not comparable or before is None or after is None:
        return told | {"difference": None, "ratio": None}
    return told | {"difference": after - before, "ratio": after / before if before else None}


def _empty(sides: Sequence[_Side], cut: Cut) -> list[Document]:
    return [
        refusal("no_windows", f"no window of {cut} was counted {name}") for name, side in zip(SIDES, sides, strict=True) if not side.seen
    ]


def _repeat(sides: Sequence[_Side], cut: Cut, min_coverage: float, warnings: list[str]) -> Document:
    cores = [side.repeat for side in sides]
    seen = [side.seen for side in sides]
    refused = _empty(sides, cut) or [
        *refuse.rules([side.totals.semantics_version for side in sides]),
        *refuse.low_coverage([core["coverage"] for core in cores], min_coverage),
        *refuse.keyed_differently(seen),
        *refuse.redeclared(seen, connectors=True),
        *refuse.says_nothing(cores),
    ]
    causes = {cause: _cause(sides, cause, not refused, min_coverage, warnings) for cause in CAUSES}
    return {"comparable": not refused, "refused": refused, "causes": causes}


def _cause(sides: Sequence[_Side], cause: str, comparable: bool, min_coverage: float, warnings: list[str]) -> Document:
    counted: list[Document] = [(side.repeat[cause] if side.seen else None) or {} for side in sides]
    refused = [
        refusal("cannot_tell", f"the stream {name} does not tell {cause} recomputes")
        for name, each in zip(SIDES, counted, strict=True)
        if comparable and not each
    ]
    told = comparable and not refused
    long = sides[0].totals.span.length_us == sides[1].totals.span.length_us
    costs = told and _costs_compare(counted, cause, min_coverage, warnings)
    hours = [side.hours(cause) for side in sides]

    def of(field: str, told: bool) -> Document:
        return change(counted[0].get(field), counted[1].get(field), comparable=told and long)

    def per_hour(field: str, told: bool) -> Document:
        values = [each.get(field) for each in counted]
        rates = [None if value is None or not spent else value / spent for value, spent in zip(values, hours, strict=True)]
        return change(*rates, comparable=told)

    return {
        "comparable": told,
        "refused": refused,
        "tokens": of("tokens", told),
        "blocks": of("blocks", told),
        "gpu_seconds": of("gpu_seconds", costs),
        "per_hour": {"tokens": per_hour("tokens", told), "blocks": per_hour("blocks", told), "gpu_seconds": per_hour("gpu_seconds", costs)},
        "rated_tokens": {name: each.get("rated_tokens") for name, each in zip(SIDES, counted, strict=True)},
        "method": {name: each.get("method") for name, each in zip(SIDES, counted, strict=True)},
    }


def _costs_compare(counted: Sequence[Document], cause: str, min_coverage: float, warnings: list[str]) -> bool:
    """Whether GPU time of both sides stands for the same thing: one method, and most of the tokens."""
    if any(each["gpu_seconds"] is None for each in counted):
        return False
    methods = {each["method"] for each in counted if each["tokens"]}
    shares = [each["rated_tokens"] / each["tokens"] if each["tokens"] else 1.0 for each in counted]
    if len(methods) > 1:
        named = [each["method"] if each["tokens"] else "no" for each in counted]
        warnings.append(f"GPU time of {cause} is not compared: by {named[0]} rates before, by {named[1]} ones after")
    elif min(shares) < min_coverage:
        known = [refuse.percent(share) for share in shares]
        warnings.append(f"GPU time of {cause} is not compared: a rate is known of {known[0]} of the tokens before, of {known[1]} after")
    else:
        return True
    return False


def _duplicates(sides: Sequence[_Side], cut: Cut, min_coverage: float) -> Document:
    cores = [side.duplicates for side in sides]
    if cores[0] is None or cores[1] is None:
        why = refusal("two_cuts", "extra copies are told by workload or by model, not by both at once")
        return {"comparable": False, "refused": [why], **dict.fromkeys(PARTS)}
    both = [cores[0], cores[1]]
    seen = [side.fleet_seen for side in sides]
    refused = _empty(sides, cut) or [
        *refuse.rules([side.totals.semantics_version for side in sides]),
        *refuse.low_coverage([core["coverage"] for core in both], min_coverage),
        *refuse.keyed_differently(seen),
        *refuse.several_keys(seen),
        *refuse.redeclared(seen, connectors=False),
        *_unsettled(sides, both, min_coverage),
    ]
    parts = {part: _part(sides, both, part, not refused) for part in PARTS}
    if not refused and not any(each["comparable"] for each in parts.values()):
        refused = _distinct([why for each in parts.values() for why in each["refused"]])
    return {"comparable": not refused, "refused": refused, **parts}


def _unsettled(sides: Sequence[_Side], cores: Sequence[Document], min_coverage: float) -> list[Document]:
    """A mean over what is not counted yet is too low by as much."""
    found = []
    for name, side, core in zip(SIDES, sides, cores, strict=True):
        if "no_duplicate_windows" not in core["reasons"] and side.counted < min_coverage:
            found.append(refusal("behind", f"duplicates {name} are counted for {refuse.percent(side.counted)} of the span so far"))
        if "shards_missing" in core["reasons"]:
            found.append(refusal("shards_missing", f"not all content shards have reported {name}"))
    return found


def _part(sides: Sequence[_Side], cores: Sequence[Document], part: str, comparable: bool) -> Document:
    figures = [core[part] for core in cores]
    registers = [{"register": figure["register"], "reasons": core["reasons"]} for figure, core in zip(figures, cores, strict=True)]
    refused = refuse.says_nothing(registers) if comparable else []
    told = comparable and not refused
    long = sides[0].totals.span.length_us == sides[1].totals.span.length_us

    def level(unit: str, name: str) -> Document:
        values = (figure[f"extra_{unit}"][name] if side.seen else None for side, figure in zip(sides, figures, strict=True))
        return change(*values, comparable=told and (long or name == "mean"))

    return {
        "comparable": told,
        "refused": refused,
        "register": {name: figure["register"] for name, figure in zip(SIDES, figures, strict=True)},
        "extra_tokens": {name: level("tokens", name) for name in ("mean", "max")},
        "extra_blocks": {name: level("blocks", name) for name in ("mean", "max")},
        "extra_bytes": {"mean": level("bytes", "mean")},
    }


def _warnings(sides: Sequence[_Side]) -> list[str]:
    """What does not make the sides uncomparable, and whoever reads the difference should know."""
    warnings = []
    spans = [side.totals.span for side in sides]
    if spans[0].length_us != spans[1].length_us:
        lengths = " and ".join(duration(span.length_us) for span in spans)
        warnings.append(f"the sides are {lengths} long: only means and figures per hour are compared")
    if spans[0] != spans[1] and spans[0].start_us < spans[1].end_us and spans[1].start_us < spans[0].end_us:
        warnings.append("the sides overlap")
    warnings += _other_ranks([side.lives for side in sides], "not the same ranks")
    if any(len(side.lives) < len(side.totals.lives) and side.duplicates is not None for side in sides):
        fleet = _other_ranks([side.totals.lives for side in sides], "duplicate footprint: not the same ranks in the fleet")
        warnings += fleet
    for name, side in zip(SIDES, sides, strict=True):
        if side.lives and side.provisional:
            warnings.append(f"some windows {name} are still open: their figures will change")
        if side.totals.left_out_versions:
            others = ", ".join(str(version) for version in side.totals.left_out_versions)
            warnings.append(
                f"{name}: only rows of semantics_version {side.totals.semantics_version} are summed; those of {others} are left out"
            )
    told = {warning for side in sides if side.duplicates is not None for warning in side.duplicates["warnings"]}
    return warnings + [f"duplicate footprint: {warning}" for warning in sorted(told)]


def _other_ranks(sides: Sequence[Sequence[LifeTotals]], what: str) -> list[str]:
    before, after = (_ranks(lives) for lives in sides)
    gone, new = [rank for rank in before if rank not in after], [rank for rank in after if rank not in before]
    if not before or not after or not (gone or new):
        return []
    parts = [f"{listed(ranks)} only {name}" for name, ranks in zip(SIDES, (gone, new), strict=True) if ranks]
    return [f"{what}: {'; '.join(parts)}"]


def _ranks(lives: Sequence[LifeTotals]) -> list[str]:
    return [rank_key(rank[0].instance_id, rank[0].dp_rank) for rank in by_rank(lives)]


def _distinct(refused: Sequence[Document]) -> list[Any]:
    found: list[Document] = []
    for each in refused:
        if each not in found:
            found.append(each)
    return found
