"""Stages of a start are printed for people, and for nobody else."""

from __future__ import annotations

import io
import sys
from types import ModuleType

import pytest

from cairn.driver import progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    monkeypatch.delenv(progress.VARIABLE, raising=False)
    monkeypatch.delitem(sys.modules, "ipykernel", raising=False)
    return Terminal()


def test_a_stage_is_a_plain_line_on_a_terminal(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", terminal)
    progress.say("Spark is up")
    (line,) = terminal.getvalue().splitlines()
    assert line.startswith("cairn ") and line.endswith(" s  Spark is up") and line.isprintable()


def test_nothing_is_printed_into_a_pipe_a_notebook_or_a_live_view(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", terminal)
    with progress.mute():
        progress.say("unseen")
    monkeypatch.setitem(sys.modules, "ipykernel", ModuleType("ipykernel"))
    progress.say("unseen")
    assert terminal.getvalue() == ""
    monkeypatch.delitem(sys.modules, "ipykernel")
    for nobody in (io.StringIO(), None):
        monkeypatch.setattr(sys, "stderr", nobody)
        progress.say("unseen")
        assert nobody is None or nobody.getvalue() == ""


def test_the_environment_decides_in_either_direction(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv(progress.VARIABLE, "0")
    progress.say("unseen")
    assert terminal.getvalue() == ""
    monkeypatch.setenv(progress.VARIABLE, "1")
    pipe = io.StringIO()
    monkeypatch.setattr(sys, "stderr", pipe)
    progress.say("seen")
    assert pipe.getvalue().endswith("seen\n")


def test_a_terminal_that_was_closed_hides_no_later_stage(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(progress.VARIABLE, "1")
    closed = Terminal()
    closed.close()
    monkeypatch.setattr(sys, "stderr", closed)
    assert progress.is_watched()
    progress.say("unseen")
    monkeypatch.setattr(sys, "stderr", terminal)
    progress.say("seen")
    assert terminal.getvalue().endswith(" s  seen\n")
