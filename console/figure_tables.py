"""Documents of figures (:func:`sql.figures.assemble`) as tables for people.

Units are in the headers; coverage and register stand beside every figure.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

from rich.console import Console

from console.detail_tables import WIDE, print_pairs, print_prefixes
from console.table_parts import (
    CANNOT_TELL,
    NOTHING,
    REGISTERS,
    Document,
    console_for_output,
    count,
    heading,
    name_of,
    number,
    percent,
    print_footing,
    read_as,
    seconds,
    size,
    table,
)
from sql.figures import CAUSES, UNDECLARED, reason_text

__all__ = ["Part", "console_for_output", "render"]

Part = Literal["repeat-compute", "duplicates", "prefixes", "ranks", "coverage", "all"]

_CAUSE_NAMES = {"ambiguous_reload": "ambiguous reload"}
_UNITS = ("tokens", "blocks", "bytes")


def render(document: Document, part: Part, console: Console) -> None:
    """Print ``part`` of ``document``."""
    console.print(heading(document))
    for warning in document["warnings"]:
        console.print(f"Warning: {warning}.")
    console.print()
    reasons: set[str] = set()
    by = document.get("by")
    fleet = document if by is None else document["fleet"]
    if part in ("repeat-compute", "all"):
        if by is not None:
            reasons |= _print_repeat_compute_by(document["repeat_compute"], by, console)
        reasons |= _print_repeat_compute(fleet["repeat_compute"], console)
    if part in ("duplicates", "all"):
        if by is not None:
            reasons |= _print_duplicates_by(document["duplicate_footprint"], by, console)
        reasons |= _print_duplicates(fleet["duplicate_footprint"], console)
        print_pairs(document["workload_pairs"], console)
    if part in ("prefixes", "all") and (part == "prefixes" or document["shared_prefixes"]["trunks"]):
        reasons |= print_prefixes(document["shared_prefixes"], console)
    if part in ("ranks", "all"):
        reasons |= _print_ranks(document["ranks"], console)
    if part in ("coverage", "all"):
        reasons |= _print_coverage(document["ranks"], console)
    for reason in sorted(reasons):
        console.print(f"{reason}: {reason_text(reason)}")


def _print_repeat_compute(core: Document, console: Console) -> set[str]:
    console.print("Repeat compute, by cause (never added together)")
    quantiles = ("p50", "p90", "p99") if console.width >= WIDE else ("p50", "p90")
    shown = table(["cause"], ["tokens", "blocks", "GPU time", *(f"away, {quantile}" for quantile in quantiles)])
    for cause in CAUSES:
        counted = core[cause]
        if counted is None:
            shown.add_row(_CAUSE_NAMES.get(cause, cause), CANNOT_TELL, *[NOTHING] * (2 + len(quantiles)))
            continue
        away = counted.get("elapsed", {})
        shown.add_row(
            _CAUSE_NAMES.get(cause, cause),
            count(counted["tokens"]),
            count(counted["blocks"]),
            _gpu_time(counted),
            *(seconds(away.get(quantile)) for quantile in quantiles),
        )
    console.print(shown)
    for note in _gpu_notes([core[cause] for cause in CAUSES if core[cause] is not None]):
        console.print(note)
    telling, measurable = core["concurrent_ranks"], core["measurable_ranks"]
    if core["concurrent"] is not None and telling["telling"] < telling["of"]:
        console.print(f"concurrent: of {telling['telling']} of {telling['of']} ranks; the others cannot tell")
    if measurable["measurable"] < measurable["of"]:
        console.print(f"measurable on {measurable['measurable']} of {measurable['of']} ranks")
    return print_footing(core, console)


def _gpu_time(counted: Document) -> str:
    if counted["gpu_seconds"] is None:
        return "no rate"
    partly = "" if counted["rated_tokens"] >= counted["tokens"] else f" (of {100 * counted['rated_tokens'] // counted['tokens']}%)"
    return seconds(counted["gpu_seconds"]) + partly


def _gpu_notes(causes: Iterable[Document]) -> list[str]:
    """How GPU time was estimated, and what is missing for it."""
    notes = []
    listed = list(causes)
    methods = {counted["method"] for counted in listed if counted["method"] is not None}
    if methods:
        which = "declared and measured" if len(methods) > 1 or "mixed" in methods else methods.pop()
        notes.append(f"GPU time is an estimate, by {which} prefill rates")
    if any(0 < counted["rated_tokens"] < counted["tokens"] for counted in listed):
        notes.append("(of N%): for so many of the tokens, the others have no rate")
    if any(counted["gpu_seconds"] is None for counted in listed):
        notes.append("no rate: declare --prefill-rate, or let the forwarder read the engine's metrics")
    return notes


def _print_repeat_compute_by(cores: Sequence[Document], by: str, console: Console) -> set[str]:
    wide = console.width >= WIDE
    console.print(f"Repeat compute by {by}, by cause (never added together): tokens{' (GPU time)' if wide else ''}")
    shown = table([by], _cause_headers(console), register=True)
    for core in cores:
        shown.add_row(core["label"], *(_tokens(core[cause], wide) for cause in CAUSES), *read_as(core))
    console.print(shown)
    console.print()
    return set()


def _cause_headers(console: Console) -> list[str]:
    return [_CAUSE_NAMES.get(cause, cause) if console.width >= WIDE else cause.removesuffix("_reload") for cause in CAUSES]


def _tokens(counted: Document | None, wide: bool) -> str:
    """Tokens, and GPU time where it is known and there is room."""
    if counted is None:
        return CANNOT_TELL
    spent = counted["gpu_seconds"] if wide else None
    return count(counted["tokens"]) + (f" ({seconds(spent)})" if spent else "")


def _print_duplicates(core: Document, console: Console) -> set[str]:
    console.print("Duplicate KV footprint, GPU: extra copies")
    shown = table(["", ""], ["mean", "max", "end"])
    shown.add_column("register", no_wrap=True)
    places = {"inside + between": core, "inside instances": core["inside_instances"], "between instances": core["between_instances"]}
    for name, figures in places.items():
        for unit in _UNITS:
            first = unit == "tokens"
            shown.add_row(name if first else "", unit, *_levels(figures, unit), REGISTERS[figures["register"]] if first else "")
    console.print(shown)
    if core["other_tiers"]:
        console.print("Duplicate KV footprint, other tiers: extra copies")
        others = table(["tier", ""], ["mean", "max", "end"], register=True)
        for tier, figures in core["other_tiers"].items():
            for unit in _UNITS:
                first = unit == "tokens"
                others.add_row(tier if first else "", unit, *_levels(figures, unit), *(read_as(figures) if first else ("", "")))
        console.print(others)
    if core["late_changes"]:
        console.print(f"{core['late_changes']:,} changes came so late that they count at a later time than their own")
    for warning in core["warnings"]:
        console.print(f"Warning: {warning}.")
    return print_footing(core, console)


def _print_duplicates_by(cores: Sequence[Document], by: str, console: Console) -> set[str]:
    console.print(f"Duplicate KV footprint by {by}, GPU: extra copies each bears, tokens")
    places = ("inside_instances", "between_instances") if console.width >= WIDE else ()
    shown = table([by], ["mean", "max", "end", *(f"{place.split('_')[0]} mean" for place in places), "bytes mean"], register=True)
    for core in cores:
        parts = (number(core[place]["extra_tokens"]["mean"]) for place in places)
        shown.add_row(core["label"], *_levels(core, "tokens"), *parts, size(core["extra_bytes"]["mean"]), *read_as(core))
    console.print(shown)
    console.print()
    return set()


def _levels(figures: Document, unit: str) -> list[str]:
    levels = figures[f"extra_{unit}"]
    if unit == "bytes":  # no maximum is kept of either part
        return [size(levels[name]) if name in levels else NOTHING for name in ("mean", "max", "end")]
    return [number(levels[name]) for name in ("mean", "max", "end")]


def _print_ranks(ranks: Sequence[Document], console: Console) -> set[str]:
    console.print("Ranks: what each holds")
    held = table(["rank", "workload", "model"], ["resident tokens", "resident bytes"], register=True)
    for rank in ranks:
        declared = (rank["workload"] or UNDECLARED, rank["model"] or UNDECLARED)
        held.add_row(name_of(rank), *declared, count(rank["resident_tokens"]), size(rank["resident_bytes"]), *read_as(rank))
    console.print(held)
    console.print("Ranks: tokens stored and lost (unreused: part of evicted), and how long evicted blocks had lasted (p50, p90)")
    flow = table(["rank"], ["stored", "evicted", "unreused", "cleared", "p50", "p90"], register=True)
    for rank in ranks:
        counts = (count(rank[f"{name}_tokens"]) for name in ("stored", "evicted", "unreused", "cleared"))
        lasted = (seconds(rank["lifetime"][quantile]) for quantile in ("p50", "p90"))
        flow.add_row(name_of(rank), *counts, *lasted, *read_as(rank))
    console.print(flow)
    if any(rank["unreused_tokens"] for rank in ranks):
        console.print("unreused: at most so many, because a plain cache hit leaves no trace in the events")
    wide = console.width >= WIDE
    console.print(f"Ranks: tokens computed again, by cause{' (GPU time)' if wide else ''}")
    again = table(["rank"], _cause_headers(console), register=True)
    for rank in ranks:
        causes: Document = rank["repeat_compute"] or dict.fromkeys(CAUSES)
        again.add_row(name_of(rank), *(_tokens(causes[cause], wide) for cause in CAUSES), *read_as(rank))
    console.print(again)
    console.print()
    return set()


def _print_coverage(ranks: Sequence[Document], console: Console) -> set[str]:
    console.print("Coverage: the share of the span that was demonstrably observed")
    shown = table(["rank"], ["coverage", "identity coverage", "batches", "lost", "refused", "engine lives"])
    shown.add_column("reasons", overflow="fold")
    for rank in ranks:
        shown.add_row(
            name_of(rank),
            percent(rank["coverage"]),
            percent(rank["identity_coverage"]),
            *(count(rank[name]) for name in ("batches", "lost_batches", "refused_batches", "lives")),
            ", ".join(rank["reasons"]) or NOTHING,
        )
    console.print(shown)
    console.print()
    return {reason for rank in ranks for reason in rank["reasons"]}
