"""The pages about the code name modules that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.unit.test_public_api import LAYERS, LEAVES, layer

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "cairn"
PAGES = [
    ROOT / "CONTRIBUTING.md",
    ROOT / "docs" / "architecture.md",
    *(ROOT / "docs" / "internals").glob("*.md"),
]
ROOMS = {path.name for path in SOURCE.iterdir() if path.is_dir()}
# `slot/level`, `cli/app.py`, `tests/places/`; not `epochs/<number>.json` and the like.
_PATH = re.compile(r"`([a-z_]+(?:/[A-Za-z_*]+)+/?(?:\.py)?)`")


def named_paths(text: str) -> set[str]:
    """Return the paths of modules, folders and tests that a page names."""
    return {
        path
        for path in _PATH.findall(text)
        if path.split("/")[0] in ROOMS | {"tests", "bench", "docs", "examples"}
    }


def exists(path: str) -> bool:
    bare = path.removesuffix("/").removesuffix(".py")
    return any(
        list(folder.glob(f"{bare}{ending}")) for folder in (SOURCE, ROOT) for ending in ("", ".py")
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_paths_on_a_page_exist(page: Path) -> None:
    assert not sorted(path for path in named_paths(page.read_text()) if not exists(path))


def test_pages_name_modules() -> None:
    paths = named_paths((ROOT / "docs" / "architecture.md").read_text())
    assert "storage/manifest.py" in paths and not exists("storage/no_such_module.py")


def test_the_map_has_every_room_once_and_in_the_order_of_imports() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    table = text.partition("## The map")[2].partition("\n## ")[0]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    rooms = [
        name.strip("/").replace("/", ".") for row in rows for name in re.findall("`([^`]+)`", row)
    ]
    # cairn itself and its entry point have no room; the archive is made by a program of its own.
    expected = set().union(*LAYERS, LEAVES) - {"", "__main__", "driver.archiving"}
    assert sorted(rooms) == sorted(expected)
    leaves_from = min(rooms.index(leaf) for leaf in LEAVES)
    ranks = [layer(name) for name in rooms[:leaves_from]]
    assert ranks == sorted(ranks, reverse=True)
    assert set(rooms[leaves_from:]) == LEAVES
