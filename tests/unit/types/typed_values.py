"""Hypothesis strategies: types of every kind, and values that fit them."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal
from typing import Any

from hypothesis import strategies as st

# With every sign and exponent: stored values have one zero, and the exponent of their type.
_UNUSUAL = st.builds(
    lambda sign, digits, exponent: Decimal((sign, (digits,), exponent)),
    st.integers(0, 1),
    st.integers(0, 9),
    st.integers(-25, 6),
)

SCALARS: dict[str, Any] = {
    "boolean": st.booleans(),
    "tinyint": st.integers(-128, 127),
    "smallint": st.integers(-(2**15), 2**15 - 1),
    "int": st.integers(-(2**31), 2**31 - 1),
    "bigint": st.integers(-(2**63), 2**63 - 1),
    "float": st.floats(width=32),
    "double": st.floats(),
    "string": st.text(st.characters(codec="utf-8")),
    "binary": st.binary(),
    "date": st.dates(),
    "timestamp": st.datetimes(timezones=st.just(dt.UTC)),
    "timestamp_ntz": st.datetimes(),
    "decimal(10,2)": _UNUSUAL | st.decimals(-99999999, 99999999, places=2),
    "decimal(38,18)": _UNUSUAL | st.decimals(-(10**19), 10**19, places=18),
    "interval day to second": st.timedeltas(dt.timedelta(-(10**8)), dt.timedelta(10**8)),
}


def _nested(children: Any) -> Any:
    def array(pair: Any) -> Any:
        return f"array<{pair[0]}>", st.lists(st.none() | pair[1], max_size=3)

    def mapping(pairs: Any) -> Any:
        (key, keys), (item, items) = pairs
        entries = st.lists(st.tuples(keys, st.none() | items), max_size=3)
        return f"map<{key},{item}>", entries.map(dict)

    def struct(fields: Any) -> Any:
        names = [f"f{i}" for i in range(len(fields))]
        ddl = ",".join(
            f"{name}:{type}{'' if nullable else ' NOT NULL'}"
            for name, ((type, _), nullable) in zip(names, fields, strict=True)
        )
        values = [st.none() | v if nullable else v for (_, v), nullable in fields]
        return f"struct<{ddl}>", st.tuples(*values)

    scalar = st.sampled_from(sorted(SCALARS)).map(lambda name: (name, SCALARS[name]))
    return st.one_of(
        children.map(array),
        st.tuples(scalar, children).map(mapping),
        st.lists(st.tuples(children, st.booleans()), max_size=3).map(struct),
    )


typed = st.recursive(
    st.sampled_from(sorted(SCALARS)).map(lambda name: (name, SCALARS[name])), _nested, max_leaves=4
)
"""A type as DDL, with a strategy for its values, which are never null themselves."""
