"""The site builds without a warning, and its reference is complete."""

from __future__ import annotations

import importlib
import inspect
import re
import subprocess
import sys
import typing
from pathlib import Path

import pytest
import typer.main

import cairn
from cairn.cli import app
from tests.docs.pages import DOCS, pages


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    built = subprocess.run(
        [sys.executable, "-m", "sphinx", "-b", "html", "-W", "--keep-going", "-q",
         "-d", str(folder / "doctrees"), str(DOCS), str(folder / "html")],
        capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert built.returncode == 0, built.stderr[-4000:]
    return folder / "html"


def text_of(page: Path) -> str:
    return re.sub(r"<[^>]+>", "", page.read_text())


def test_every_page_is_in_the_site(site: Path) -> None:
    assert [name for name in pages() if not (site / name).with_suffix(".html").is_file()] == []


def test_the_site_asks_for_nothing_from_elsewhere(site: Path) -> None:
    built = list(site.rglob("*.html"))
    assert len(built) > len(pages())
    for page in built:
        assert not re.findall(r'<(?:script|img)[^>]*src="(?:https?:)?//', page.read_text()), page
        assert not re.findall(r'<link[^>]*stylesheet[^>]*href="(?:https?:)?//', page.read_text())


def test_every_command_and_option_is_in_the_reference(site: Path) -> None:
    text = text_of(site / "reference" / "cli.html")
    group: typing.Any = typer.main.get_command(app)
    for name, command in group.commands.items():
        assert f"cairn {name}" in text, name
        for parameter in command.params:
            if not getattr(parameter, "hidden", False) and parameter.param_type_name == "option":
                for option in parameter.opts:
                    assert option in text, f"cairn {name} {option}"


@pytest.mark.parametrize(
    ("module", "chapter"),
    [("cairn", "api"), ("cairn.sinks", "sinks"), ("cairn.testing", "testing")],
)
def test_every_exported_name_is_in_the_reference(site: Path, module: str, chapter: str) -> None:
    text = (site / "reference" / f"{chapter}.html").read_text()
    exported = importlib.import_module(module)
    for name in exported.__all__:
        if not inspect.ismodule(getattr(exported, name)):
            assert f'id="{module}.{name}"' in text, name


def test_every_kind_of_state_is_in_the_reference(site: Path) -> None:
    text = (site / "reference" / "state.html").read_text()
    for name in ("Value", "List", "Map", "Reducing", "Aggregating", "Broadcast", "OperatorList"):
        assert f'id="cairn.state.{name}"' in text, name


def test_a_call_of_a_run_is_in_the_reference_with_its_docstring(site: Path) -> None:
    text = text_of(site / "reference" / "api.html")
    summary = inspect.cleandoc(cairn.Job.start.__doc__ or "").splitlines()[0]
    assert summary in text and "rescale(" in text


def test_every_picture_is_used_and_stands_alone() -> None:
    used = " ".join((DOCS / name).read_text() for name in pages())
    pictures = sorted((DOCS / "pictures").glob("*.svg"))
    assert pictures
    for picture in pictures:
        assert picture.name in used, f"{picture.name} is on no page"
        assert "http" not in picture.read_text().replace("http://www.w3.org/2000/svg", "")
