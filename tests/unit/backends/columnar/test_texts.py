"""Texts in a buffer that grows: values come back, and old ones make room."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cairn.backends.columnar import table as columns
from cairn.backends.columnar.texts import Texts
from cairn.functions import BatchProcess
from cairn.state import Value
from cairn.testing import Harness


@pytest.mark.parametrize("type", [pa.string(), pa.binary()])
@given(
    st.lists(st.lists(st.text(max_size=20) | st.just("x" * 3000), max_size=20), max_size=5),
    st.data(),
)
def test_values_come_back_from_their_places(
    type: pa.DataType, added: list[list[str]], data: st.DataObject
) -> None:
    texts, model = Texts(type), [""]
    for values in added:
        whole = pa.array(["before", *values, "after"]).cast(type)
        places = texts.add(whole.slice(1, len(values)))
        model += values
        assert texts.take(places, None).equals(pa.array(values, pa.string()).cast(type))
    picks = data.draw(st.lists(st.integers(0, len(model) - 1)))
    expected = pa.array([model[pick] for pick in picks], pa.string()).cast(type)
    at = np.zeros(len(picks), np.int64)
    # Places are numbers in the order of adding; 0 is the empty value.
    at[:] = picks
    found = texts.take(at, None)
    found.validate(full=True)
    assert found.equals(expected)


class Notes(BatchProcess):
    note = Value("struct<text:string,tags:array<string>>", default={"text": "none", "tags": []})

    def process(self, batch: pa.RecordBatch, ctx: object) -> None:
        self.note.put_many(
            batch["k"], pa.StructArray.from_arrays([batch["text"], batch["tags"]], ["text", "tags"])
        )


def test_replaced_texts_make_room_and_the_others_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(columns, "TEXT_BYTES_MIN", 4_000)
    schema = "k int, text string, tags array<string>"
    with Harness(Notes(), schema, "k", "k int") as harness:
        form = harness.function.note._table._form
        kept = (0, "kept " * 50, ["a", None])
        harness.push([kept, (1, "x" * 900, [])])
        harness.commit()
        for n in range(40):
            harness.push((1, f"{n} " + "y" * 900, [str(n)]))
            harness.commit()
            assert harness.state("note", 2) == ("none", ()), "the default is there in any layout"
        table = harness.function.note._table
        assert table._form is not form and table._form.text_bytes < 8_000
        assert harness.state("note", 0) == (kept[1], ("a", None))
        assert harness.state("note", 1).text.startswith("39 ")
