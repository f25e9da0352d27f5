"""The Grafana dashboards as files: what they are made of, and that everything in them has its place. No database needed."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from infra.grafana import build, macros
from infra.grafana.dashboard import Dashboard
from infra.grafana.fragments import CAUSES
from infra.grafana.macros import ALL, UnknownMacro, expand
from infra.grafana.panels import DATASOURCE, WIDTH, Panel

ROOT = Path(build.__file__).resolve().parent
EACH = pytest.mark.parametrize("dashboard", build.DASHBOARDS, ids=lambda each: each.file)


def document(dashboard: Dashboard) -> Any:
    """A dashboard as Grafana reads it."""
    return json.loads((ROOT / "dashboards" / f"{dashboard.file}.json").read_text(encoding="utf-8"))


def texts(value: object) -> Iterator[str]:
    """Every text in a document."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from texts(each)
    elif isinstance(value, list):
        for each in value:
            yield from texts(each)


# -- files ----------------------------------------------------------------------------------------------------------


@EACH
def test_the_file_is_what_is_described(dashboard: Dashboard) -> None:
    path = ROOT / "dashboards" / f"{dashboard.file}.json"
    assert path.read_text(encoding="utf-8") == build.text(dashboard), "run: python -m infra.grafana.build"


def test_there_are_no_other_files() -> None:
    assert {path.stem for path in (ROOT / "dashboards").glob("*.json")} == {each.file for each in build.DASHBOARDS}


@EACH
def test_ids_are_unique_and_panels_lie_side_by_side(dashboard: Dashboard) -> None:
    panels = document(dashboard)["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    places = [panel["gridPos"] for panel in panels]
    assert all(place["w"] > 0 and place["h"] > 0 and 0 <= place["x"] <= WIDTH - place["w"] for place in places)
    for one, other in combinations(places, 2):
        apart = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        above = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert apart or above, (one, other)


def test_names_are_unique() -> None:
    assert len({each.uid for each in build.DASHBOARDS}) == len({each.title for each in build.DASHBOARDS}) == len(build.DASHBOARDS)
    for each in build.DASHBOARDS:
        titles = [panel.title for panel in each.panels]
        assert len(set(titles)) == len(titles), each.file
        assert [panel["type"] for panel in document(each)["panels"]].count("row") == len(each.rows)


@EACH
def test_everything_asks_the_provisioned_datasource(dashboard: Dashboard) -> None:
    written = document(dashboard)
    asking = [*written["annotations"]["list"], *(each for each in written["templating"]["list"] if each["type"] == "query")]
    asking += [panel for panel in written["panels"] if panel["type"] != "row"]
    asking += [target for panel in written["panels"] for target in panel.get("targets", [])]
    assert all(each["datasource"] == DATASOURCE for each in asking)
    provisioned = (ROOT / "provisioning" / "datasources" / "kvcensus.yaml").read_text(encoding="utf-8")
    assert f"uid: {DATASOURCE['uid']}\n" in provisioned
    assert f"type: {DATASOURCE['type']}\n" in provisioned
    assert "password: ${KVCENSUS_GRAFANA_CLICKHOUSE_PASSWORD}\n" in provisioned, "no secret is written down"


@EACH
def test_variables_are_defined_before_they_are_used(dashboard: Dashboard) -> None:
    written = document(dashboard)
    known = set[str]()
    for variable, described in zip(written["templating"]["list"], dashboard.variables, strict=True):
        assert macros.used_variables(described.sql) <= known, f"{variable['name']} uses one that comes later"
        assert variable["name"] not in known
        known.add(variable["name"])
    used = {name for text in texts(written) for name in re.findall(r"\$\{?(\w+)", text) if not name.startswith("__")}
    assert used == known


@EACH
def test_links_lead_to_dashboards_that_there_are_and_set_variables_that_these_have(dashboard: Dashboard) -> None:
    variables = {each.uid: {variable.name for variable in each.variables} for each in build.DASHBOARDS}
    for text in texts(document(dashboard)):
        if text.startswith("/d/"):
            uid, query = text.removeprefix("/d/").split("?", 1)
            assert "${__url_time_range}" in query or "from=" in query, "the time range is kept"
            assert set(re.findall(r"var-(\w+)=", query)) <= variables[uid]


# -- figures --------------------------------------------------------------------------------------------------------

PANELS = [
    pytest.param(dashboard, panel, id=f"{dashboard.file}: {panel.title}") for dashboard in build.DASHBOARDS for panel in dashboard.panels
]


@pytest.mark.parametrize(("dashboard", "panel"), PANELS)
def test_no_figure_is_without_coverage_and_register(dashboard: Dashboard, panel: Panel) -> None:
    shown = panel
    if panel.beside:
        row = next(row for row in dashboard.rows if panel in row.panels)
        shown = next(each for each in row.panels if each.title == panel.beside)
        places = {each["title"]: each["gridPos"]["y"] for each in document(dashboard)["panels"]}
        assert places[panel.title] == places[shown.title], "beside it, not below"
    if panel.figures:
        assert re.search(r'coverage"?[,\s]', shown.sql), panel.title
        assert re.search(r'register"?[,\s]', shown.sql) or " AS read," in shown.sql, panel.title


@pytest.mark.parametrize(("dashboard", "panel"), PANELS)
def test_figures_are_never_stacked_and_causes_never_added(dashboard: Dashboard, panel: Panel) -> None:
    written = panel.json(1, 0, 0)
    stacking = written["fieldConfig"]["defaults"].get("custom", {}).get("stacking", {"mode": "none"})
    assert stacking["mode"] == "none"
    assert written["options"].get("stacking", "none") == "none"
    for one, other in combinations(CAUSES, 2):
        assert not re.search(rf"{one}_\S+ \+ \S*{other}_", panel.sql)
    of_repeat, of_footprint = "repeat_compute" in panel.sql, "duplicate_footprint" in panel.sql
    assert not (of_repeat and of_footprint), f"{dashboard.file}: two numbers, never in one"


@pytest.mark.parametrize(("dashboard", "panel"), PANELS)
def test_sums_cross_neither_rules_nor_keys(dashboard: Dashboard, panel: Panel) -> None:
    if not panel.figures or "deploy_effect" in panel.sql:  # which compares within one version and one key, and says so
        return
    assert "semantics_version = ${semantics_version}" in panel.sql, dashboard.file
    of_no_key = "coverage${grain}" in panel.sql or "rank_health" in panel.sql  # coverage belongs to no key
    groups = re.findall(r"GROUP BY ([^)]*?)(?:ORDER BY|LIMIT|\)|$)", panel.sql, re.DOTALL)
    if groups and not of_no_key and not panel.beside:
        assert any("key_epoch" in each for each in groups), dashboard.file


@pytest.mark.parametrize(("dashboard", "panel"), PANELS)
def test_a_title_has_a_question_under_it(dashboard: Dashboard, panel: Panel) -> None:
    assert "?" in panel.description or panel.description.startswith("What the engine's own metrics say"), dashboard.file
    assert panel.json(1, 0, 0)["fieldConfig"]["defaults"]["noValue"]


# -- macros ---------------------------------------------------------------------------------------------------------

FROM_MS, TO_MS = 1_796_000_400_500, 1_796_004_000_900


@pytest.mark.parametrize(
    ("written", "sent"),
    [
        ("$__timeFilter(at)", "at >= toDateTime(1796000400) AND at <= toDateTime(1796004000)"),
        ("$__timeFilter( r.at )", "r.at >= toDateTime(1796000400) AND r.at <= toDateTime(1796004000)"),
        ("$__timeFilter_ms(at)", f"at >= fromUnixTimestamp64Milli({FROM_MS}) AND at <= fromUnixTimestamp64Milli({TO_MS})"),
        ("$__fromTime - $__toTime", "toDateTime(1796000400) - toDateTime(1796004000)"),
        ("$__fromTime_ms", f"fromUnixTimestamp64Milli({FROM_MS})"),
        ("$__timeInterval(f(a, b))", "toStartOfInterval(toDateTime(f(a, b)), INTERVAL 60 second)"),
        ("$__timeInterval_ms(at)", "toStartOfInterval(toDateTime64(at, 3), INTERVAL 60000 millisecond)"),
        ("$__interval_s $__interval ${__interval_ms}", "60 60s 60000"),
        ("${__from} $__to", f"{FROM_MS} {TO_MS}"),
        ("view${grain}, $grain", "view_5m, _5m"),
        ("${rank:singlequote}", "'it\\'s/0'"),
        ("${workload:singlequote}", "'a','b'"),
        ("${workload:sqlstring} ${workload:csv} $workload", "'a','b' a,b 'a','b'"),
        ("$__conditionalAll(x IN (${workload:singlequote}), $workload)", "x IN ('a','b')"),
        ("$__conditionalAll(f(x, 1) = ${every}, ${every}) AND y", "1=1 AND y"),
        ("a $__conditionalAll(x, $every) b $__conditionalAll(x, $grain)", "a 1=1 b x"),
    ],
)
def test_macros_are_put_in_as_documented(written: str, sent: str) -> None:
    chosen = {"grain": "_5m", "rank": "it's/0", "workload": ["a", "b"], "every": [ALL]}
    assert expand(written, FROM_MS, TO_MS, chosen) == sent


@pytest.mark.parametrize(
    "written",
    [
        "$__timeGroup(at)",
        "${nobody}",
        "$nobody",
        "${grain:json}",
        "$__timeFilter(a, b)",
        "$__timeFilter",
        "$__conditionalAll(x)",
        "$__conditionalAll(x, $nobody)",
        "$__timeFilter(at",
        "${__user}",
    ],
)
def test_what_nobody_puts_in_is_refused(written: str) -> None:
    with pytest.raises(UnknownMacro):
        expand(written, FROM_MS, TO_MS, {"grain": "_5m"})


def test_chosen_values_are_what_a_dashboard_opens_with() -> None:
    asked = list[str]()

    def ask(sql: str) -> list[list[object]]:
        asked.append(sql)
        return [["first"], ["second"]]

    chosen = build.choose("fleet", ask, FROM_MS, TO_MS, {"size": "bytes"})
    assert chosen["grain"] == chosen["semantics_version"] == "first"
    assert chosen["workload"] == [ALL]
    assert (chosen["unit"], chosen["size"]) == ("tokens", "bytes")
    assert any("substring('first', 2)" in sql for sql in asked), "a variable may use the ones before it"
