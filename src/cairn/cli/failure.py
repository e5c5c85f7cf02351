"""Errors of a command: a message on stderr and an exit code, a traceback only with --debug.

0    done
1    the job, the checkpoint or the machine: see the message
2    the command line is wrong; nothing was done
130  stopped at once by a second Ctrl-C
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import typer
from rich.console import Console
from rich.text import Text

from cairn.cli.checkpoint import NoCheckpointError
from cairn.cli.job_file import UsageError
from cairn.errors import CairnError

FAILED = 1
MISUSED = 2
INTERRUPTED = 130


@contextmanager
def report_errors(*, debug: bool) -> Iterator[None]:
    """Print an exception as a message for people, and end the command with an exit code."""
    try:
        yield
    except (typer.Exit, typer.Abort):
        raise
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    except BrokenPipeError:
        # The reader of our output (head, less) has closed it; Python must not complain at exit.
        sys.stdout = None
        raise typer.Exit(FAILED) from None
    except Exception as error:
        if debug:
            traceback.print_exception(error)
        _print(error, debug=debug)
        misused = isinstance(error, NoCheckpointError | UsageError)
        raise typer.Exit(MISUSED if misused else FAILED) from None


def _print(error: Exception, *, debug: bool) -> None:
    name = "error" if isinstance(error, NoCheckpointError | UsageError) else type(error).__name__
    text = Text.assemble((f"{name}: ", "bold red"), str(error).strip())
    if not isinstance(error, CairnError):
        # Other errors have no `next:`. Show at least the line of the user's code.
        at = _users_frame(error)
        if at is not None:
            text.append(f"\n  at: {at.filename}:{at.lineno} in {at.name}")
        if not debug:
            text.append("\n  next: --debug shows the traceback")
    for note in getattr(error, "__notes__", ()):
        text.append(f"\n  {note}")
    Console(stderr=True, soft_wrap=True, highlight=False).print(text)


def _users_frame(error: Exception) -> traceback.FrameSummary | None:
    frames = traceback.extract_tb(error.__traceback__)
    ours = str(Path(__file__).parents[1])
    for frame in reversed(frames):
        if "site-packages" not in frame.filename and not frame.filename.startswith((ours, "<")):
            return frame
    return frames[-1] if frames else None
