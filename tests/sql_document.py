"""docs/sql.md read by machine: its questions and answers, and its lists of views and tables.

python -m tests.sql_document        # write the answers and lists anew, from the sample
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable
from pathlib import Path

from click.testing import CliRunner

from console.cli import cli
from sql.database import Database
from sql.store import connect
from tests.tools.make_sample import fill

DOCUMENT = Path(__file__).parent.parent / "docs" / "sql.md"
WIDTH = 140
"""No answer is wider, in characters."""

QUESTION = re.compile(r"^```sql\n(?P<sql>.*?)^```\n\n^```text\n(?P<answer>.*?)^```\n", re.MULTILINE | re.DOTALL)
_GRAINS = ("_5m", "_1h", "_1d")


def questions(text: str) -> list[tuple[str, str]]:
    """Every question of the document with the answer that stands below it."""
    return [(found["sql"].rstrip("\n"), found["answer"].rstrip("\n")) for found in QUESTION.finditer(text)]


def asked(data_dir: Path, query: str) -> str:
    """What ``kvcensus sql`` prints of ``query``."""
    done = CliRunner().invoke(cli, ["sql", "--data-dir", str(data_dir), query])
    if done.exit_code:
        raise AssertionError(f"{query}\n{done.output}")
    return "\n".join(line.rstrip() for line in done.output.rstrip("\n").splitlines())


def lists(database: Database) -> dict[str, str]:
    """The lists of the document, by their marker."""
    comments = dict(
        database.query(
            "SELECT name, comment FROM system.tables WHERE database = currentDatabase() "
            "AND (engine = 'View' OR engine LIKE '%MergeTree') AND name != 'schema_migrations' ORDER BY name"
        ).rows
    )
    views = {row[0] for row in database.query("SELECT name FROM system.tables WHERE database = currentDatabase() AND engine = 'View'").rows}
    lines = []
    for view in sorted(views):
        base = next((view.removesuffix(grain) for grain in _GRAINS if view.endswith(grain)), None)
        if view.startswith("rollup_") or (base and not view.endswith(_GRAINS[0])):
            continue
        name = f"`{base or view}`"
        if base:
            name = f"{name}, `…`" if base in views else f"`{base}…`"
        elif f"{view}{_GRAINS[0]}" in views:
            continue
        lines.append(f"| {name} | {_first(comments[view])} |")
    tables = [f"| `{name}` | {_first(comment)} |" for name, comment in comments.items() if name not in views]
    return {
        "views": "\n".join(["| view | question |", "|---|---|", *lines]),
        "tables": "\n".join(["| table | holds |", "|---|---|", *tables]),
    }


def _first(comment: str) -> str:
    """The question at the beginning of a comment, or its first sentence."""
    found = re.match(r".*?[.?](?=\s|$)", comment)
    return found.group() if found else comment


def listed(text: str, marker: str) -> str:
    """The list of the document that stands between ``marker`` and its end."""
    return text.partition(f"<!-- {marker} -->\n")[2].partition(f"\n<!-- end of {marker} -->")[0]


def refreshed(text: str, answer: Callable[[str], str], found: dict[str, str]) -> str:
    """The document with every answer and list anew."""
    text = QUESTION.sub(lambda each: f"```sql\n{each['sql']}```\n\n```text\n{answer(each['sql'])}\n```\n", text)
    for marker, lines in found.items():
        before, _, rest = text.partition(f"<!-- {marker} -->\n")
        end = f"<!-- end of {marker} -->"
        text = f"{before}<!-- {marker} -->\n{lines}\n{end}{rest.partition(end)[2]}"
    return text


def main() -> None:
    """Write the document anew."""
    with tempfile.TemporaryDirectory() as folder, connect(None, Path(folder), own=True, prepare=fill) as database:
        text = DOCUMENT.read_text(encoding="utf-8")
        text = refreshed(text, lambda query: asked(Path(folder), query), lists(database))
        draft = DOCUMENT.with_suffix(".new")
        draft.write_text(text, encoding="utf-8")
        draft.replace(DOCUMENT)


if __name__ == "__main__":
    main()
