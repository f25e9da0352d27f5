"""Reading SQL text far enough to cut it into statements and to tell a query from a change. Pure.

The lexical rules are ClickHouse's: strings in ``'`` with ``\\`` and doubled quotes as escapes, identifiers in ``"`` or
backticks, comments from ``--`` or ``#`` to the end of the line and between ``/*`` and ``*/``, and ``$tag$...$tag$`` strings.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

from schemas.errors import KvcensusError

READ_WORDS = frozenset({"SELECT", "WITH", "SHOW", "DESCRIBE", "DESC", "EXPLAIN", "EXISTS"})
"""First words of the statements that :func:`require_read_only` lets through."""

_OUTSIDE = """
aigenerate arrowstream azureblobstorage azureblobstoragecluster bigquery catboostevaluate cluster clusterallreplicas cosn deltalake
deltalakeazure deltalakeazurecluster deltalakecluster deltalakelocal deltalakes3 deltalakes3cluster eval executable file filecluster
filesystem gcs hdfs hdfscluster hudi hudicluster iceberg icebergazure icebergazurecluster icebergcluster iceberghdfs iceberghdfscluster
iceberglocal iceberglocalcluster icebergs3 icebergs3cluster input jdbc mongodb mysql odbc oss paimon paimonazure paimonazurecluster
paimoncluster paimonhdfs paimonhdfscluster paimonlocal paimons3 paimons3cluster postgresql python redis remote remotesecure s3 s3cluster
sqlite url urlcluster ytsaurus
"""

OUTSIDE = frozenset(_OUTSIDE.split())
"""Functions that read files, call other hosts, reach into this process, or run text as SQL; in lower case.

The engine's read-only mode refuses most of them after ``FROM``, but neither after ``DESCRIBE TABLE``, where it also connects and
waits beyond every time limit while others wait for it, nor the scalar ``file``.
"""

_TOKEN = re.compile(
    r"""
      (?P<space>\s+)
    | (?P<comment>--[^\n]*|\#[!\ ][^\n]*|/\*.*?\*/)
    | (?P<string>'(?:[^'\\]|\\.|'')*')
    | (?P<quoted>"(?:[^"\\]|\\.|"")*"|`(?:[^`\\]|\\.|``)*`)
    | (?P<heredoc>\$(?P<tag>\w*)\$.*?\$(?P=tag)\$)
    | (?P<word>[A-Za-z_]\w*)
    | (?P<end>;)
    | (?P<open>'|"|`|/\*)
    | (?P<other>.)
    """,
    re.VERBOSE | re.DOTALL,
)


class Token(NamedTuple):
    """A piece of SQL: ``kind`` is one of space, comment, string, quoted, heredoc, word, end, other."""

    kind: str
    text: str
    start: int


def tokens(sql: str) -> Iterator[Token]:
    """The pieces of ``sql``, in order, nothing left out. Raises :class:`KvcensusError` for a quote or comment that never ends."""
    for match in _TOKEN.finditer(sql):
        kind = match.lastgroup or "other"
        if kind == "tag":
            kind = "heredoc"
        if kind == "open":
            line = sql.count("\n", 0, match.start()) + 1
            raise KvcensusError(f"SQL line {line}: {match.group()} is opened and never closed")
        yield Token(kind, match.group(), match.start())


def split(sql: str) -> list[str]:
    """The statements of ``sql``, without their semicolons; empty ones and those of comments alone are left out."""
    statements: list[str] = []
    parts: list[str] = []
    telling = False
    for token in tokens(sql):
        if token.kind == "end":
            if telling:
                statements.append("".join(parts).strip())
            parts, telling = [], False
            continue
        parts.append(token.text)
        telling = telling or token.kind not in ("space", "comment")
    if telling:
        statements.append("".join(parts).strip())
    return statements


def quoted(name: str) -> str:
    """``name`` as an identifier in SQL."""
    return "`" + name.replace("\\", "\\\\").replace("`", "\\`") + "`"


def _words(statement: str) -> list[str]:
    return [token.text.upper() for token in tokens(statement) if token.kind not in ("space", "comment")]


def first_word(statement: str) -> str:
    """The first word of ``statement`` in upper case, opening brackets passed over; empty if there is none."""
    return next((word for word in _words(statement) if word != "("), "")


def require_read_only(sql: str) -> str:
    """The one query in ``sql``, without a trailing semicolon.

    Raises :class:`KvcensusError` unless it is a single statement that only reads, and only from the store (:data:`OUTSIDE`). The
    embedded engine writes the file of an ``INTO OUTFILE`` even in its read-only mode, so that clause is refused here.
    """
    statements = split(sql)
    if len(statements) != 1:
        raise KvcensusError("one statement at a time" if statements else "no SQL given")
    words = _words(statements[0])
    first = first_word(statements[0])
    if first not in READ_WORDS:
        raise KvcensusError(f"only queries are allowed here ({', '.join(sorted(READ_WORDS))}), not {first or 'this'}")
    if ("INTO", "OUTFILE") in pairwise(words):
        raise KvcensusError("INTO OUTFILE is not allowed here: use --out, or redirect the output")
    for name, bracket in pairwise(words):
        if bracket == "(" and (called := name.strip('"`').lower()) in OUTSIDE:
            raise KvcensusError(f"{called}() is not allowed here: it reaches outside the store")
    return statements[0]


def trailing_format(sql: str) -> str | None:
    """The format named by a ``FORMAT`` clause at the end of ``sql``, or ``None``."""
    words = [token.text for token in tokens(sql) if token.kind not in ("space", "comment", "end")]
    return words[-1] if len(words) > 2 and words[-2].upper() == "FORMAT" and words[-1].isidentifier() else None
