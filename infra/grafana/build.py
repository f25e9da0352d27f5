"""Write ``infra/grafana/dashboards`` anew: ``python -m infra.grafana.build``. A test tells when the files differ from their description."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from infra.grafana import coverage, deploys, fleet, rank
from infra.grafana.dashboard import Dashboard, Variable
from infra.grafana.macros import Value, expand

__all__ = ["DASHBOARDS", "FOLDER", "choices", "choose", "expand", "main", "panels", "text"]

FOLDER = Path(__file__).resolve().parent / "dashboards"

DASHBOARDS: Sequence[Dashboard] = (fleet.DASHBOARD, rank.DASHBOARD, deploys.DASHBOARD, coverage.DASHBOARD)

Ask = Callable[[str], Sequence[Sequence[Any]]]
"""Answers a query with its rows."""


def panels() -> list[tuple[str, str, str]]:
    """Every panel as (name of the dashboard's file, title, SQL before anything is put in)."""
    return [(dashboard.file, panel.title, panel.sql) for dashboard in DASHBOARDS for panel in dashboard.panels]


def choices(variable: Variable, ask: Ask, from_ms: int, to_ms: int, known: Mapping[str, Value]) -> list[str]:
    """What a variable offers in the time range, where those of ``known`` are chosen already; best first."""
    if not variable.sql:
        return list(variable.choices)
    return [str(row[0]) for row in ask(expand(variable.sql, from_ms, to_ms, known))]


def choose(dashboard: str, ask: Ask, from_ms: int, to_ms: int, wanted: Mapping[str, Value] | None = None) -> dict[str, Value]:
    """What is chosen of each variable when ``dashboard`` (its file's name) is opened on a time range, but for what is ``wanted``."""
    chosen: dict[str, Value] = {}
    for variable in next(each for each in DASHBOARDS if each.file == dashboard).variables:
        offered = choices(variable, ask, from_ms, to_ms, chosen)
        value: Value = ["$__all"] if variable.several else next(iter(offered), "")
        chosen[variable.name] = (wanted or {}).get(variable.name, value)
    return chosen


def text(dashboard: Dashboard) -> str:
    """The JSON file of a dashboard."""
    return json.dumps(dashboard.json(), indent=2, ensure_ascii=False) + "\n"


def _files() -> Iterator[tuple[Path, str]]:
    for dashboard in DASHBOARDS:
        yield FOLDER / f"{dashboard.file}.json", text(dashboard)


def main() -> None:
    """Write every dashboard."""
    for path, content in _files():
        path.write_text(content, encoding="utf-8")


if __name__ == "__main__":
    main()
