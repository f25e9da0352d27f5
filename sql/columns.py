"""Rows of one table as one list per column, because that is what goes over the wire: no row is ever built. Pure."""

from __future__ import annotations

from abc import ABC
from collections.abc import Iterable
from typing import Any, ClassVar


class ColumnBatch(ABC):
    """Rows of one table, as one list per column, in the order of ``column_names``.

    ``rare_columns`` are among ``column_names`` only while a row at hand has something in them; the table's defaults stand for the rest.
    """

    table: ClassVar[str]
    column_names: tuple[str, ...]
    rare_columns: ClassVar[tuple[str, ...]] = ()

    def __init__(self) -> None:
        self.columns: list[list[Any]] = [[] for _ in self.column_names]

    def __len__(self) -> int:
        return len(self.columns[0])

    def append(self, values: Iterable[object]) -> None:
        """One row: a value for each column, in their order."""
        for column, value in zip(self.columns, values, strict=True):
            column.append(value)

    def clear(self) -> None:
        """Forget all rows. The lists are new ones, so that columns handed out stay as they were."""
        self.columns = [[] for _ in self.column_names]
