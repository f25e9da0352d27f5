"""What lies behind the two numbers, as tables: pairs of workloads, shared prefixes, single recomputes."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

from console.table_parts import NOTHING, Document, count, heading, number, print_footing, read_as, seconds, size, table
from sql.figures import UNDECLARED, reason_text

WHOLE_IDS = 150
"""Columns from which on ids are shown whole; JSON always has them."""

WIDE = 110
"""Columns from which on the optional ones are shown."""

_SHORT_ID = 12


def print_pairs(pairs: Sequence[Document], console: Console) -> None:
    """Content that two workloads share; nothing where no two do."""
    if not pairs:
        return
    console.print("Workloads that share content: tokens that ranks of both hold, counted once (never added together)")
    shown = table(["workloads", "tier"], ["mean", "max", "end"])
    for pair in pairs:
        levels = (number(pair["tokens"][name]) for name in ("mean", "max", "end"))
        shown.add_row(" + ".join(workload or UNDECLARED for workload in pair["key"]), pair["tier"], *levels)
    console.print(shown)
    console.print(", ".join(("coverage " + read_as(pairs[0])[0], read_as(pairs[0])[1], "as the footprint of the fleet")))
    console.print()


def print_prefixes(prefixes: Document, console: Console) -> set[str]:
    """The trunks with the most extra copies at one instant; the reasons to be explained."""
    if not prefixes["trunks"]:
        console.print("Shared prefixes: none were told in this span. They are at every sixth window's end, once all ranks have passed it.")
        console.print()
        return set()
    console.print(f"Shared prefixes with the most extra copies at {prefixes['as_of']}: longest chains of blocks with the same holders")
    shown = table(["", "last block", "workloads"], ["extra tokens", "bytes", "length", "depth", "copies"])
    for trunk in prefixes["trunks"]:
        shown.add_row(
            str(trunk["place"]),
            _id(trunk["content_id"], console),
            ", ".join(workload or UNDECLARED for workload in trunk["workloads"]) or NOTHING,
            count(trunk["extra_tokens"]),
            NOTHING if trunk["extra_bytes"] is None else size(trunk["extra_bytes"]),
            count(trunk["tokens"]),
            NOTHING if trunk["depth_tokens"] is None else count(trunk["depth_tokens"]),
            count(trunk["copies"]),
        )
    console.print(shown)
    console.print("length: tokens; depth: tokens from the start of the prompt to its end; copies: ranks that hold it (--json names them)")
    return print_footing(prefixes["trunks"][0], console)  # all are of one instant, and read as the fleet is


def render_recomputes(document: Document, console: Console) -> None:
    """Print the records of single blocks that were computed again."""
    console.print(heading(document))
    for warning in document["warnings"]:
        console.print(f"Warning: {warning}.")
    listed, found = document["recomputes"], document["found"]
    which = f"the last {len(listed):,} of {found:,}" if len(listed) < found else f"{found:,}"
    console.print(f"Blocks computed again: {which}")
    wide = console.width >= WIDE
    shown = table(
        ["back at", "rank", "cause", "content", *(["after"] if wide else [])],
        ["tokens", *(["GPU", "held for"] if wide else []), "away for"],
    )
    for each in listed:
        concurrent = each["cause"] == "concurrent"
        shown.add_row(
            each["back"] if wide else each["back"][5:23].replace("T", " "),
            f"{each['instance_id']}/{each['dp_rank']}",
            each["cause"].replace("_", " "),
            _id(each["content_id"], console),
            *([_id(each["parent_content_id"], console)] if wide else []),
            count(each["tokens"]),
            *([seconds(each["gpu_seconds"]), NOTHING if concurrent else seconds(each["held_seconds"])] if wide else []),
            NOTHING if concurrent else seconds(each["elapsed_seconds"]),
        )
    console.print(shown)
    console.print("Every cache group has its own records; figures count the primary group.")
    for reason in sorted(print_footing(document, console)):
        console.print(f"{reason}: {reason_text(reason)}")


def _id(content_id: str | None, console: Console) -> str:
    if content_id is None:
        return NOTHING
    return content_id if console.width >= WHOLE_IDS else content_id[:_SHORT_ID]
