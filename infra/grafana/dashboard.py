"""A dashboard of rows of panels, with its variables and annotations, as Grafana's JSON. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from inspect import cleandoc

from infra.grafana.panels import DATASOURCE, WIDTH, Json, Panel, Row

SCHEMA_VERSION = 39
TAG = "kvcensus"


@dataclass(frozen=True)
class Variable:
    """A variable. ``sql`` asks for its values (one column, or value and text); without it ``choices`` are fixed, as text by value.

    The first value is chosen when a dashboard is opened, or all where ``several`` may be.
    """

    name: str
    label: str
    sql: str = ""
    choices: dict[str, str] = field(default_factory=dict)
    several: bool = False
    hidden: bool = False

    def json(self) -> Json:
        """As Grafana stores it."""
        shared: Json = {
            "name": self.name,
            "label": self.label,
            "hide": 2 if self.hidden else 0,
            "multi": self.several,
            "includeAll": self.several,
            "skipUrlSync": self.hidden,
        }
        if self.sql:
            return {
                **shared,
                "type": "query",
                "datasource": DATASOURCE,
                "query": {"refId": self.name, "queryType": "sql", "editorType": "sql", "rawSql": cleandoc(self.sql)},
                "definition": cleandoc(self.sql),
                "refresh": 2,
                "regex": "",
                "sort": 0,
                "options": [],
                "current": {"text": ["All"], "value": ["$__all"]} if self.several else {},
            }
        options = [{"text": text, "value": value, "selected": not place} for place, (value, text) in enumerate(self.choices.items())]
        return {
            **shared,
            "type": "custom",
            "query": ",".join(f"{text} : {value}" for value, text in self.choices.items()),
            "options": options,
            "current": {"text": options[0]["text"], "value": options[0]["value"]},
        }


@dataclass(frozen=True)
class Annotation:
    """Marks on every series: ``sql`` gives time, text and tags."""

    name: str
    sql: str
    colour: str

    def json(self) -> Json:
        """As Grafana stores it."""
        return {
            "name": self.name,
            "enable": True,
            "hide": False,
            "iconColor": self.colour,
            "datasource": DATASOURCE,
            "target": {"refId": "Anno", "editorType": "sql", "queryType": "table", "format": 1, "rawSql": cleandoc(self.sql)},
        }


@dataclass(frozen=True)
class Dashboard:
    """One dashboard; ``file`` is its name under ``dashboards``."""

    file: str
    title: str
    description: str
    variables: Sequence[Variable]
    annotations: Sequence[Annotation]
    rows: Sequence[Row]
    since: str = "now-24h"

    @property
    def uid(self) -> str:
        """What links name it by."""
        return f"{TAG}-{self.file}"

    @property
    def panels(self) -> Iterator[Panel]:
        """All panels, from the top."""
        return (panel for row in self.rows for panel in row.panels)

    def json(self) -> Json:
        """As Grafana stores it."""
        return {
            "uid": self.uid,
            "title": self.title,
            "description": self.description,
            "tags": [TAG],
            "schemaVersion": SCHEMA_VERSION,
            "version": 1,
            "editable": True,
            "graphTooltip": 1,
            "timezone": "browser",
            "time": {"from": self.since, "to": "now"},
            "refresh": "1m",
            "links": [
                {
                    "title": "kvcensus",
                    "type": "dashboards",
                    "tags": [TAG],
                    "asDropdown": False,
                    "includeVars": True,
                    "keepTime": True,
                    "targetBlank": False,
                    "icon": "external link",
                }
            ],
            "annotations": {"list": [annotation.json() for annotation in self.annotations]},
            "templating": {"list": [variable.json() for variable in self.variables]},
            "panels": list(_placed(self.rows)),
        }


def _placed(rows: Sequence[Row]) -> Iterator[Json]:
    number, y = 1, 0
    for row in rows:
        place = {"h": 1, "w": WIDTH, "x": 0, "y": y}
        yield {"id": number, "type": "row", "title": row.title, "collapsed": False, "panels": [], "gridPos": place}
        number, y, x, tallest = number + 1, y + 1, 0, 0
        for panel in row.panels:
            if x + panel.width > WIDTH:
                x, y, tallest = 0, y + tallest, 0
            yield panel.json(number, x, y)
            number, x, tallest = number + 1, x + panel.width, max(tallest, panel.height)
        y += tallest
