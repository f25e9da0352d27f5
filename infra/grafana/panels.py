"""Panels as Grafana's JSON, from what differs between them: title, question, query, and how wide it is. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from inspect import cleandoc
from typing import Any

Json = dict[str, Any]

DATASOURCE: Json = {"type": "grafana-clickhouse-datasource", "uid": "kvcensus-clickhouse"}
PLUGIN_VERSION = "4.10.0"
"""Of the data source, in whose form queries are written; later ones read it too."""

WIDTH = 24
"""Columns of Grafana's grid."""

NOTHING = "nothing was counted in this range"

_GREEN, _YELLOW, _RED = "green", "#EAB839", "red"
_SHARES: Json = {
    "mode": "absolute",
    "steps": [{"color": _RED, "value": None}, {"color": _YELLOW, "value": 0.8}, {"color": _GREEN, "value": 0.99}],
}
_PLAIN: Json = {"mode": "absolute", "steps": [{"color": "text", "value": None}]}
_BY_THRESHOLD: Json = {"mode": "thresholds"}
_MORE_THAN_ONE: Json = {"mode": "absolute", "steps": [{"color": "text", "value": None}, {"color": _RED, "value": 2}]}
_ANY_IS_BAD: Json = {"mode": "absolute", "steps": [{"color": "text", "value": None}, {"color": _RED, "value": 1}]}
_TOLD_NOT: Json = {"type": "special", "options": {"match": "null", "result": {"text": "cannot be told", "index": 0}}}
_REGISTERS: Json = {
    "type": "value",
    "options": {
        "exact": {"color": _GREEN, "index": 0},
        "lower bound": {"color": _YELLOW, "index": 1},
        "indeterminate": {"color": _RED, "index": 2},
    },
}
_COLOURS = {
    "evicted": "orange",
    "cleared": "blue",
    "restarted": "purple",
    "concurrent": "green",
    "ambiguous reload": "#808080",
    "inside": "blue",
    "between": "orange",
}


@dataclass(frozen=True)
class Panel:
    """One panel. ``format``: 0 gives series, 1 rows. ``figures``: it shows figures, so coverage and register too.

    ``beside`` is the title of the panel in the same row that shows coverage and register of this one's figures, where it cannot.
    """

    title: str
    description: str
    kind: str
    sql: str
    width: int
    height: int
    format: int
    options: Json
    defaults: Json
    overrides: Sequence[Json] = ()
    figures: bool = True
    beside: str = ""
    transformations: Sequence[Json] = ()

    def json(self, number: int, x: int, y: int) -> Json:
        """As Grafana stores it, at its place in the grid."""
        return {
            "id": number,
            "type": self.kind,
            "title": self.title,
            "description": self.description,
            "datasource": DATASOURCE,
            "gridPos": {"h": self.height, "w": self.width, "x": x, "y": y},
            "fieldConfig": {"defaults": self.defaults, "overrides": list(self.overrides)},
            "options": self.options,
            "targets": [
                {
                    "refId": "A",
                    "datasource": DATASOURCE,
                    "editorType": "sql",
                    "format": self.format,
                    "queryType": "timeseries" if self.format == 0 else "table",
                    "pluginVersion": PLUGIN_VERSION,
                    "rawSql": cleandoc(self.sql),
                }
            ],
            "transformations": list(self.transformations),
        }


@dataclass(frozen=True)
class Row:
    """A headed row of panels, side by side; what does not fit goes below."""

    title: str
    panels: Sequence[Panel] = field(default_factory=tuple)


def stat(title: str, description: str, sql: str, *, width: int = 12, height: int = 5, figures: bool = True) -> Panel:
    """Large numbers: every column of the one row of the query."""
    return Panel(
        title,
        description,
        "stat",
        sql,
        width,
        height,
        1,
        {
            "reduceOptions": {"values": False, "calcs": ["lastNotNull"], "fields": "/.*/"},
            "orientation": "auto",
            "textMode": "value_and_name",
            "colorMode": "value",
            "graphMode": "none",
            "justifyMode": "auto",
        },
        _defaults({"unit": "short", "decimals": 1, "thresholds": _PLAIN}),
        _columns(sql),
        figures,
    )


def trend(
    title: str,
    description: str,
    sql: str,
    *,
    unit: str = "short",
    width: int = 12,
    height: int = 9,
    figures: bool = True,
) -> Panel:
    """Series over time, never stacked; coverage on the right, dashed."""
    custom: Json = {
        "drawStyle": "line",
        "lineInterpolation": "stepAfter",
        "lineWidth": 2,
        "fillOpacity": 0,
        "showPoints": "auto",
        "spanNulls": False,
        "stacking": {"mode": "none", "group": "A"},
        "axisPlacement": "left",
        "axisSoftMin": 0,
    }
    return Panel(
        title,
        description,
        "timeseries",
        sql,
        width,
        height,
        0,
        {
            "legend": {"showLegend": True, "displayMode": "table", "placement": "bottom", "calcs": ["lastNotNull", "mean", "max"]},
            "tooltip": {"mode": "multi", "sort": "none"},
        },
        _defaults({"unit": unit, "color": {"mode": "palette-classic"}, "custom": custom}),
        [*_coloured(), _coverage_axis()],
        figures,
    )


def table(
    title: str,
    description: str,
    sql: str,
    *,
    units: dict[str, str] | None = None,
    width: int = 24,
    height: int = 9,
    figures: bool = True,
    links: dict[str, Json] | None = None,
) -> Panel:
    """Rows. ``units`` by the name of a column; ``links`` likewise."""
    return Panel(
        title,
        description,
        "table",
        sql,
        width,
        height,
        1,
        {"showHeader": True, "cellHeight": "sm", "footer": {"show": False, "reducer": ["sum"], "fields": ""}},
        _defaults(
            {"unit": "short", "custom": {"align": "auto", "filterable": True, "cellOptions": {"type": "auto"}}, "thresholds": _PLAIN}
        ),
        _columns(sql, units or {}, links or {}),
        figures,
    )


def strip(title: str, description: str, sql: str, *, width: int = 24, height: int = 4) -> Panel:
    """A share of 1 for each window as coloured cells."""
    return Panel(
        title,
        description,
        "status-history",
        sql,
        width,
        height,
        0,
        {"showValue": "never", "rowHeight": 0.9, "colWidth": 0.95, "legend": {"showLegend": False}, "tooltip": {"mode": "single"}},
        _defaults({"unit": "percentunit", "decimals": 1, "color": _BY_THRESHOLD, "thresholds": _SHARES, "custom": {"fillOpacity": 90}}),
        (),
        False,
    )


def bars(title: str, description: str, sql: str, *, over: str, unit: str, width: int = 12, height: int = 10, beside: str) -> Panel:
    """Groups of bars side by side over the column ``over``, never stacked."""
    return Panel(
        title,
        description,
        "barchart",
        sql,
        width,
        height,
        1,
        {
            "xField": over,
            "orientation": "auto",
            "stacking": "none",
            "showValue": "never",
            "groupWidth": 0.8,
            "barWidth": 0.9,
            "legend": {"showLegend": True, "displayMode": "list", "placement": "bottom", "calcs": []},
            "tooltip": {"mode": "multi", "sort": "none"},
        },
        _defaults({"unit": unit, "color": {"mode": "palette-classic"}, "custom": {"fillOpacity": 80, "lineWidth": 0}}),
        _coloured(),
        True,
        beside,
    )


def matrix(title: str, description: str, sql: str, *, row: str, column: str, value: str, link: Json, height: int = 14) -> Panel:
    """A cell for each pair of ``row`` and ``column``, coloured by a share of 1."""
    panel = table(title, description, sql, height=height, figures=False)
    corner = f"{row}\\{column}"
    return replace(
        panel,
        defaults=_defaults(
            {
                "unit": "percentunit",
                "decimals": 0,
                "thresholds": _SHARES,
                "links": [link],
                "custom": {"align": "center", "cellOptions": {"type": "color-background", "mode": "basic"}, "filterable": False},
            }
        ),
        overrides=[
            _override(
                "byName",
                corner,
                {"custom.cellOptions": {"type": "auto"}, "custom.align": "left", "custom.filterable": True, "unit": "string", "links": []},
            )
        ],
        transformations=[
            {"id": "groupingToMatrix", "options": {"columnField": column, "rowField": row, "valueField": value, "emptyValue": "null"}},
            {"id": "sortBy", "options": {"sort": [{"field": corner, "desc": False}]}},
        ],
    )


def link_to(title: str, uid: str, query: str) -> Json:
    """A link of a cell to another dashboard, the time range kept unless ``query`` says one."""
    keep = "" if "from=" in query else "${__url_time_range}&"
    return {"title": title, "url": f"/d/{uid}?{keep}{query}", "targetBlank": False}


RANK_LINK = link_to("One rank: ${__value.text}", "kvcensus-rank", "var-rank=${__value.raw}&${semantics_version:queryparam}")


def _defaults(more: Json) -> Json:
    return {"noValue": NOTHING, "mappings": [_TOLD_NOT], **more}


def _override(matcher: str, what: str, properties: Json) -> Json:
    return {
        "matcher": {"id": matcher, "options": what},
        "properties": [{"id": name, "value": value} for name, value in properties.items()],
    }


def _coloured() -> list[Json]:
    return [_override("byRegexp", f"/^{name}/", {"color": {"mode": "fixed", "fixedColor": colour}}) for name, colour in _COLOURS.items()]


def _coverage_axis() -> Json:
    return _override(
        "byRegexp",
        "/^(lowest )?coverage/",
        {
            "unit": "percentunit",
            "decimals": 1,
            "min": 0,
            "max": 1,
            "color": {"mode": "fixed", "fixedColor": "text"},
            "custom.axisPlacement": "right",
            "custom.lineWidth": 1,
            "custom.lineStyle": {"fill": "dash", "dash": [4, 6]},
        },
    )


_BACKGROUND: Json = {"type": "color-background", "mode": "basic"}


def _columns(sql: str, units: dict[str, str] | None = None, links: dict[str, Json] | None = None) -> list[Json]:
    """What columns of these names look like wherever they stand."""
    out = [
        _override(
            "byRegexp",
            "/coverage$/",
            {
                "unit": "percentunit",
                "decimals": 1,
                "thresholds": _SHARES,
                "color": _BY_THRESHOLD,
                "custom.cellOptions": _BACKGROUND,
            },
        ),
        _override("byRegexp", "/register$/", {"mappings": [_REGISTERS], "custom.cellOptions": _BACKGROUND}),
    ]
    if "key epochs" in sql:
        out.append(_override("byName", "key epochs", {"unit": "none", "decimals": 0, "thresholds": _MORE_THAN_ONE, "color": _BY_THRESHOLD}))
    for name in ("lost", "refused", "contradictions", "restarts"):
        if f" AS {name}" in sql:
            look: Json = {"thresholds": _ANY_IS_BAD, "color": _BY_THRESHOLD, "custom.cellOptions": {"type": "color-text"}}
            out.append(_override("byName", name, look))
    out += [_override("byName", name, {"unit": unit}) for name, unit in (units or {}).items()]
    out += [_override("byName", name, {"links": [link]}) for name, link in (links or {}).items()]
    return out
