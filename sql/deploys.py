"""Declared deploys, read from the store."""

# ruff: noqa: S608 - the SQL is put together from this module's own text; every value is a bound parameter

from __future__ import annotations

from typing import Any

from schemas.records import Deploy
from sql.database import Database


def load_deploys(database: Database, since_us: int | None = None, until_us: int | None = None, *, removed: bool = False) -> list[Deploy]:
    """Deploys at ``since_us`` or later and before ``until_us`` (engine time, microseconds), in order of time.

    ``removed``: also those taken back. Raises :class:`sql.database.StoreError`.
    """
    conditions = ["1"] if removed else ["NOT removed"]
    parameters: dict[str, Any] = {}
    for name, operator, value in (("since", ">=", since_us), ("until", "<", until_us)):
        if value is not None:
            conditions.append(f"at {operator} fromUnixTimestamp64Micro({{{name}:Int64}}, 'UTC')")
            parameters[name] = value
    rows = database.query(
        f"""
        SELECT deploy_id, version, label, toUnixTimestamp64Micro(at) AS at_us, workload, model, removed
        FROM deploys FINAL
        WHERE {" AND ".join(conditions)}
        ORDER BY at_us, deploy_id
        """,
        parameters,
    ).rows
    return [Deploy(*row) for row in rows]
