"""Joins, states and their time to live as text."""

from __future__ import annotations

from cairn.report.job_graph import GraphJoin, GraphState
from cairn.types.durations import span_text


def join_text(join: GraphJoin) -> str:
    if join.is_as_of:
        return f"{join.how} join as of the time of left"
    if join.ttl_ms is not None:
        return f"{join.how} join, ttl {span_text(join.ttl_ms)}"
    if join.from_ms is None or join.to_ms is None:
        return f"{join.how} join"
    low, high = (
        f"{'-' if bound < 0 else ''}{span_text(abs(bound))}" for bound in (join.from_ms, join.to_ms)
    )
    return f"{join.how} join within {low} to {high}"


def state_text(state: GraphState) -> str:
    entry = "" if state.entry_type is None else f"{state.entry_type} → "
    text = f"{state.kind.replace('_', ' ')} {entry}{state.type}"
    if state.redistribute:
        text += f", {state.redistribute}"
    return text + (f", ttl {ttl_text(state.ttl)}" if state.ttl else "")


def ttl_text(ttl: str) -> str:
    """Return a declared time to live as it would be written, without the defaults."""
    span, clock, refresh = ttl.split(", ")
    text = span_text(int(span.removesuffix(" ms")))
    text += " of event time" if clock == "event" else ""
    return text + (" after a read or write" if refresh == "read-write" else "")
