"""Deploy effect: the hour before each declared deploy against the hour after. Pure text."""

# ruff: noqa: S608 - the SQL is put together from this module's own text

from __future__ import annotations

from infra.grafana import fragments as f
from infra.grafana import variables
from infra.grafana.dashboard import Dashboard, Variable
from infra.grafana.panels import Panel, Row, bars, link_to, table, trend

DEPLOY = Variable(
    "deploy",
    "Deploy",
    """
    SELECT deploy_id, concat(formatDateTime(at, '%Y-%m-%d %H:%i', 'UTC'), ' UTC ', label) AS label
    FROM deploys_declared
    WHERE $__timeFilter(at)
    ORDER BY at DESC
    LIMIT 200
    """,
)
_CHOSEN = "deploy_id = ${deploy:singlequote}"
_EFFECT_OF = "deploy_effect_of(deploy = ${deploy:singlequote})"
_WORKLOAD, _MODEL = (f"(SELECT any({column}) FROM deploys_declared WHERE {_CHOSEN})" for column in ("workload", "model"))
_REPEAT = f"""
    FROM repeat_compute{f.STEP} AS r
    WHERE {f.in_range(f.STEP)} AND {f.RULES}
        AND ({_WORKLOAD} IS NULL OR r.workload = {_WORKLOAD})
        AND ({_MODEL} IS NULL OR r.model = {_MODEL})
"""
_FOOTPRINT = f"""
    FROM duplicate_footprint{f.STEP} AS r
    WHERE {f.in_range(f.STEP)} AND {f.RULES} AND tier = 'GPU'
        AND scope = multiIf({_WORKLOAD} IS NOT NULL, 'workload', {_MODEL} IS NOT NULL, 'model', 'fleet')
        AND ifNull(r.scope_key, '') = coalesce({_WORKLOAD}, {_MODEL}, '')
"""
_EFFECT = f"""
    figure, unit, before, after, change, if(comparable, 'yes', arrayStringConcat(why, '; ')) AS comparable,
    before_coverage AS "before coverage", after_coverage AS "after coverage",
    {f.in_words("before_register")} AS "before register", {f.in_words("after_register")} AS "after register",
    before_windows AS "before windows", after_windows AS "after windows"
"""
_SIDES = (
    "The hour before against the hour after, in whole windows of 5 minutes, without the one in which it happened. Lower bounds, with "
    "coverage and register of either side; no change is given where the sides do not compare, and it says why."
)
_AROUND = link_to(
    "Two hours before and after: ${__value.text}",
    "kvcensus-deploys",
    "from=${__data.fields.from_ms}&to=${__data.fields.to_ms}&var-deploy=${__data.fields.deploy}",
)


def _before_after(title: str, question: str, figures: str, unit: str) -> Panel:
    return bars(
        title,
        f"{question} {_SIDES}",
        f"SELECT figure, before, after FROM {_EFFECT_OF} WHERE figure LIKE '{figures}%' ORDER BY figure",
        over="figure",
        unit=unit,
        width=6,
        beside="The chosen deploy: before and after",
    )


def _chosen() -> Row:
    return Row(
        "${deploy:text}",
        [
            table(
                "The chosen deploy: before and after",
                f"What changed with it, for what it concerned? {_SIDES}",
                f"SELECT {_EFFECT} FROM {_EFFECT_OF} ORDER BY figure",
                width=12,
                height=10,
            ),
            _before_after("Repeat compute, tokens per hour", "What was computed again, by cause?", "repeat compute", "short"),
            _before_after("Duplicate KV footprint, extra tokens, mean", "How much was held twice?", "duplicate footprint", "short"),
        ],
    )


def _around() -> Row:
    return Row(
        "In the range, for the workload and model that it concerned",
        [
            trend(
                "Repeat compute by cause, ${unit:text} per hour",
                "What is computed again, and why? A lower bound, at the coverage and register shown. The causes are never added together.",
                f.repeat_series(_REPEAT),
            ),
            trend(
                "Extra copies on GPU, ${size:text}, mean of each window",
                "How much is held twice, inside an instance and between instances? Borne by the workload, else the model, that the deploy "
                "concerned; of the whole fleet where it concerned all. A lower bound; coverage is that of the whole fleet.",
                f.footprint_series(_FOOTPRINT),
            ),
        ],
    )


def _all() -> Row:
    return Row(
        "All deploys in the range",
        [
            table(
                "Deploys in the range and what changed with them",
                f"What changed with each declared deploy? Click one for the two hours before and after it. {_SIDES}",
                f"""
                SELECT label, at, ifNull(workload, 'all') AS workload, ifNull(model, 'all') AS model, {_EFFECT}, deploy_id AS deploy,
                    toUnixTimestamp(at) * 1000 - 7200000 AS from_ms, toUnixTimestamp(at) * 1000 + 7200000 AS to_ms
                FROM deploy_effect
                WHERE $__timeFilter(at)
                ORDER BY at DESC, label, figure
                LIMIT 500
                """,
                units={"from_ms": "none", "to_ms": "none"},
                links={"label": _AROUND},
                height=12,
            )
        ],
    )


DASHBOARD = Dashboard(
    "deploys",
    "kvcensus: deploy effect",
    "The hour before each declared deploy against the hour after, refused where the sides do not compare.",
    (variables.STEP, variables.RULES_VERSION, DEPLOY, variables.UNIT, variables.SIZE),
    (variables.DEPLOYS,),
    (_chosen(), _around(), _all()),
)
