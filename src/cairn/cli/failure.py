"""How a command fails: a message on stderr and an exit code, a traceback only on demand.

0    done
1    the job, the checkpoint or the machine: see the message
2    the command was called wrongly, nothing was done
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
def reported(*, debug: bool) -> Iterator[None]:
    """Turns what is raised into what a person reads."""
    try:
        yield
    except (typer.Exit, typer.Abort):
        raise
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    except BrokenPipeError:
        # Whoever read our output (head, less) has enough; Python must not complain at the end.
        sys.stdout = None  # type: ignore[assignment]
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
        # Somebody else's error says less: tell at least where the user's code stood.
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
