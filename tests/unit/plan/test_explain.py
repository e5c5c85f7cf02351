"""A job explained before it runs: facts, text and picture say the same."""

from __future__ import annotations

import dataclasses
import itertools
import json
import xml.etree.ElementTree as ElementTree
from typing import Any

import msgspec
import pytest

from cairn import Job, KeyedProcess, PlanError, Process, sinks, state
from cairn.plan.explain import explain_graph
from cairn.plan.graph import Watermark
from cairn.report.drawing import draw_graph
from cairn.report.graph_text import graph_text
from cairn.report.job_graph import JobGraph
from cairn.report.layout import Block, Box, Column, Layout, Link, Tree
from tests.unit.plan.programs import ROW, Pass, process, source, transform

TIMED = "k long, v long, ts timestamp"


class Fraud(KeyedProcess[Any]):
    armed = state.Value("boolean")
    recent = state.List("struct<ts:timestamp,amount:double>", ttl="1 hour")
    seen = state.Map("string", "long", ttl=state.TTL("2 days", clock="event", refresh="read-write"))

    def process(self, row: Any, ctx: Any) -> Any:
        return row

    def on_timer(self, time_ms: int, ctx: Any) -> Any:
        return None


class Format(Process[Any]):
    def process(self, row: Any, ctx: Any) -> Any:
        return row


class Both(KeyedProcess[Any]):
    def on_orders(self, row: Any, ctx: Any) -> None: ...

    def on_payments(self, row: Any, ctx: Any) -> Any: ...

    def process_broadcast(self, row: Any, ctx: Any) -> Any: ...


def plain() -> Job:
    job = Job("plain", max_parallelism=16)
    rows = source(job, "payments", TIMED, "ts", Watermark(10_000, 60_000))
    fraud = rows.key_by("k").process(Fraud(), schema=TIMED, uid="fraud")
    fraud.sink_to(sinks.Noop(), uid="alerts")
    return job


def forked() -> Job:
    """One operator, three sinks, two side outputs; transforms before and after it."""
    job = Job("forked", max_parallelism=16)
    rows = source(job, "payments", TIMED, "ts", Watermark(10_000, None))
    refunds = source(job, "refunds", TIMED, "ts", Watermark(10_000, None))
    united = transform(rows, TIMED).union(refunds)
    fraud = united.key_by("k").process(Fraud(), schema=TIMED, uid="fraud")
    fraud.sink_to(sinks.Noop(), uid="alerts")
    fraud.side("late").sink_to(sinks.Noop(), uid="late_rows")
    fraud.side("big", ROW).sink_to(sinks.Noop(), uid="big_ones")
    lines = fraud.process(Format(), schema=ROW, uid="lines")
    lines.process(Format(), schema=ROW, uid="mail").sink_to(sinks.Noop(), uid="sent")
    process(transform(fraud), "totals").sink_to(sinks.Noop(), uid="totals_out")
    return job


def connected() -> Job:
    job = Job("connected", max_parallelism=16)
    orders = source(job, "orders", "id int, v long")
    payments = source(job, "payments", "order_id long, v long")
    rules = source(job, "rules", "name string")
    both = (
        job.connect(orders=orders.key_by("id"), payments=payments.key_by("order_id"))
        .broadcast(rules)
        .process(Both(), schema=ROW, uid="both")
    )
    again = process(both, "again")
    both.union(again).sink_to(sinks.Noop(), uid="audit")
    return job


class Label(Pass):
    label = state.Value("bigint")

    def process_broadcast(self, row: Any, ctx: Any) -> Any: ...


class Route(Process[Any]):
    seen = state.OperatorList("bigint", redistribute="union")

    def process(self, row: Any, ctx: Any) -> Any:
        return row


def looped() -> Job:
    """An operator with a broadcast and one chained to it, in a loop."""
    job = Job("looped", max_parallelism=16)
    rules = source(job, "rules", "name string")

    def body(loop: Any) -> Any:
        rules_of = loop.key_by("k").broadcast(rules, state.Broadcast("string", "double"))
        routed = rules_of.process(Label(), schema=ROW, uid="label").process(
            Route(), schema=ROW, uid="route"
        )
        return routed.side("back", ROW), routed

    source(job, "edges").iterate(body, uid="spread", max_rounds_per_epoch=10).sink_to(
        sinks.Noop(), uid="out"
    )
    return job


def united() -> Job:
    """Operators of one level, one of them with two outputs, and what they are united into."""
    job = Job("united", max_parallelism=16)
    rows = source(job, "s")
    a, b = process(rows, "a"), process(rows, "b")
    lines = a.union(a.side("odd", ROW), b).process(Format(), schema=ROW, uid="lines")
    lines.sink_to(sinks.Noop(), uid="sent")
    lines.union(b).sink_to(sinks.Noop(), uid="all")
    return job


def joined() -> Job:
    job = Job("joined", max_parallelism=16)
    left, right = (source(job, name, TIMED, "ts", Watermark(0, None)) for name in ("a", "b"))
    joined = left.join(right, on="k", within=("-5 minutes", "10 minutes"), how="left", uid="both")
    joined.sink_to(sinks.Noop(), uid="out")
    return job


def transformed() -> Job:
    """Four levels, before each a function with a long name."""
    job = Job("transformed", max_parallelism=16)
    stream = source(job, "s")
    for uid in ("first", "second", "third", "fourth"):
        stream = transform(stream)
        node = job._nodes[stream._ports[0].node]
        job._nodes[node.name] = dataclasses.replace(node, function=only_what_somebody_asked_for)
        stream = process(stream, uid)
    stream.sink_to(sinks.Noop(), uid="out")
    return job


def only_what_somebody_asked_for(rows: Any) -> Any:
    return rows


JOBS = [plain, forked, connected, looped, united, joined, transformed]


def facts_of(job: Job) -> Any:
    """The graph of a job, as JSON has it."""
    return msgspec.to_builtins(explain_graph(job.graph()))


def text_of(facts: Any) -> str:
    return graph_text(msgspec.convert(facts, JobGraph))


def svg_of(facts: Any) -> str:
    return draw_graph(msgspec.convert(facts, JobGraph))


def by(facts: Any, kind: str, name: str, value: Any) -> Any:
    return next(each for each in facts[kind] if each[name] == value)


# Facts


def test_an_operator_is_there_with_function_keys_states_and_timers() -> None:
    fraud = by(facts_of(plain()), "operators", "uid", "fraud")
    assert (fraud["function"], fraud["kind"], fraud["timers"]) == ("Fraud", "KeyedProcess", True)
    assert fraud["keys"] == {"k": "bigint"}
    assert [(s["name"], s["kind"], s["type"]) for s in fraud["states"]] == [
        ("armed", "value", "boolean"),
        ("recent", "list", "struct<ts:timestamp,amount:double>"),
        ("seen", "map", "bigint"),
    ]
    assert [s["entry_type"] for s in fraud["states"]] == [None, None, "string"]


def test_a_source_tells_its_event_time_and_watermark() -> None:
    (payments,) = facts_of(plain())["sources"]
    assert payments["event_time"] == "ts"
    assert (payments["watermark_ms"], payments["idle_after_ms"]) == (10_000, 60_000)


def test_chains_are_what_runs_in_one_process_each_after_what_feeds_it() -> None:
    levels = facts_of(forked())["levels"]
    assert [level["chains"] for level in levels] == [
        [["fraud", "lines", "mail", "sent", "alerts", "late_rows", "big_ones"]],
        [["totals", "totals_out"]],
    ]


def test_what_is_united_in_a_level_begins_a_chain_of_its_own() -> None:
    facts = facts_of(united())
    assert [level["chains"] for level in facts["levels"]] == [
        [["a"], ["b"], ["lines", "sent"], ["all"]]
    ]
    ways = [(edge["from"]["node"], edge["to"]) for edge in facts["edges"] if edge["way"] == "chain"]
    assert ways == [
        ("a", "lines"), ("a", "lines"), ("b", "lines"),
        ("lines", "sent"), ("lines", "all"), ("b", "all"),
    ]  # fmt: skip
    text = text_of(facts)
    assert "a ─ chained ─>\n  a:odd ─ chained ─>\n  b ─ chained ─>\n  operator lines" in text
    titles = [f">level 0{what}<" in svg_of(facts) for what in ("", ", united")]
    assert titles == [True, True]


def test_without_chaining_every_step_is_a_level() -> None:
    job = Job("unchained", max_parallelism=16, chaining=False)
    stream: Any = process(source(job, "s"), "a")
    for uid in ("b", "c"):
        stream = stream.process(Format(), schema=ROW, uid=uid)
    stream.sink_to(sinks.Noop(), uid="out")
    facts = facts_of(job)
    assert [level["chains"] for level in facts["levels"]] == [[["a"]], [["b"]], [["c", "out"]]]
    assert [edge["way"] for edge in facts["edges"]] == ["keyed", "spread", "spread", "chain"]


def test_edges_say_how_rows_find_their_subtask() -> None:
    edges = facts_of(connected())["edges"]
    into = {e["from"]["node"]: e for e in edges if e["to"] == "both"}
    assert [(e["input"], e["way"], e["by"]) for e in into.values()] == [
        ("orders", "keyed", ["id"]),
        ("payments", "keyed", ["order_id"]),
        (None, "broadcast", []),
    ]
    assert by({"o": facts_of(connected())["operators"]}, "o", "uid", "both")["keys"] == {
        "id": "bigint"
    }
    audit = [e for e in edges if e["to"] == "audit"]
    assert [e["from"]["node"] for e in audit] == ["both", "again"]
    assert len({e["shuffle"] for e in audit}) == 1


def test_rows_for_any_subtask_say_when_they_are_shuffled() -> None:
    job = Job("straight", max_parallelism=8)
    source(job, "rows").sink_to(sinks.Collect(), uid="kept")
    source(job, "others").sink_to(sinks.Noop(), uid="dropped")
    facts = facts_of(job)
    text = text_of(facts)
    assert "0 shuffled streams" in text and facts["levels"][0]["shuffles"] == []
    assert "rows ─ to any subtask, shuffled with several executors ─>" in text
    assert "others ─ counted by Spark ─>" in text
    source(job, "more").process(Format(), schema=ROW, uid="format")
    assert "more ─ to any subtask, shuffled with several executors, or fewer part" in text_of(
        facts_of(job)
    )
    # A key needs a shuffle, and all rows of the level go through it.
    process(source(job, "keyed"), "count")
    assert "rows ═ shuffle 0, to any subtask ═>" in text_of(facts_of(job))


def test_a_shuffle_that_skips_a_level_passes_it_by() -> None:
    facts = facts_of(connected())
    audit = next(e["shuffle"] for e in facts["edges"] if e["to"] == "audit")
    assert facts["levels"][1]["passing"] == [audit]
    assert "passes by" in text_of(facts)


def test_a_loop_says_what_it_sends_back_where_it_is_kept_and_whom_it_comes_to() -> None:
    facts = facts_of(looped())
    (loop,) = facts["loops"]
    assert loop["max_rounds_per_epoch"] == 10
    assert loop["feedback"] == [{"node": "route", "side": "back"}]
    (kept,) = loop["into"]
    assert kept["operator"] == "label"
    assert [level["feedback"] for level in facts["levels"]] == [[], [kept["uid"]]]
    back = [e for e in facts["edges"] if kept["uid"] in (e["to"], e["from"]["node"])]
    assert [(e["to"], e["way"], e["by"]) for e in back] == [
        (kept["uid"], "keyed", ["k"]),
        ("label", "feedback", []),
    ]
    text = text_of(facts)
    assert "loop spread  sends back route:back, up to 10 rounds an epoch" in text
    assert "route:back ═ shuffle 2, by k ═>" in text


def test_an_epoch_is_one_action_but_with_rounds_one_each() -> None:
    once, often = text_of(facts_of(plain())), text_of(facts_of(looped()))
    assert "An epoch is one Spark action" in once and "round" not in once
    assert "An epoch has up to 10 rounds" in often and "An epoch is one" not in often
    assert "up to 10 rounds an epoch" in looped().explain("svg")


def test_all_loops_have_the_rounds_of_the_one_that_asks_for_most() -> None:
    job = Job("loops", max_parallelism=16)
    for uid, rounds in (("few", 1), ("many", 7)):

        def body(loop: Any, uid: str = uid) -> Any:
            made = process(loop, f"{uid}_op")
            return made, made.side("out", ROW)

        looped = source(job, f"{uid}_rows").iterate(body, uid=uid, max_rounds_per_epoch=rounds)
        looped.sink_to(sinks.Noop(), uid=f"{uid}_out")
    facts = facts_of(job)
    assert facts["max_rounds_per_epoch"] == 7
    assert [loop["max_rounds_per_epoch"] for loop in facts["loops"]] == [1, 7]
    text = text_of(facts)
    for uid in ("few", "many"):
        assert f"loop {uid}  sends back {uid}_op, up to 7 rounds an epoch" in text


def test_a_join_says_within_what_and_its_state_is_readable() -> None:
    facts = facts_of(joined())
    (both,) = facts["operators"]
    assert both["join"] == {
        "how": "left",
        "from_ms": -300_000,
        "to_ms": 600_000,
        "ttl_ms": None,
        "is_as_of": False,
    }
    text = text_of(facts)
    assert "left join within -5 minutes to 10 minutes" in text
    assert "map struct<pane:bigint,number:bigint> →" in text
    assert "300000" not in text and "300000" not in svg_of(facts)


def test_state_of_subtasks_and_of_broadcasts_is_told_as_it_was_declared() -> None:
    operators = facts_of(looped())["operators"]
    (seen,) = by({"o": operators}, "o", "uid", "route")["states"]
    assert (seen["kind"], seen["type"], seen["entry_type"]) == ("operator_list", "bigint", None)
    assert seen["redistribute"] == "union"
    told = by({"o": operators}, "o", "uid", "label")["states"][-1]
    assert (told["kind"], told["entry_type"], told["type"]) == ("broadcast", "string", "double")


# Text


def test_the_text_names_everything() -> None:
    text = text_of(facts_of(forked()))
    for said in (
        "job forked: 2 levels, 4 operators (2 chained), 5 sinks",
        "event time ts, watermark 10 seconds behind, never idle",
        "refunds ═ shuffle 0, by k, in order of ts ═>",
        "operator fraud  Fraud (KeyedProcess, key k bigint, timers)",
        "state recent  list struct<ts:timestamp,amount:double>, ttl 1 hour",
        "map string → bigint, ttl 2 days of event time after a read or write",
        "side big  k bigint, v bigint",
        "chained of fraud:late: sink late_rows",
    ):
        assert said in text


def test_lines_fit_a_terminal() -> None:
    for make in JOBS:
        assert max(map(len, text_of(facts_of(make())).splitlines())) <= 100


def test_explain_prints_text_and_returns_what_was_asked_for(
    capsys: pytest.CaptureFixture[str],
) -> None:
    job = plain()
    assert job.explain() == capsys.readouterr().out.rstrip("\n")
    assert json.loads(job.explain(format="json")) == facts_of(job)
    assert job.explain(format="svg").startswith("<svg")
    assert capsys.readouterr().out == ""
    with pytest.raises(PlanError, match="one of text, svg, json"):
        job.explain(format="png")  # type: ignore[arg-type]


def test_a_job_that_cannot_run_is_not_explained() -> None:
    with pytest.raises(PlanError, match="no source"):
        Job("empty").explain()


# The picture


@pytest.mark.parametrize("make", JOBS)
def test_the_picture_is_well_formed_and_has_every_name(make: Any) -> None:
    facts = facts_of(make())
    root = ElementTree.fromstring(svg_of(facts))
    texts = [text for element in root.iter() if (text := element.text)]
    for each in (*facts["operators"], *facts["sinks"]):
        assert each["uid"] in texts


def test_names_cannot_break_the_picture() -> None:
    job = Job("odd", max_parallelism=16)
    rows = source(job, "s", "`a<b&c` long, v long")
    rows.key_by("a<b&c").process(Pass(), schema=ROW, uid="p").sink_to(sinks.Noop(), uid="out")
    root = ElementTree.fromstring(job.explain("svg"))
    assert any("a<b&c" in (element.text or "") for element in root.iter())


def test_transforms_are_narrow_and_their_whole_name_is_in_the_tooltip() -> None:
    svg = svg_of(facts_of(transformed()))
    assert svg.count("<title>only_what_somebody_asked_for") == 4
    assert svg.count(">only_what_somebod…<") == 4
    assert float(ElementTree.fromstring(svg).attrib["width"]) < 2600


def test_each_way_has_its_own_line() -> None:
    svg = svg_of(facts_of(looped()))
    assert svg.count('stroke-dasharray="6 4"') == 2, "the feedback, and the legend"
    assert svg.count('stroke-width="4.4"') == 2, "the broadcast, and the legend"


def test_what_is_drawn_is_inside_the_picture() -> None:
    for make in JOBS:
        root = ElementTree.fromstring(svg_of(facts_of(make())))
        width, height = float(root.attrib["width"]), float(root.attrib["height"])
        for rect in root.iter("{http://www.w3.org/2000/svg}rect"):
            x, y = float(rect.attrib["x"]), float(rect.attrib["y"])
            assert x >= 0 and x + float(rect.attrib["width"]) <= width
            assert y >= 0 and y + float(rect.attrib["height"]) <= height


def test_no_box_lies_on_another_and_no_line_in_a_box() -> None:
    """A level with two chains and a link that passes it by."""
    boxes = {name: Box(name, 80 + 10 * at, 40 + 5 * at) for at, name in enumerate("stabcxyz")}
    links = [
        Link("s", "a", 0), Link("t", "b", 1), Link("a", "c", 2), Link("s", "x", 3),
        Link("t", "x", 4), Link("b", "y", 5), Link("x", "z", 6), Link("a", "x", 7),
    ]  # fmt: skip
    inside = {2, 6}

    def tree(name: str, leading: Link | None = None) -> Tree:
        mine = [link for link in links if link.source == name]
        return Tree(
            boxes[name],
            [
                tree(link.target, link) if link.inlet in inside else Tree(None, link=link)
                for link in mine
            ],
            leading,
        )

    columns = [
        Column("sources", [Block(tree("s")), Block(tree("t"))]),
        Column("level 0", [Block(tree("a"), is_framed=True), Block(tree("b"))]),
        Column("level 1", [Block(tree("x"), is_framed=True), Block(tree("y"))]),
    ]
    Layout(columns, links, left=0, top=0)
    for one, other in itertools.combinations(boxes.values(), 2):
        apart = one.right <= other.x or other.right <= one.x
        assert apart or one.y + one.height <= other.y or other.y + other.height <= one.y
    for link in links:
        assert link.points[0][0] == boxes[link.source].right
        assert link.points[-1][0] == boxes[link.target].x
        for (x0, y0), (x1, y1) in itertools.pairwise(link.points):
            assert x0 <= x1
            for box in boxes.values():
                if y0 == y1 and box.y < y0 < box.y + box.height:
                    assert x1 <= box.x or box.right <= x0, f"{link.source}-{link.target} in {box}"
