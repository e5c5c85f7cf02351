"""State used as if it were its value: refused, with the call that was meant.

`self.total = 5` would replace the state by a number that nobody stores, and `if self.armed:` would
always be true. Neither fails by itself, so both are refused here.

Always true here:
- reading an attribute of a function costs what it did: nothing here is called for it;
- type checkers see none of it, and report the same mistakes in their own words.
"""

from __future__ import annotations

from typing import Any, ClassVar, Final, NoReturn

_OPERATORS: Final = (
    "lt", "le", "gt", "ge", "add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv",
    "floordiv", "rfloordiv", "mod", "rmod", "pow", "rpow", "and", "rand", "or", "ror", "xor",
    "rxor", "neg", "pos", "abs", "invert", "int", "float", "index", "round", "str", "format",
)  # fmt: skip
_IN_PLACE: Final = (
    "iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "iand", "ior", "ixor",
)  # fmt: skip
_CONTAINER: Final = ("len", "iter", "getitem", "contains", "bool")


class Stateful:
    """The calls that read, write and remove a state; base of all kinds."""

    name: str
    reads: ClassVar[str]
    """With `{}` for the attribute: how the value is read."""
    writes: ClassVar[str]
    removes: ClassVar[str] = "{}.clear()"

    def __eq__(self, other: object) -> bool:
        # With other state it is asked whether both are the same; that is for programs.
        if isinstance(other, Stateful):
            return self is other
        raise _no_value(self)

    __hash__ = object.__hash__


def refuse_operators(*kinds: type[Stateful], are_containers: bool = False) -> None:
    """Make arithmetic and comparisons with state of some kinds name the call that was meant.

    A container has a length, items and a truth of its own.
    """
    refused = dict.fromkeys(_OPERATORS, _refuse) | dict.fromkeys(_IN_PLACE, _refuse_in_place)
    if not are_containers:
        refused |= dict.fromkeys(_CONTAINER, _refuse)
    for kind in kinds:
        for name, refusal in refused.items():
            setattr(kind, f"__{name}__", refusal)


def no_assignment(state: Stateful) -> AttributeError:
    """The error of `self.total = 5`."""
    call = state.writes.format(f"self.{state.name}")
    return AttributeError(
        f"state {state.name!r} cannot be assigned: nothing would be stored; use {call}"
    )


def no_deletion(state: Stateful) -> AttributeError:
    """The error of `del self.total`."""
    call = state.removes.format(f"self.{state.name}")
    return AttributeError(f"state {state.name!r} cannot be deleted; use {call}")


def _no_value(state: Stateful) -> TypeError:
    call = state.reads.format(f"self.{state.name}")
    return TypeError(f"state {state.name!r} is used as if it were its value; use {call}")


def _refuse(state: Stateful, *_: Any) -> NoReturn:
    raise _no_value(state)


def _refuse_in_place(state: Stateful, *_: Any) -> NoReturn:
    raise no_assignment(state)
