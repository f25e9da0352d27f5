"""The migrations on a cluster: each statement, written for one server, as the statements that do the same on all nodes. Pure.

Every table becomes two. ``<name>_local`` holds the rows of one shard, replicated within it; the plain name is a Distributed table over
all shards, so that views, queries and inserts need not know. Materialized views read and fill what is on their own shard. ``ON CLUSTER``
carries each change to every node. A statement of a kind that is not known here is an error: passed through, it would change one node alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from schemas.errors import KvcensusError
from sql.statements import Token, quoted, tokens

_RANK = "cityHash64(instance_id, dp_rank)"

SHARDING: Mapping[str, str] = {
    "rank_windows": _RANK,
    "life_groups": _RANK,
    "recomputes": _RANK,
    "block_events": _RANK,
    "batches": _RANK,
    "rank_messages": _RANK,
    "rank_events": _RANK,
    "lifecycle": _RANK,
    "engine_metrics": _RANK,
    "known_ranks": _RANK,
    "duplicate_windows": "cityHash64(scope, scope_key)",
    "shared_prefixes": "cityHash64(as_of)",
    "dead_letters": "cityHash64(topic, partition, offset)",
    "deploys": "cityHash64(deploy_id)",
    "rank_rollups": _RANK,
    "duplicate_rollups": "cityHash64(scope, scope_key)",
    "rollup_touched": "cityHash64(source, window_start, instance_id)",
    "rollup_marks": "cityHash64(name)",
    "rollup_spans": "cityHash64(source, window_start)",
    "fleet_clock": "cityHash64(semantics_version)",
}
"""By what the rows of each table are spread over the shards. Columns of its sorting key alone: rows that replace each other must meet."""

HISTORY = "schema_migrations"
"""The one table that every node has whole: whichever is asked must know which files were applied."""

LOCAL = "_local"

_NAME = re.compile(r"[\w{}.-]+")
_CLUSTER_OF = re.compile(r"Distributed\('((?:[^'\\]|\\.)*)'")


@dataclass(frozen=True)
class Cluster:
    """A cluster by the name in the servers' ``remote_servers`` (or a macro, as ``{cluster}``), and the database of our tables there."""

    name: str
    database: str

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise KvcensusError(f"cluster {self.name!r}: expected letters, digits, '_', '-', '.', or a macro in braces")

    @property
    def on(self) -> str:
        """The clause that carries a statement to every node."""
        return f"ON CLUSTER {_text(self.name)}"


def cluster_of(engine_full: str) -> str | None:
    """The cluster's name in the definition of a Distributed table, as ``system.tables`` has it; ``None`` for any other engine."""
    found = _CLUSTER_OF.match(engine_full)
    return found.group(1) if found else None


def create_database(cluster: Cluster) -> str:
    """The database itself, on every node."""
    return f"CREATE DATABASE IF NOT EXISTS {quoted(cluster.database)} {cluster.on}"


def history_path(database: str) -> str:
    """Where :data:`HISTORY` lies in the keeper: one path for all shards."""
    return f"/clickhouse/tables/all/{database}/{HISTORY}"


def history(statement: str, cluster: Cluster) -> str:
    """The statement that creates :data:`HISTORY`, as one table on all nodes: one path for all shards, a replica for each node."""
    pieces = _significant(statement)
    at = _after_if(pieces, 2)
    return _edited(
        statement,
        [_insert_after(pieces[at], f" {cluster.on}"), *_replicated(pieces, history_path(cluster.database), "{shard}-{replica}")],
    )


def rewrite(statements: Iterable[str], cluster: Cluster) -> list[str]:
    """``statements`` of a migration as those that do the same on ``cluster``, in order.

    Raises :class:`KvcensusError` for a kind of statement, or of change in an ``ALTER TABLE``, that is not known.
    """
    return [each for statement in statements for each in _rewritten(statement, cluster)]


def _rewritten(statement: str, cluster: Cluster) -> list[str]:
    pieces = _significant(statement)
    words = [piece.text.upper() for piece in pieces[:6]]
    for kind, handle in _KINDS.items():
        if words[: len(kind)] == list(kind):
            return handle(statement, pieces, len(kind), cluster)
    raise _unknown(" ".join(words[:3]))


def _create_table(statement: str, pieces: list[Token], at: int, cluster: Cluster) -> list[str]:
    at = _after_if(pieces, at)
    table = _table(pieces[at])
    if pieces[at + 1].text != "(":
        raise _unknown(f"CREATE TABLE {table} without a list of columns")
    local = _edited(
        statement,
        [
            _replace(pieces[at], f"{table}{LOCAL} {cluster.on}"),
            *_replicated(pieces, f"/clickhouse/tables/{{shard}}/{cluster.database}/{table}", "{replica}"),
        ],
    )
    comment = _trailing_comment(pieces)
    whole = (
        f"CREATE TABLE IF NOT EXISTS {table} {cluster.on} AS {quoted(cluster.database)}.{table}{LOCAL}\n"
        f"ENGINE = Distributed({_text(cluster.name)}, {_text(cluster.database)}, {_text(table + LOCAL)}, {SHARDING[table]})"
    )
    return [local, whole + (f"\nCOMMENT {comment}" if comment else "")]


def _create_view(statement: str, pieces: list[Token], at: int, cluster: Cluster) -> list[str]:
    return [_edited(statement, [_insert_after(pieces[_after_if(pieces, at)], f" {cluster.on}")])]


def _create_trigger(statement: str, pieces: list[Token], at: int, cluster: Cluster) -> list[str]:
    at = _after_if(pieces, at)
    if pieces[at + 1].text.upper() != "TO":
        raise _unknown(f"CREATE MATERIALIZED VIEW {pieces[at].text} that is refreshed or has no TO table")
    target = pieces[at + 2]
    return [
        _edited(
            statement,
            [
                _insert_after(pieces[at], f" {cluster.on}"),
                _replace(target, _table(target) + LOCAL),
                _local_source(pieces[at + 3 :]),
            ],
        )
    ]


def _drop_table(statement: str, pieces: list[Token], at: int, cluster: Cluster) -> list[str]:
    table = _table(pieces[_after_if(pieces, at)])
    # SYNC: the path in the keeper is free at once for a table of the same name.
    return [f"DROP TABLE IF EXISTS {name} {cluster.on} SYNC" for name in (table, table + LOCAL)]


def _drop_view(statement: str, pieces: list[Token], at: int, cluster: Cluster) -> list[str]:
    return [f"DROP VIEW IF EXISTS {pieces[_after_if(pieces, at)].text} {cluster.on} SYNC"]


def _insert(statement: str, pieces: list[Token], at: int, cluster: Cluster) -> list[str]:
    _table(pieces[at])
    depth = 0
    for piece in pieces[at + 1 :]:
        depth += {"(": 1, ")": -1}.get(piece.text, 0)
        if depth == 0 and piece.text.upper() in ("SELECT", "WITH"):
            break
    else:
        raise _unknown("INSERT without SELECT")
    # From all shards through this node to the right ones, and done when the statement is: left to itself the server may have each shard
    # insert what it selects into its own local table.
    settings = "SETTINGS insert_distributed_sync = 1, parallel_distributed_insert_select = 0"
    return [_edited(statement, [(piece.start, piece.start, f"{settings} ")])]


_ON_BOTH = frozenset({"ADD COLUMN", "DROP COLUMN", "RENAME COLUMN", "COMMENT COLUMN", "MODIFY COLUMN", "MODIFY COMMENT"})
_ON_LOCAL = frozenset(
    {
        "MODIFY ORDER",
        "MODIFY TTL",
        "REMOVE TTL",
        "MATERIALIZE TTL",
        "MODIFY SETTING",
        "RESET SETTING",
        "ADD INDEX",
        "DROP INDEX",
        "MATERIALIZE INDEX",
        "MATERIALIZE COLUMN",
        "UPDATE",
        "DELETE",
    }
)
_LISTS = frozenset({"MODIFY TTL", "MODIFY SETTING", "RESET SETTING", "UPDATE"})
"""Changes that may hold commas of their own."""


def _alter(statement: str, pieces: list[Token], at: int, cluster: Cluster) -> list[str]:
    named = pieces[at]
    rest = pieces[at + 1 :]
    if _kind(rest) == "MODIFY QUERY":  # of a materialized view
        return [_edited(statement, [_insert_after(named, f" {cluster.on}"), _local_source(rest)])]
    table = _table(named)
    changes: list[tuple[str, list[Token]]] = []
    for part in _parts(rest):
        kind = _kind(part)
        if kind not in _ON_BOTH | _ON_LOCAL:
            if not changes or changes[-1][0] not in _LISTS:
                raise _unknown(f"ALTER TABLE {table} {kind}")
            changes[-1][1].extend(part)
        else:
            changes.append((kind, list(part)))
    local = _edited(statement, [_replace(named, f"{table}{LOCAL} {cluster.on}")])
    shared = [_joined(statement, part) for kind, part in changes if kind in _ON_BOTH]
    if not shared:
        return [local]
    return [local, f"ALTER TABLE {table} {cluster.on}\n    " + ",\n    ".join(shared)]


_Handler = Callable[[str, list[Token], int, Cluster], list[str]]
_KINDS: Mapping[tuple[str, ...], _Handler] = {
    ("CREATE", "TABLE"): _create_table,
    ("CREATE", "VIEW"): _create_view,
    ("CREATE", "OR", "REPLACE", "VIEW"): _create_view,
    ("CREATE", "MATERIALIZED", "VIEW"): _create_trigger,
    ("ALTER", "TABLE"): _alter,
    ("INSERT", "INTO"): _insert,
    ("DROP", "TABLE"): _drop_table,
    ("DROP", "VIEW"): _drop_view,
}

_Edit = tuple[int, int, str]


def _significant(statement: str) -> list[Token]:
    return [token for token in tokens(statement) if token.kind not in ("space", "comment")]


def _after_if(pieces: Sequence[Token], at: int) -> int:
    """Behind ``IF [NOT] EXISTS``, if it stands at ``at``."""
    if pieces[at].text.upper() != "IF":
        return at
    return at + (3 if pieces[at + 1].text.upper() == "NOT" else 2)


def _table(piece: Token) -> str:
    if piece.text not in SHARDING:
        raise KvcensusError(f"{piece.text}: by what its rows are to be spread over a cluster's shards is not known")
    return piece.text


def _replicated(pieces: Sequence[Token], path: str, replica: str) -> list[_Edit]:
    """The edits that make the MergeTree engine of a CREATE TABLE a replicated one, its own arguments kept."""
    for at, piece in enumerate(pieces):
        if piece.text.upper() == "ENGINE" and pieces[at + 1].text == "=":
            engine = pieces[at + 2]
            if not engine.text.endswith("MergeTree"):
                raise _unknown(f"ENGINE = {engine.text}")
            ours = f"{_text(path)}, {_text(replica)}"
            following = pieces[at + 3 : at + 5]
            if not following or following[0].text != "(":
                return [_replace(engine, f"Replicated{engine.text}({ours})")]
            comma = "" if following[1].text == ")" else ", "
            return [_replace(engine, f"Replicated{engine.text}"), _insert_after(following[0], ours + comma)]
    raise _unknown("CREATE TABLE without an engine")


def _trailing_comment(pieces: Sequence[Token]) -> str | None:
    """The table's own comment, as a literal: what closes the statement."""
    return pieces[-1].text if len(pieces) > 1 and pieces[-2].text.upper() == "COMMENT" and pieces[-1].kind == "string" else None


def _local_source(pieces: Sequence[Token]) -> _Edit:
    """What a materialized view is triggered by: the first table it reads. Others that it looks up are read over all shards."""
    for before, piece in pairwise(pieces):
        if before.text.upper() == "FROM" and piece.text != "(":
            table = _table(piece)
            qualified = any(name.text == table and dot.text == "." for name, dot in pairwise(pieces))
            return _replace(piece, f"{table}{LOCAL} AS {table}" if qualified else table + LOCAL)
    raise _unknown("a materialized view that reads no table")


def _parts(pieces: Sequence[Token]) -> list[list[Token]]:
    """``pieces`` cut at the commas that stand in no brackets."""
    parts: list[list[Token]] = [[]]
    depth = 0
    for piece in pieces:
        if piece.text in ("(", "["):
            depth += 1
        elif piece.text in (")", "]"):
            depth -= 1
        if piece.text == "," and depth == 0:
            parts.append([])
        else:
            parts[-1].append(piece)
    return parts


def _kind(part: Sequence[Token]) -> str:
    words = [piece.text.upper() for piece in part[:2]]
    return words[0] if words[:1] in (["UPDATE"], ["DELETE"]) else " ".join(words)


def _joined(statement: str, part: Sequence[Token]) -> str:
    """The text of ``part`` without comments, which would swallow what is put behind them."""
    first, last = part[0].start, part[-1].start + len(part[-1].text)
    kept = (token.text for token in tokens(statement[first:last]) if token.kind != "comment")
    return "".join(kept)


def _replace(piece: Token, text: str) -> _Edit:
    return piece.start, piece.start + len(piece.text), text


def _insert_after(piece: Token, text: str) -> _Edit:
    end = piece.start + len(piece.text)
    return end, end, text


def _edited(statement: str, edits: Sequence[_Edit]) -> str:
    for start, end, text in sorted(edits, reverse=True):
        statement = statement[:start] + text + statement[end:]
    return statement


def _text(value: str) -> str:
    return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"


def _unknown(what: str) -> KvcensusError:
    return KvcensusError(f"not known how to do on a cluster: {what}")
