"""Documents of figures (:func:`sql.figures.assemble`) as tables for people.

Units are in the headers; coverage and register stand beside every figure.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

from schemas.records import rank_key
from sql.figures import CAUSES, UNDECLARED, reason_text

Part = Literal["repeat-compute", "duplicates", "ranks", "coverage", "all"]
Document = dict[str, Any]

CANNOT_TELL = "cannot tell"
_PLAIN_WIDTH = 160
"""Columns where the output is no terminal, so that a pipe or a log gets whole lines."""

_REGISTERS = {"exact": "exact", "lower_bound": "lower bound", "indeterminate": "indeterminate"}
_CAUSE_NAMES = {"ambiguous_reload": "ambiguous reload"}


def console_for_output() -> Console:
    """A console on standard output, wide enough where it is no terminal."""
    return Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else _PLAIN_WIDTH)


def render(document: Document, part: Part, console: Console) -> None:
    """Print ``part`` of ``document``."""
    console.print(_heading(document))
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
    if part in ("ranks", "all"):
        reasons |= _print_ranks(document["ranks"], console)
    if part in ("coverage", "all"):
        reasons |= _print_coverage(document["ranks"], console)
    for reason in sorted(reasons):
        console.print(f"{reason}: {reason_text(reason)}")


def _heading(document: Document) -> str:
    span = document["span"]
    if span["since"] is None:
        return "No engine time observed."
    notes = ["engine time"]
    if span["widened_to_windows"]:
        notes.append("widened to whole windows")
    if document["provisional"]:
        notes.append("provisional: some windows are still open")
    return f"{span['since']} to {span['until']} ({'; '.join(notes)})"


def _table(texts: Sequence[str], numbers: Sequence[str], *, register: bool = False) -> Table:
    """A table whose first columns hold text and whose next ones hold numbers; ``register`` adds coverage and register."""
    table = Table()
    for header in texts:
        table.add_column(header, overflow="fold")
    for header in numbers:
        table.add_column(header, justify="right", overflow="fold")
    if register:
        table.add_column("coverage", justify="right", no_wrap=True)
        table.add_column("register", no_wrap=True)
    return table


def _read_as(core: Document) -> tuple[str, str]:
    return _percent(core["coverage"]), _REGISTERS[core["register"]]


def _print_repeat_compute(core: Document, console: Console) -> set[str]:
    console.print("Repeat compute, by cause (never added together)")
    table = _table(["cause"], ["tokens", "blocks"])
    for cause in CAUSES:
        table.add_row(_CAUSE_NAMES.get(cause, cause), *_pair(core[cause]))
    console.print(table)
    telling, measurable = core["concurrent_ranks"], core["measurable_ranks"]
    if core["concurrent"] is not None and telling["telling"] < telling["of"]:
        console.print(f"concurrent: of {telling['telling']} of {telling['of']} ranks; the others cannot tell")
    if measurable["measurable"] < measurable["of"]:
        console.print(f"measurable on {measurable['measurable']} of {measurable['of']} ranks")
    return _print_footing(core, console)


def _print_repeat_compute_by(cores: Sequence[Document], by: str, console: Console) -> set[str]:
    console.print(f"Repeat compute by {by}, by cause (never added together): tokens (blocks)")
    table = _table([by], [_CAUSE_NAMES.get(cause, cause) for cause in CAUSES], register=True)
    for core in cores:
        table.add_row(core["label"], *(_both(core[cause]) for cause in CAUSES), *_read_as(core))
    console.print(table)
    console.print()
    return set()


def _print_duplicates(core: Document, console: Console) -> set[str]:
    console.print("Duplicate KV footprint, GPU: extra copies")
    headers = [f"{unit} {figure}" for unit in ("tokens", "blocks") for figure in ("mean", "max", "end")]
    table = _table([""], headers)
    table.add_column("register", no_wrap=True)
    table.add_row("inside + between", *_levels(core), _REGISTERS[core["register"]])
    for name in ("inside_instances", "between_instances"):
        table.add_row(name.replace("_", " "), *_levels(core[name]), _REGISTERS[core[name]["register"]])
    console.print(table)
    if core["other_tiers"]:
        console.print("Duplicate KV footprint, other tiers: extra copies")
        others = _table(["tier"], headers)
        for tier, figures in core["other_tiers"].items():
            others.add_row(tier, *_levels(figures))
        console.print(others)
    for warning in core["warnings"]:
        console.print(f"Warning: {warning}.")
    return _print_footing(core, console)


def _print_duplicates_by(cores: Sequence[Document], by: str, console: Console) -> set[str]:
    console.print(f"Duplicate KV footprint by {by}, GPU: extra copies each bears, tokens")
    table = _table([by], ["mean", "max", "end", "inside mean", "between mean"], register=True)
    for core in cores:
        parts = (_number(core[name]["extra_tokens"]["mean"]) for name in ("inside_instances", "between_instances"))
        table.add_row(core["label"], *_levels(core)[:3], *parts, *_read_as(core))
    console.print(table)
    console.print()
    return set()


def _print_ranks(ranks: Sequence[Document], console: Console) -> set[str]:
    console.print("Ranks: tokens")
    held = _table(["rank", "workload", "model"], ["stored", "evicted", "resident"], register=True)
    for rank in ranks:
        declared = (rank["workload"] or UNDECLARED, rank["model"] or UNDECLARED)
        held.add_row(
            _name(rank), *declared, *(_count(rank[f"{name}_tokens"]) for name in ("stored", "evicted", "resident")), *_read_as(rank)
        )
    console.print(held)
    console.print("Ranks: tokens computed again, by cause")
    again = _table(["rank"], [_CAUSE_NAMES.get(cause, cause) for cause in CAUSES], register=True)
    for rank in ranks:
        causes: Document = rank["repeat_compute"] or dict.fromkeys(CAUSES)
        again.add_row(_name(rank), *(_count(causes[cause] and causes[cause]["tokens"]) for cause in CAUSES), *_read_as(rank))
    console.print(again)
    console.print()
    return set()


def _print_coverage(ranks: Sequence[Document], console: Console) -> set[str]:
    console.print("Coverage: the share of the span that was demonstrably observed")
    table = _table(["rank"], ["coverage", "identity coverage", "batches", "lost", "refused", "engine lives"])
    table.add_column("reasons", overflow="fold")
    for rank in ranks:
        table.add_row(
            _name(rank),
            _percent(rank["coverage"]),
            _percent(rank["identity_coverage"]),
            *(_count(rank[name]) for name in ("batches", "lost_batches", "refused_batches", "lives")),
            ", ".join(rank["reasons"]) or "-",
        )
    console.print(table)
    console.print()
    return {reason for rank in ranks for reason in rank["reasons"]}


def _print_footing(core: Document, console: Console) -> set[str]:
    reasons = f" ({', '.join(core['reasons'])})" if core["reasons"] else ""
    console.print(f"coverage {_percent(core['coverage'])}, {_REGISTERS[core['register']]}{reasons}")
    console.print()
    return set(core["reasons"])


def _name(rank: Document) -> str:
    return rank_key(rank["instance_id"], rank["dp_rank"])


def _levels(figures: Document) -> list[str]:
    return [_number(figures[unit][name]) for unit in ("extra_tokens", "extra_blocks") for name in ("mean", "max", "end")]


def _pair(counted: Document | None) -> tuple[str, str]:
    return (CANNOT_TELL, "-") if counted is None else (_count(counted["tokens"]), _count(counted["blocks"]))


def _both(counted: Document | None) -> str:
    return CANNOT_TELL if counted is None else f"{_count(counted['tokens'])} ({_count(counted['blocks'])})"


def _count(value: int | None) -> str:
    return CANNOT_TELL if value is None else f"{value:,}"


def _number(value: float) -> str:
    """A count as it is; a mean to one decimal, or to three digits where that would hide a small one."""
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.1f}" if value >= 10 or value == 0 else f"{value:.3g}"


def _percent(share: float | None) -> str:
    """A share as a percentage that never rounds up to a full hundred."""
    if share is None:
        return "-"
    return "100%" if share >= 1 else f"{int(share * 10_000) / 100:.2f}%"
