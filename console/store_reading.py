"""What a command says where there is no store to read from, or one without our schema."""

from __future__ import annotations

from pathlib import Path

from schemas.errors import KvcensusError
from sql import migrate, store
from sql.database import Database, StoreError


def why_no_store(clickhouse_url: str | None, data_dir: Path, what: str = "figures") -> str | None:
    """A sentence if there is no store to look for ``what`` in; None where there is one."""
    if store.exists(clickhouse_url, data_dir):
        return None
    left = data_dir / "demo"
    if store.exists(None, left):
        return f"No {what} here: nothing runs on {data_dir}. Those of the last demo: --data-dir {left}"
    return f"No {what} yet: there is no store in {data_dir}. Start `kvcensus demo` or a worker, or name one with --data-dir."


def why_no_schema(database: Database, error: StoreError, what: str = "figures") -> str:
    """A sentence for a store whose schema has not been created.

    Raises :class:`KvcensusError` for a schema that is out of date, and ``error`` itself where it is of another kind.
    """
    if migrate.applied(database) and migrate.pending(database):
        raise KvcensusError(f"{database.place}: the schema is of an earlier version; run `kvcensus migrate`") from error
    if not error.schema_missing:
        raise error
    return f"No {what} yet: the schema has not been created in {database.place}. Run `kvcensus migrate`."
