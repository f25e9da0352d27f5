"""docs/sql.md says what ``kvcensus sql`` answers: each question is asked of the sample, through the process that owns the store."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from sql.database import Database
from sql.store import connect
from tests.sql_document import DOCUMENT, WIDTH, asked, listed, lists, questions
from tests.tools.make_sample import fill, main

TEXT = DOCUMENT.read_text(encoding="utf-8")
QUESTIONS = questions(TEXT)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sample")


@pytest.fixture(scope="module")
def sample(folder: Path) -> Iterator[Database]:
    with connect(None, folder, own=True, prepare=fill) as database:
        yield database


def test_there_are_a_dozen_questions_and_each_has_an_answer() -> None:
    assert len(re.findall(r"^### .*\?$", TEXT, re.MULTILINE)) >= 12
    assert len(QUESTIONS) == TEXT.count("```sql") == TEXT.count("```text")
    for query, answer in QUESTIONS:
        assert len(answer.splitlines()) > 3, f"no rows: {query}"
        assert max(map(len, answer.splitlines())) <= WIDTH


@pytest.mark.parametrize(("query", "answer"), QUESTIONS, ids=[f"question {number}" for number, _ in enumerate(QUESTIONS, 1)])
def test_the_answer_is_what_the_document_says(sample: Database, folder: Path, query: str, answer: str) -> None:
    assert asked(folder, query) == answer, "python -m tests.sql_document writes the answers anew"


@pytest.mark.parametrize("marker", ["views", "tables"])
def test_every_view_and_table_is_listed_with_its_question(sample: Database, marker: str) -> None:
    assert listed(TEXT, marker) == lists(sample)[marker], "python -m tests.sql_document writes the lists anew"


def test_a_folder_that_holds_a_store_is_not_filled_again(sample: Database, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(folder)]) == 1
    assert "holds a store already" in capsys.readouterr().err
