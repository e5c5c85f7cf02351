"""Columns written in SQL, which Spark parses once per run and not in every epoch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F


class Columns:
    """The columns of a run, by their SQL."""

    def __init__(self) -> None:
        self._parsed: dict[str, Column] = {}
        self._sequences: dict[tuple[str, ...], Any] = {}

    def parse(self, *texts: str) -> list[Column]:
        """Return a column for each text."""
        for text in texts:
            if text not in self._parsed:
                self._parsed[text] = F.expr(text)
        return [self._parsed[text] for text in texts]

    def project(self, rows: DataFrame, texts: Sequence[str]) -> DataFrame:
        """Return what `rows.selectExpr(*texts)` does."""
        return DataFrame(rows._jdf.select(self.sequence(rows, texts)), rows.sparkSession)

    def sequence(self, rows: DataFrame, texts: Sequence[str]) -> Any:
        """Return Java's sequence of columns: to make one takes a call for each of them."""
        key = tuple(texts)
        if key not in self._sequences:
            self._sequences[key] = rows._jcols(*self.parse(*texts))
        return self._sequences[key]
