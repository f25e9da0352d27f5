"""The figures of a running demo as one compact table, 24 lines of 80 columns; wider terminals get more columns. Pure."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from console.demo.readings import Reading
from console.demo.verdict import CAUSES, PLACES
from schemas.records import rank_key

WIDE = 110
"""Columns from which on the optional ones are shown."""

_NOTHING = "-"
_CAUSE_NOTES = {
    "evicted": "evicted (pressure)",
    "cleared": "cleared (a flush)",
    "restarted": "restarted (engine came back empty)",
    "concurrent": "concurrent (held, and computed again)",
}
_PLACE_NOTES = {"inside_instances": "inside an instance", "between_instances": "between instances"}
_REGISTERS = {"exact": "exact", "lower_bound": "lower bound", "indeterminate": "indeterminate"}


@dataclass(frozen=True)
class Moment:
    """What the screen shows. ``reading`` is None before anything was counted."""

    seconds: float
    published: int
    reading: Reading | None
    width: int
    note: str = ""


def view(moment: Moment) -> RenderableType:
    """Everything there is to see at one moment."""
    reading = moment.reading
    counted, lost = (reading.counted, reading.lost) if reading else (0, 0)
    head = Text(f"kvcensus demo {_clock(moment.seconds)}  ", "bold", no_wrap=True, overflow="crop")
    head.append(f"{moment.published:,} batches, {counted:,} counted, {lost:,} lost", "not bold")
    head.append("  Ctrl-C ends", "not bold dim")
    if reading is None or not reading.totals.lives:
        return Group(head, Text("nothing counted yet"))
    wide = moment.width >= WIDE
    return Group(
        head,
        _settled_line(reading),
        Text(),
        _repeat_compute(reading, wide),
        Text(),
        _duplicates(reading, wide),
        _ranks(reading.document["ranks"], wide),
        Text(moment.note, "dim", no_wrap=True, overflow="crop"),
    )


def _settled_line(reading: Reading) -> Text:
    line = Text(no_wrap=True, overflow="crop")
    if reading.settled_us is None:
        line.append("nothing settled yet: a window closes when every rank passed it or was silent 60 s")
    else:
        line.append(f"settled to {_time(reading.settled_us)} UTC (closed windows)")
        line.append(f"; so far: to {_time(reading.totals.span.end_us)}, provisional", "dim")
    return line


def _columns(title: str, *headers: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold", expand=False)
    table.add_column(title, no_wrap=True)
    for header in headers:
        table.add_column(header, justify="right", no_wrap=True)
    return table


def _repeat_compute(reading: Reading, wide: bool) -> RenderableType:
    now = reading.document["repeat_compute"]
    then = reading.settled["repeat_compute"] if reading.settled else None
    table = _columns("REPEAT COMPUTE, tokens", "settled", "so far", "blocks")
    for cause in CAUSES:
        table.add_row(_CAUSE_NOTES[cause], _tokens(then and then[cause]), _tokens(now[cause]), _blocks(now[cause]))
    return Group(table, _footing(now, wide))


def _duplicates(reading: Reading, wide: bool) -> RenderableType:
    now = reading.document["duplicate_footprint"]
    then = reading.settled["duplicate_footprint"] if reading.settled else None
    table = _columns("DUPLICATE KV FOOTPRINT, extra tokens", "settled mean", "mean", "max", "now")
    for place in PLACES:
        levels = now[place]["extra_tokens"]
        before = _mean(then[place]["extra_tokens"]["mean"]) if then else _NOTHING
        table.add_row(_PLACE_NOTES[place], before, _mean(levels["mean"]), f"{levels['max']:,}", f"{levels['end']:,}")
    return Group(table, _footing(now, wide))


def _footing(core: dict[str, Any], wide: bool) -> Text:
    line = Text(f"  coverage {_percent(core['coverage'])}, {_REGISTERS[core['register']]}", no_wrap=True, overflow="crop")
    if core["reasons"]:
        line.append(f" ({', '.join(core['reasons'])})", "" if wide else "dim")
    return line


def _ranks(ranks: Sequence[dict[str, Any]], wide: bool) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold", expand=False)
    table.add_column("RANK", no_wrap=True)
    for header in ("batches", "stored", "evicted", *(["resident"] if wide else []), "coverage"):
        table.add_column(header, justify="right", no_wrap=True)
    table.add_column("register", no_wrap=True)
    if wide:
        table.add_column("reasons", no_wrap=True, overflow="ellipsis")
    for rank in ranks:
        row = [rank_key(rank["instance_id"], rank["dp_rank"]), f"{rank['batches']:,}", _count(rank["stored_tokens"])]
        row.append(_count(rank["evicted_tokens"]))
        if wide:
            row.append(_count(rank["resident_tokens"]))
        row += [_percent(rank["coverage"]), _REGISTERS[rank["register"]]]
        if wide:
            row.append(", ".join(rank["reasons"]))
        table.add_row(*row)
    return table


def _tokens(counted: dict[str, int] | None) -> str:
    return _NOTHING if counted is None else f"{counted['tokens']:,}"


def _blocks(counted: dict[str, int] | None) -> str:
    return _NOTHING if counted is None else f"{counted['blocks']:,}"


def _count(value: int | None) -> str:
    return "cannot tell" if value is None else f"{value:,}"


def _mean(value: float) -> str:
    return f"{value:,.0f}" if value >= 1_000 else f"{value:,.1f}"


def _percent(share: float) -> str:
    """Never rounded up to a full hundred."""
    return "100%" if share >= 1 else f"{int(share * 1_000) / 10:.1f}%"


def _clock(seconds: float) -> str:
    whole = int(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}" if whole >= 3600 else f"{whole // 60}:{whole % 60:02}"


def _time(us: int) -> str:
    return time.strftime("%H:%M:%S", time.gmtime(us // 1_000_000))
