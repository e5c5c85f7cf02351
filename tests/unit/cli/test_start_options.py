"""`cairn run` has every option of `job.start`, with the same default."""

from __future__ import annotations

import inspect
from dataclasses import fields, replace

from cairn.cli.run_commands import run
from cairn.cli.start_options import make_options
from cairn.driver.options import Options
from cairn.job import Job


def test_every_option_of_a_start_is_one_of_the_command_line() -> None:
    command, start = inspect.signature(run).parameters, inspect.signature(Job.start).parameters
    for field in fields(Options):
        assert field.name in command and field.name in start


def test_an_empty_command_line_starts_a_job_that_begins_again_after_failures() -> None:
    command = inspect.signature(run).parameters.values()
    names = {field.name for field in fields(Options)} - {"checkpoint"}
    given = {each.name: each.default for each in command if each.name in names}
    restart = "exponential(1 second, 5 minutes)"
    assert make_options("ckpt", given) == Options("ckpt", restart=restart)


def test_texts_of_the_command_line_become_what_a_start_takes() -> None:
    names = [field.name for field in fields(Options) if field.name != "checkpoint"]
    given = {name: getattr(Options("ckpt"), name) for name in names}
    given |= {"reset_sources": ["clicks"], "serve": "8080"}
    made = make_options("ckpt", given)
    assert made.serve is not None and made.serve.address == "127.0.0.1:8080"
    assert replace(made, serve=None) == Options("ckpt", reset_sources=("clicks",))
