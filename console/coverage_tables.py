"""Documents of coverage (:mod:`sql.observation_document`) as tables for people: the worst ranks first, details after."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from console.escape import escaped
from sql.figures import reason_text

Document = dict[str, Any]

RANKS_SHOWN = 15
LINES_SHOWN = 10

_CLOCKS = {"engine": "engine time", "forwarder": "the forwarders' clock"}
_REGISTERS = {"exact": "exact", "lower_bound": "lower bound", "indeterminate": "indeterminate"}
_ZERO = {
    "positive": "content lies on several ranks at once, or is about to be counted so",
    "measured": "no content on two ranks: measured, at least two ranks held content that compares",
    "single_holder": "no finding: fewer than two ranks held content that compares",
    "split_key_space": "no finding: content ids were made with more than one key",
    "unobserved": "no finding: no rank was observed",
}

_URGENCY: dict[str, Callable[[Document], float]] = {
    "forwarders": lambda entry: ("unexplained", "departed", "live").index(entry["state"]),
    "unwatched": lambda entry: -entry["ms"],
}
"""What comes first in a list; otherwise, and among equals, the newest does."""


def render_coverage(document: Document, console: Console) -> None:
    """Print ``document``."""
    span = document["span"]
    if span["since"] is None:
        console.print("No engine time observed.")
    else:
        provisional = "; provisional: some windows are still open" if document["provisional"] else ""
        console.print(f"{span['since']} to {span['until']} (engine time{provisional})")
    for warning in document["warnings"]:
        console.print(f"Warning: {warning}.")
    registers = [f"{name.replace('_', ' ')} {_REGISTERS[document[name]['register']]}" for name in ("repeat_compute", "duplicate_footprint")]
    console.print(f"Coverage {_percent(document['coverage'])}; {', '.join(registers)}. Duplicates: {_ZERO[document['zero_duplicates']]}.")
    console.print()
    _ranks(document["ranks"], console)
    empty: list[str] = []

    def part(title: str, name: str, headers: Sequence[str], row: Callable[[Document], Sequence[str]]) -> None:
        listed = document[name]
        if not listed["entries"]:
            empty.append(title.lower())
            return
        entries = listed["entries"][::-1]
        entries.sort(key=_URGENCY.get(name, lambda entry: 0))
        _lines(f"{title} ({_CLOCKS[listed['clock']]})", headers, [row(entry) for entry in entries], listed["found"], console)

    part("Gaps", "gaps", ("rank", "from", "to", "batches", "reason"), _gap)
    part("Forwarder runs", "forwarders", ("rank", "incarnation", "started", "last heard", "state"), _forwarder)
    part("Spans nobody watched", "unwatched", ("rank", "from", "to", "seconds"), _unwatched)
    part("Refused identities", "identity_refused", ("rank", "group", "from", "to", "blocks"), _refused)
    part("Contradictions with the engine's metrics", "breaches", ("rank", "at", "kind", "found", "at most"), _breach)
    _key_spaces(document, console)
    _audit(document, console)
    _dead_letters(document, console)
    if not document["parent_conflicts"]["contents"]:
        empty.append("contents behind two parents")
    if not document["dead_letters"]["found"]:
        empty.append("dead letters")
    if empty:
        console.print(f"None: {', '.join(empty)}.")
    for reason in sorted({reason for rank in document["ranks"] for reason in rank["reasons"]}):
        console.print(f"{reason}: {reason_text(reason)}")


def _ranks(ranks: Sequence[Document], console: Console) -> None:
    headers = ("rank", "coverage", "register", "lost", "gaps", "forwarder", "reasons")
    rows = [
        (
            escaped(rank["rank"]),
            _percent(rank["coverage"]),
            _REGISTERS[rank["register"]],
            _count(rank["lost_batches"]),
            f"{rank['gaps']:,}",
            rank["forwarder"] or "-",
            ", ".join(rank["reasons"]) or "-",
        )
        for rank in ranks[:RANKS_SHOWN]
    ]
    console.print("Ranks, least covered first")
    console.print(_table(headers, rows, numbers=("coverage", "lost", "gaps")))
    if len(ranks) > RANKS_SHOWN:
        console.print(f"{len(ranks) - RANKS_SHOWN:,} more ranks, none covered less; all with --json")
    console.print()


def _gap(entry: Document) -> Sequence[str]:
    forwarder = f"forwarder {_time(entry['forwarder_from'])}" if entry["from"] is None and entry["forwarder_from"] else "start"
    until = f"forwarder {_time(entry['forwarder_to'])}" if entry["to"] is None and entry["from"] is None else _time(entry["to"], "end")
    return (
        escaped(entry["rank"]),
        _time(entry["from"]) if entry["from"] else forwarder,
        until,
        _count(entry["batches"]),
        escaped(reason_text(entry["reason"]) if entry["kind"] == "undeclared" else entry["reason"])
        + ("" if entry["narrowed"] or entry["kind"] == "undeclared" else "; where exactly is not known"),
    )


def _forwarder(entry: Document) -> Sequence[str]:
    return (
        escaped(entry["rank"]),
        escaped(entry["incarnation"]),
        _time(entry["started"]),
        _time(entry["last_heard"]),
        entry["state"] + (f" ({escaped(entry['stop_reason'])})" if entry["stop_reason"] else ""),
    )


def _unwatched(entry: Document) -> Sequence[str]:
    return escaped(entry["rank"]), _time(entry["from"]), _time(entry["to"]), f"{entry['ms'] / 1_000:,.1f}"


def _refused(entry: Document) -> Sequence[str]:
    return escaped(entry["rank"]), str(entry["group_idx"]), _time(entry["from"]), _time(entry["to"]), f"{entry['refused']:,}"


def _breach(entry: Document) -> Sequence[str]:
    return escaped(entry["rank"]), _time(entry["at"]), entry["kind"], f"{entry['found']:,} blocks", f"{entry['bound']:,}"


def _key_spaces(document: Document, console: Console) -> None:
    spaces = document["key_spaces"]
    if len(spaces) > 1:
        rows = [(str(each["key_epoch"]), each["canary"] or "undeclared", str(len(each["ranks"])), _names(each["ranks"])) for each in spaces]
        _lines("Key spaces: ranks of two of them cannot be compared", ("epoch", "canary", "ranks", "which"), rows, len(rows), console)
    elif spaces and len(spaces[0]["ranks"]) > 1:
        console.print(f"One key space: all {len(spaces[0]['ranks'])} ranks compare with each other.")
    if document["models_undeclared"]:
        console.print(f"No model declared: {_names(document['models_undeclared'])}")
    if document["parent_conflicts"]["contents"]:
        sampled = document["parent_conflicts"]["sampled"]
        of = f" (of one content in {sampled} looked at)" if sampled > 1 else ""
        console.print(f"Contents behind two parents: {document['parent_conflicts']['contents']:,}{of}")
    console.print()


def _audit(document: Document, console: Console) -> None:
    names = ("audited", "agreed", "mismatched", "underresolved", "indeterminate", "unjoined")
    worst = sorted(document["audit"], key=lambda each: (-each["mismatched"], -each["underresolved"], each["instance_id"]))
    rows = [(escaped(each["instance_id"]), *(f"{each[name]:,}" for name in names)) for each in worst if each["audited"]]
    if rows:
        sampled = worst[0]["sampled"]
        title = "Removals against the stores before them" + (f" (one block in {sampled})" if sampled > 1 else "")
        _lines(title, ("instance", *names), rows, len(rows), console)


def _dead_letters(document: Document, console: Console) -> None:
    listed = document["dead_letters"]
    rows = [
        (f"{each['topic']}/{each['partition']}@{each['offset']}", each["reader"], escaped(each["key"] or "-"), escaped(each["reason"]))
        for each in reversed(listed["entries"])
    ]
    if rows:
        _lines("Messages set aside (whatever the span)", ("where", "by", "key", "reason"), rows, listed["found"], console)


def _lines(title: str, headers: Sequence[str], rows: Sequence[Sequence[str]], found: int, console: Console) -> None:
    shown = rows[:LINES_SHOWN]
    console.print(f"{title}: {found:,}" + (f", of which {len(shown)} here; more with --json" if found > len(shown) else ""))
    console.print(_table(headers, shown, numbers=("batches", "seconds", "blocks", "found", "at most", "ranks")))
    console.print()


def _table(headers: Sequence[str], rows: Sequence[Sequence[str]], numbers: Sequence[str]) -> Table:
    table = Table()
    for header in headers:
        table.add_column(header, justify="right" if header in numbers else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def _names(ranks: Sequence[str]) -> str:
    shown = ", ".join(escaped(rank) for rank in ranks[:LINES_SHOWN])
    return shown + (f" and {len(ranks) - LINES_SHOWN:,} more" if len(ranks) > LINES_SHOWN else "")


def _time(text: str | None, absent: str = "-") -> str:
    """An ISO time to the millisecond, without what every line has in common."""
    if text is None:
        return absent
    return text.replace("T", " ").removesuffix("Z")[:23]


def _count(value: int | None) -> str:
    return "?" if value is None else f"{value:,}"


def _percent(share: float | None) -> str:
    """A share as a percentage that never rounds up to a full hundred."""
    if share is None:
        return "-"
    return "100%" if share >= 1 else f"{int(share * 10_000) / 100:.2f}%"
