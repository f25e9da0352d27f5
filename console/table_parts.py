"""Cells and headings that the tables for people have in common."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from schemas.records import rank_key

Document = dict[str, Any]

CANNOT_TELL = "cannot tell"
UNKNOWN = "unknown"
NOTHING = "-"
_PLAIN_WIDTH = 160
"""Columns where the output is no terminal, so that a pipe or a log gets whole lines."""

REGISTERS = {"exact": "exact", "lower_bound": "lower bound", "indeterminate": "indeterminate"}


def console_for_output() -> Console:
    """A console on standard output, wide enough where it is no terminal."""
    return Console(highlight=False, markup=False, emoji=False, width=None if sys.stdout.isatty() else _PLAIN_WIDTH)


def heading(document: Document) -> str:
    """The span of a document, and how it is to be taken."""
    span = document["span"]
    if span["since"] is None:
        return "No engine time observed."
    notes = ["engine time"]
    if span["widened_to_windows"]:
        notes.append("widened to whole windows")
    if document["provisional"]:
        notes.append("provisional: some windows are still open")
    return f"{span['since']} to {span['until']} ({'; '.join(notes)})"


def table(texts: Sequence[str], numbers: Sequence[str], *, register: bool = False) -> Table:
    """A table whose first columns hold text and whose next ones hold numbers; ``register`` adds coverage and register."""
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))  # 80 columns are enough for most
    for header in texts:
        made.add_column(header, overflow="fold", min_width=_longest_word(header))
    for header in numbers:
        made.add_column(header, justify="right", overflow="fold", min_width=_longest_word(header))
    if register:
        made.add_column("coverage", justify="right", no_wrap=True)
        made.add_column("register", overflow="fold")
    return made


def _longest_word(header: str) -> int:
    return max(map(len, header.split()), default=0)


def read_as(core: Document) -> tuple[str, str]:
    """Coverage and register of a figure."""
    return percent(core["coverage"]), REGISTERS[core["register"]]


def print_footing(core: Document, console: Console) -> set[str]:
    """Coverage, register and reasons below a table; the reasons, to be explained at the end."""
    reasons = f" ({', '.join(core['reasons'])})" if core["reasons"] else ""
    console.print(f"coverage {percent(core['coverage'])}, {REGISTERS[core['register']]}{reasons}")
    console.print()
    return set(core["reasons"])


def name_of(rank: Document) -> str:
    """``INSTANCE/R``."""
    return rank_key(rank["instance_id"], rank["dp_rank"])


def count(value: int | None) -> str:
    """A count; ``None`` cannot be told."""
    return CANNOT_TELL if value is None else f"{value:,}"


def number(value: float) -> str:
    """A count as it is; a mean to one decimal, or to three digits where that would hide a small one."""
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.1f}" if value >= 10 or value == 0 else f"{value:.3g}"


def percent(share: float | None) -> str:
    """A share as a percentage that never rounds up to a full hundred."""
    if share is None:
        return NOTHING
    return "100%" if share >= 1 else f"{int(share * 10_000) / 100:.2f}%"


def size(value: float | None) -> str:
    """Bytes, in the unit that leaves at most four digits."""
    if value is None:
        return UNKNOWN
    scaled = float(value)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if scaled < 1024 or unit == "TiB":
            return f"{scaled:,.0f} {unit}" if unit == "B" or scaled >= 100 else f"{scaled:.1f} {unit}"
        scaled /= 1024
    raise AssertionError


def seconds(value: float | None) -> str:
    """A duration of whatever length in three digits."""
    if value is None:
        return NOTHING
    if value == 0:
        return "0 s"
    if value < 0.001:
        return f"{value * 1e6:.3g} us"
    if value < 1:
        return f"{value * 1e3:.3g} ms"
    if value < 600:
        return f"{value:.3g} s"
    if value < 7_200:
        return f"{value / 60:.3g} min"
    return f"{value / 3_600:.3g} h" if value < 172_800 else f"{value / 86_400:,.1f} d"
