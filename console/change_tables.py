"""A change (:func:`sql.change.compare`) as tables for people: before, after and the difference, with what they stand on beside them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.console import Console

from console.escape import escaped
from console.table_parts import CANNOT_TELL, NOTHING, REGISTERS, UNKNOWN, Document, number, percent, seconds, size, table
from schemas.reasons import reason_text
from sql.change import PARTS
from sql.change_refusals import SIDES
from sql.repeat_figures import CAUSES

Show = Callable[[float], str]


def render_change(document: Document, console: Console) -> None:
    """Print ``document``."""
    _print_heading(document, console)
    reasons = _print_repeat(document, console) | _print_duplicates(document, console)
    for reason in sorted(reasons):
        console.print(f"{reason}: {reason_text(reason)}")


def _print_heading(document: Document, console: Console) -> None:
    deploy = document.get("deploy")
    if deploy is not None:
        console.print(f"Deploy {deploy['deploy_id']} at {deploy['at']}: {escaped(deploy['label'])}")
    of = [f"{name} {escaped(document[name])}" for name in ("workload", "model") if document[name] is not None]
    if of:
        console.print(f"Ranks of {' and '.join(of)}")
    for name in SIDES:
        side = document[name]
        absent = f", {len(side['absent_ranks'])} of them silent" if side["absent_ranks"] else ""
        since, until = (side["span"][end].replace(".000000Z", "Z") for end in ("since", "until"))
        console.print(f"{name:<6}  {since} to {until} ({side['length']}, {len(side['ranks'])} ranks{absent})")
    console.print("Engine time, whole windows" + ("; that of the deploy itself counts to neither side" if deploy else ""))
    for warning in document["warnings"]:
        console.print(f"Warning: {escaped(warning)}.")
    console.print()


def _print_repeat(document: Document, console: Console) -> set[str]:
    core = document["repeat_compute"]
    console.print("Repeat compute, by cause (never added together)")
    _print_refused(core, console)
    shown = table(["cause", ""], ["before", "after", "change", "ratio"])
    for cause in CAUSES:
        told = core["causes"][cause]
        name = cause.replace("_", " ")
        tokens = told["tokens"]
        rows: list[tuple[str, Document, Show]] = [("tokens", tokens, _quantity)]
        if tokens["before"] or tokens["after"]:
            if told["comparable"]:
                rows.append(("per hour", told["per_hour"]["tokens"], _quantity))
            rows += [("blocks", told["blocks"], _quantity), ("GPU time", told["gpu_seconds"], seconds)]
        for place, (unit, change, show) in enumerate(rows):
            unknown = ["no rate" if unit == "GPU time" else CANNOT_TELL if _seen(document[side]) else NOTHING for side in SIDES]
            shown.add_row("" if place else name, unit, *_cells(change, show, unknown))
    console.print(shown)
    console.print("per hour: tokens per hour that was observed; GPU time is an estimate")
    return _print_footing(document, "repeat_compute", console)


def _print_duplicates(document: Document, console: Console) -> set[str]:
    core = document["duplicate_footprint"]
    console.print("Duplicate KV footprint, GPU: extra copies")
    _print_refused(core, console)
    if core["inside_instances"] is None:
        console.print()
        return set()
    shown = table(["", ""], ["before", "after", "change", "ratio"])
    for part in PARTS:
        told = core[part]
        tokens = told["extra_tokens"]
        rows: list[tuple[str, Document, Show]] = [("tokens, mean", tokens["mean"], _quantity)]
        if any(tokens[name][side] for name in ("mean", "max") for side in SIDES):
            rows += [
                ("tokens, max", tokens["max"], _quantity),
                ("blocks, mean", told["extra_blocks"]["mean"], _quantity),
                ("bytes, mean", told["extra_bytes"]["mean"], size),
            ]
        for place, (unit, change, show) in enumerate(rows):
            shown.add_row(
                "" if place else part.replace("_", " "),
                unit,
                *_cells(change, show, [UNKNOWN if _seen(document[side]) else NOTHING for side in SIDES]),
            )
    console.print(shown)
    if core["comparable"]:
        for part in PARTS:
            for why in core[part]["refused"]:
                console.print(f"{part.replace('_', ' ')}: not comparable: {why['text']}")
    return _print_footing(document, "duplicate_footprint", console)


def _print_refused(core: Document, console: Console) -> None:
    for why in core["refused"]:
        console.print(f"Not comparable: {why['text']}.")


def _print_footing(document: Document, figure: str, console: Console) -> set[str]:
    """Coverage, register and reasons of both sides; the reasons, to be explained at the end."""
    parts = {part: document[figure][part]["register"] for part in PARTS} if figure == "duplicate_footprint" else {}
    shown = table([""], ["coverage"])
    for name in [part.split("_")[0] for part in parts] or ["register"]:
        shown.add_column(name, no_wrap=True)
    shown.add_column("reasons", overflow="fold")
    reasons: set[str] = set()
    for name in SIDES:
        core = document[name][figure]
        registers: Sequence[str] = [register[name] for register in parts.values()] or [core["register"]]
        told = ", ".join(core["reasons"]) or NOTHING
        shown.add_row(name, percent(core["coverage"]), *(REGISTERS[register] for register in registers), told)
        reasons |= set(core["reasons"])
    console.print(shown)
    console.print()
    return reasons


def _seen(side: Document) -> bool:
    """Whether any rank of the side sent anything."""
    return len(side["ranks"]) > len(side["absent_ranks"])


def _cells(change: Document, show: Show, unknown: Sequence[str]) -> list[str]:
    difference, ratio = change["difference"], change["ratio"]
    return [
        *(other if change[side] is None else show(change[side]) for side, other in zip(SIDES, unknown, strict=True)),
        NOTHING if difference is None else _signed(difference, show),
        NOTHING if ratio is None else _ratio(ratio),
    ]


def _signed(difference: float, show: Show) -> str:
    sign = "+" if difference > 0 else "-" if difference < 0 else ""
    return sign + show(abs(difference))


def _quantity(value: float) -> str:
    """A count or a mean; of a large one no fraction."""
    return number(round(value) if value >= 1000 or value == 0 else value)


def _ratio(ratio: float) -> str:
    return f"{ratio:,.0f}" if ratio >= 100 else f"{ratio:.2f}"
