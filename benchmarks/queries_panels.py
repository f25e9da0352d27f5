"""Every dashboard panel and variable over the whole span, as Grafana would ask for it. Pure but for asking what variables offer."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from benchmarks.queries_list import GRAINS, SPAN_MS, a_rank, whole
from benchmarks.queries_rows import Fleet
from benchmarks.queries_run import Query
from infra.grafana.build import DASHBOARDS, choose, expand, panels

_GRAIN = re.compile(rf"\w_({'|'.join(GRAINS)})\b")
_STEPS = 500
"""Points that a panel asks for: its width in pixels or so."""


def of_panels(ask: Callable[[str], Sequence[Sequence[Any]]], fleet: Fleet) -> Iterator[Query]:
    """Each panel's and variable's query, with everything put in that is chosen when its dashboard is opened on the whole span."""
    everything = whole(fleet)
    from_ms, to_ms = everything.since_us // 1_000, everything.until_us // 1_000
    step_ms = (to_ms - from_ms) // _STEPS
    instance_id, dp_rank = a_rank(fleet)
    for dashboard in DASHBOARDS:
        chosen = choose(dashboard.file, ask, from_ms, to_ms, {"rank": f"{instance_id}/{dp_rank}"})
        short = dashboard.file.removeprefix("kvcensus-")
        for variable in dashboard.variables:
            if variable.sql:
                text = expand(variable.sql, from_ms, to_ms, chosen, step_ms)
                yield Query(f"variable {short}: {variable.name}", _grains(text), everything.name, text, {}, SPAN_MS)
        for file, title, sql in panels():
            if file == dashboard.file:
                text = expand(sql, from_ms, to_ms, chosen, step_ms)
                yield Query(f"panel {short}: {title}", _grains(text), everything.name, text, {}, SPAN_MS)


def _grains(sql: str) -> str:
    return "/".join(sorted(set(_GRAIN.findall(sql))))
