"""Cutting SQL into statements, and telling a query from a change."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.errors import KvcensusError
from sql.statements import first_word, require_read_only, split, tokens, trailing_format


@pytest.mark.parametrize(
    ("sql", "statements"),
    [
        ("", []),
        (" ; ;\n-- nothing;\n/* ; */ ;", []),
        ("SELECT 1", ["SELECT 1"]),
        ("SELECT 1; SELECT 2;", ["SELECT 1", "SELECT 2"]),
        ("SELECT ';' AS a; SELECT 2", ["SELECT ';' AS a", "SELECT 2"]),
        (r"SELECT 'it\'s; ''quoted''; \\'; SELECT 2", [r"SELECT 'it\'s; ''quoted''; \\'", "SELECT 2"]),
        ('SELECT `a;b`, "c;d" FROM t; x', ['SELECT `a;b`, "c;d" FROM t', "x"]),
        ("a -- one; two\n b; c", ["a -- one; two\n b", "c"]),
        ("a /* one; ' two */ b; c", ["a /* one; ' two */ b", "c"]),
        ("#! note; more\na; b", ["#! note; more\na", "b"]),
        ("SELECT $tag$ ; $$ ' $tag$; b", ["SELECT $tag$ ; $$ ' $tag$", "b"]),
        ("-- heading\nCREATE TABLE a (b String COMMENT 'x;y');\n\n-- tail", ["-- heading\nCREATE TABLE a (b String COMMENT 'x;y')"]),
    ],
)
def test_split(sql: str, statements: list[str]) -> None:
    assert split(sql) == statements


@pytest.mark.parametrize(("sql", "quote"), [("SELECT 'a", "'"), ('\n\nSELECT "a', '"'), ("SELECT `a", "`"), ("SELECT /* a", "/*")])
def test_what_is_never_closed_is_named_with_its_line(sql: str, quote: str) -> None:
    line = sql[: sql.index(quote)].count("\n") + 1
    with pytest.raises(KvcensusError, match=f"line {line}: ") as caught:
        split(sql)
    assert quote in str(caught.value)


@given(st.lists(st.text(max_size=20), min_size=1, max_size=5))
def test_whatever_is_quoted_never_ends_a_statement(texts: list[str]) -> None:
    quoted = ["SELECT '" + text.replace("\\", "\\\\").replace("'", "\\'") + "'" for text in texts]
    assert split(";\n".join(quoted)) == quoted


@given(st.text(alphabet="ab'\"`;-#/*$\\\n ", max_size=40))
def test_no_text_is_lost_or_made_up(text: str) -> None:
    try:
        assert "".join(token.text for token in tokens(text)) == text
    except KvcensusError:
        assert any(quote in text for quote in ("'", '"', "`", "/*"))


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT 1",
        " select 1 ; ",
        "-- what\nSELECT 1",
        "(SELECT 1) UNION ALL (SELECT 2)",
        "WITH 1 AS x SELECT x",
        "SHOW TABLES",
        "DESCRIBE t",
        "EXPLAIN SELECT 1",
        "EXISTS TABLE t",
        "SELECT 'INTO OUTFILE'",
        "SELECT `into`, `outfile` FROM t",
        "SELECT 'file(', file, url FROM t WHERE file IN (SELECT 1)",
    ],
)
def test_queries_pass(sql: str) -> None:
    assert ";" not in require_read_only(sql)


@pytest.mark.parametrize(
    ("sql", "why"),
    [
        ("", "no SQL"),
        ("-- only a comment", "no SQL"),
        ("SELECT 1; DROP TABLE t", "one statement"),
        ("DROP TABLE t", "not DROP"),
        ("/* SELECT */ insert into t values (1)", "not INSERT"),
        ("(DELETE FROM t)", "not DELETE"),
        ("SET readonly = 0", "not SET"),
        ("KILL QUERY WHERE 1", "not KILL"),
        ("123", "not 1"),
        ("SELECT 1 INTO OUTFILE '/tmp/x'", "INTO OUTFILE"),
        ("SELECT 1 into/* */\noutfile '/tmp/x' FORMAT CSV", "INTO OUTFILE"),
        ("SELECT file('/etc/passwd')", "outside"),
        ("SELECT `file` ('/etc/passwd')", "outside"),
        ("DESCRIBE TABLE s3('http://127.0.0.1:9/bucket/key', 'CSV')", "outside"),
        ("EXPLAIN SELECT * FROM URL /* */ ('http://127.0.0.1:9', 'CSV')", "outside"),
        ("SELECT * FROM eval('SELECT 1')", "outside"),
    ],
)
def test_changes_do_not(sql: str, why: str) -> None:
    with pytest.raises(KvcensusError, match=why):
        require_read_only(sql)


def test_small_questions() -> None:
    assert first_word("  ( ( with x AS (SELECT 1) SELECT 2") == "WITH"
    assert trailing_format("SELECT 1 FORMAT JSONEachRow ;") == "JSONEachRow"
    assert trailing_format("SELECT 1\n FORMAT\n Native -- so") == "Native"
    assert trailing_format("SELECT format") is None
    assert trailing_format("SELECT 'FORMAT', 'CSV'") is None
