"""The records behind repeat compute: one per block that was stored again."""

# ruff: noqa: S608 - the SQL is put together from this module's own text; every value is a bound parameter

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sql.database import Database
from sql.figure_parts import Document
from sql.times import iso

CAUSES = ("evicted", "cleared", "restarted", "concurrent", "ambiguous_reload")
"""Causes as ``recomputes`` names them."""

_US = "toUnixTimestamp64Micro"
_COLUMNS = (
    "instance_id",
    "dp_rank",
    "group_idx",
    "life_id",
    "seq",
    "block_index",
    "cause",
    "tokens",
    "block_id",
    "content_id",
    "parent_block_id",
    "parent_content_id",
    "gpu_us",
    "elapsed_us",
)


@dataclass(frozen=True)
class Wanted:
    """Which records: of the given ranks (``INSTANCE/R``) and causes, all where none is given; back in [``since_us``, ``until_us``)."""

    semantics_version: int
    since_us: int | None = None
    until_us: int | None = None
    ranks: Sequence[str] = ()
    causes: Sequence[str] = ()
    limit: int = 50


def recomputes(database: Database, wanted: Wanted) -> tuple[int, list[Document]]:
    """How many there are, and the newest of them first, at most ``limit``. Raises :class:`sql.database.StoreError`."""
    conditions = ["semantics_version = {version:Int32}"]
    parameters: dict[str, Any] = {"version": wanted.semantics_version, "limit": wanted.limit}
    for name, value, condition in (
        ("since", wanted.since_us, "back_at >= fromUnixTimestamp64Micro({since:Int64}, 'UTC')"),
        ("until", wanted.until_us, "back_at < fromUnixTimestamp64Micro({until:Int64}, 'UTC')"),
        ("ranks", list(wanted.ranks) or None, "has({ranks:Array(String)}, concat(instance_id, '/', toString(dp_rank)))"),
        ("causes", list(wanted.causes) or None, "has({causes:Array(String)}, toString(cause))"),
    ):
        if value is not None:
            conditions.append(condition)
            parameters[name] = value
    where = " AND ".join(conditions)
    found = int(database.query(f"SELECT count() FROM recomputes FINAL WHERE {where}", parameters).rows[0][0])
    rows = database.query(
        f"""
        SELECT {_US}(stored_at), {_US}(lost_at), {_US}(back_at), {", ".join(_COLUMNS)}
        FROM recomputes FINAL
        WHERE {where}
        ORDER BY back_at DESC, instance_id, dp_rank, seq DESC, block_index DESC, group_idx
        LIMIT {{limit:UInt32}}
        """,
        parameters,
    ).rows
    return found, [_document(*row) for row in rows]


def _document(stored_us: int, lost_us: int, back_us: int, *values: Any) -> Document:
    told: Document = {name: value.hex() if isinstance(value, bytes) else value for name, value in zip(_COLUMNS, values, strict=True)}
    gpu_us, elapsed_us = told.pop("gpu_us"), told.pop("elapsed_us")
    return told | {
        "stored": iso(stored_us),
        "lost": iso(lost_us),
        "back": iso(back_us),
        "held_seconds": (lost_us - stored_us) / 1e6,
        "elapsed_seconds": elapsed_us / 1e6,
        "gpu_seconds": None if gpu_us is None else gpu_us / 1e6,
    }
