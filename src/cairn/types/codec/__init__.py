"""Values between three places: the user's Python, the state in memory, Arrow columns.

A codec belongs to one type. It checks what users hand in and makes it immutable
(normalise), turns whole Arrow columns into lists of such values (decode) and
back (encode). Work on columns is done by column, never by Arrow scalar. For single values
there is a plain form that msgpack holds (pack, unpack).

Always true here:
- decode(encode([v])) == [v] for every v that normalise returned, nulls, NaN and -0.0 included;
- unpack(pack(v)) == v likewise, through msgpack; equal keys pack_key to equal bytes;
- a value that does not fit is refused with its place in the structure, never
  wrapped, truncated or guessed; only decimals are rounded, half up, to their scale;
- values in memory are immutable: arrays are tuples, structs rows, maps FrozenMaps;
- values from decode_keys and normalise_key, and the keys of every map, are equal
  exactly when Spark groups them together: one NaN, no -0.0.
"""

from cairn.types.codec.core import Codec, Datum, FrozenMap, Key, ValueTypeError
from cairn.types.codec.registry import codec, is_hashable
from cairn.types.codec.strict import strict

__all__ = [
    "Codec",
    "Datum",
    "FrozenMap",
    "Key",
    "ValueTypeError",
    "codec",
    "is_hashable",
    "strict",
]
