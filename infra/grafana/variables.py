"""Variables and annotations that dashboards share. Pure text."""

# ruff: noqa: S608 - the SQL is put together from this module's own text

from __future__ import annotations

from infra.grafana.dashboard import Annotation, Variable
from infra.grafana.fragments import RANK_NAME, UNDECLARED, in_range

_ROLLED_UP = "FROM rank_rollups WHERE grain = substring('${grain}', 2) AND " + in_range()
_RANGE_S = "($__toTime - $__fromTime)"

GRAIN = Variable(
    "grain",
    "Grain of tables",
    f"SELECT multiIf({_RANGE_S} <= 21600, '_5m', {_RANGE_S} <= 172800, '_1h', '_1d') AS grain",
    hidden=True,
)
"""Suffix of the views behind tables and totals: 5 minutes up to 6 hours, an hour up to two days, a day beyond."""

STEP = Variable(
    "step",
    "Grain of series",
    f"SELECT multiIf({_RANGE_S} <= 43200, '_5m', {_RANGE_S} <= 1382400, '_1h', '_1d') AS step",
    hidden=True,
)
"""Suffix of the views behind series: 5 minutes up to 12 hours, an hour up to 16 days, a day beyond."""

RULES_VERSION = Variable(
    "semantics_version",
    "Rules version",
    "SELECT toString(semantics_version) AS version FROM fleet_clock GROUP BY semantics_version ORDER BY semantics_version DESC",
)
WORKLOAD = Variable(
    "workload",
    "Workload",
    f"SELECT DISTINCT ifNull(workload, '{UNDECLARED}') AS workload {_ROLLED_UP} ORDER BY workload",
    several=True,
)
MODEL = Variable(
    "model",
    "Model",
    f"SELECT DISTINCT ifNull(model, '{UNDECLARED}') AS model {_ROLLED_UP} ORDER BY model",
    several=True,
)
RANK = Variable(
    "rank",
    "Rank",
    f"SELECT rank FROM (SELECT DISTINCT instance_id, dp_rank, {RANK_NAME} AS rank {_ROLLED_UP}) ORDER BY instance_id, dp_rank",
)
TIER = Variable(
    "tier",
    "Tier",
    f"""
    SELECT tier FROM duplicate_footprint${{grain}} WHERE scope = 'fleet' AND {in_range()}
    GROUP BY tier ORDER BY tier != 'GPU', tier
    """,
)
UNIT = Variable("unit", "Repeat compute in", choices={"tokens": "tokens", "blocks": "blocks", "gpu_seconds": "GPU seconds"})
SIZE = Variable("size", "Footprint in", choices={"tokens": "tokens", "blocks": "blocks", "bytes": "bytes"})
CAUSE = Variable(
    "cause",
    "Cause",
    choices={
        "evicted": "evicted (pressure)",
        "cleared": "cleared (a flush)",
        "restarted": "restarted (engine came back empty)",
        "concurrent": "concurrent (held and computed again)",
    },
)
"""Where a list is sorted or cut by one cause: causes are never added together."""

DEPLOYS = Annotation(
    "Deploys",
    """
    SELECT at AS time, deploy_id AS tags,
        concat('deploy: ', label, ifNull(concat(', workload ', workload), ''), ifNull(concat(', model ', model), '')) AS text
    FROM deploys_declared WHERE $__timeFilter(at) ORDER BY at LIMIT 200
    """,
    "purple",
)


def view_of_rank(name: str) -> Variable:
    """The view ``name`` at the grain of the range: the windows themselves up to two hours."""
    coarser = f"{_RANGE_S} <= 172800, '{name}_5m', {_RANGE_S} <= 2592000, '{name}_1h', '{name}_1d'"
    return Variable(name, name, f"SELECT multiIf({_RANGE_S} <= 7200, '{name}', {coarser}) AS view", hidden=True)
