"""What users can import, and which way imports go: see "Layout" in the house style."""

from __future__ import annotations

import ast
import functools
import inspect
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import cairn
import cairn.sinks
import cairn.state

SOURCE = Path(cairn.__file__).parent

# From the bottom up: a module imports from its own layer and those below, never from above.
LAYERS = [
    {"storage"},
    {"backends"},
    {"snapshots"},
    {"operators"},
    {"sinks"},
    {"protocol"},
    {"slot"},
    {"worker"},
    {"plan"},
    {"driver.coordinator"},
    {"driver"},
    {"query"},
    {"web"},
    {"session", "stream", "keyed", "connected", "run", "job", "client", "savepoint_writer"},
    {""},  # cairn itself, which only re-exports
    {"cli", "demo", "testing", "driver.archiving", "__main__"},
]
# Free to all, and free of all others. Key groups are arithmetic: slots and clients need them too.
LEAVES = {
    "errors", "ids", "types", "state", "functions", "windows", "metrics", "crash", "logs",
    "backoff", "key_groups", "process_identity", "misuse", "user_code", "version", "report",
    "java", "runtime_folder",
}  # fmt: skip
SERVERS = {"starlette", "uvicorn", "duckdb", "prometheus_client"}
TOUCHES_SPARK = {
    "plan.columns",
    "plan.cuts",
    "plan.dataframe",
    "plan.frames",
    "plan.observations",
    "plan.parts",
    "plan.pruning",
    "plan.slices",
    "plan.transforms",
    "driver.spark_driver",
    "worker.daemon",
}
TOUCHES_SPARK_WHEN_CALLED = {
    "plan.key_columns",
    "plan.sources",
    "worker.forward",
    "session",
    "driver.spark_start",
    "query.state_writing",
    "cli.job_file",
    "demo.check",
    "storage.hadoop_jvm",
}


class Imported(NamedTuple):
    module: str
    name: str
    in_function: bool


def modules() -> dict[str, Path]:
    """{"plan.graph": path}; a package is called by its own name, cairn itself ""."""
    found = {}
    for path in SOURCE.rglob("*.py"):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@functools.cache
def imports() -> tuple[Imported, ...]:
    """All but those for type checkers."""
    known = modules()
    return tuple(
        found
        for module, path in known.items()
        for found in _imports_of(ast.parse(path.read_text()), module, known, in_function=False)
    )


def _imports_of(
    tree: ast.AST, module: str, known: dict[str, Path], *, in_function: bool
) -> Iterator[Imported]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Imported(module, alias.name, in_function)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: imports are absolute"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                is_module = inner.removeprefix("cairn.") in known
                yield Imported(module, inner if is_module else str(node.module), in_function)
        is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        yield from _imports_of(node, module, known, in_function=in_function or is_function)


def leaf(name: str) -> bool:
    return name in LEAVES or name.split(".")[0] in LEAVES


def room(name: str) -> str:
    """The innermost folder of LAYERS that a module is in."""
    parts = name.split(".")
    known = set().union(*LAYERS)
    heads = [".".join(parts[:count]) for count in range(len(parts), 0, -1)]
    return next((head for head in heads if head in known), parts[0])


def layer(name: str) -> int:
    return next(rank for rank, names in enumerate(LAYERS) if room(name) in names)


def test_every_module_has_a_place() -> None:
    rooms = {room(name) for name in modules() if not leaf(name)}
    assert rooms <= set().union(*LAYERS), "give it a place in LAYERS or LEAVES"


def test_imports_go_downwards_only() -> None:
    wrong = []
    for module, name, _ in imports():
        if name != "cairn" and not name.startswith("cairn."):
            continue
        target = name.removeprefix("cairn").removeprefix(".")
        if leaf(target):
            continue
        if leaf(module) or layer(target) > layer(module):
            wrong.append(f"{module} imports {target or 'cairn'}")
    assert not wrong


def test_nothing_but_tests_imports_what_is_for_tests() -> None:
    for module, name, _ in imports():
        if name.startswith("cairn.testing"):
            assert module.startswith("testing"), f"{module} imports {name}"


def test_pyspark_is_imported_only_where_spark_is_touched() -> None:
    for module, name, in_function in imports():
        if name.split(".")[0] == "pyspark":
            assert module in TOUCHES_SPARK | TOUCHES_SPARK_WHEN_CALLED, f"{module} imports {name}"
            assert in_function or module in TOUCHES_SPARK, f"{module} imports {name} at once"


@pytest.mark.parametrize("module", ["cairn", "cairn.slot.server", "cairn.slot.process"])
def test_slots_and_users_do_not_load_spark_by_importing(module: str) -> None:
    program = f"import sys, {module}; print(*sorted(m for m in sys.modules if '.' not in m))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not {"pyspark", "py4j", "pandas", *SERVERS} & set(done.stdout.split())


def test_packages_only_re_export() -> None:
    for name, path in modules().items():
        if path.name == "__init__.py":
            for node in ast.parse(path.read_text()).body:
                is_doc = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
                plain = isinstance(node, ast.Import | ast.ImportFrom | ast.Assign | ast.AnnAssign)
                assert is_doc or plain, f"{name or 'cairn'} has logic in its __init__.py"


def test_exported_names_are_these() -> None:
    assert sorted(cairn.__all__) == [
        "Answer",
        "BatchContext",
        "BatchProcess",
        "CairnError",
        "CommitConflictError",
        "CommitError",
        "CommitUnknownError",
        "Context",
        "CorruptFileError",
        "Duration",
        "EpochError",
        "FunctionError",
        "Job",
        "KeyGroupCountError",
        "KeyedProcess",
        "KeyedStream",
        "NoEpochError",
        "PlanError",
        "Process",
        "QueryError",
        "RestoreError",
        "Run",
        "SavepointWriter",
        "SchemaLike",
        "Serve",
        "StaleEpochError",
        "StateNotFoundError",
        "StateSchemaError",
        "Stream",
        "WindowFunction",
        "client",
        "diff_state",
        "logs",
        "read_state",
        "session",
        "sinks",
        "spark_config",
        "state",
        "windows",
    ]
    assert sorted(cairn.sinks.__all__) == [
        "Collect",
        "Committable",
        "Console",
        "Delta",
        "Execution",
        "Files",
        "Foreach",
        "Noop",
        "Postgres",
        "PublishedEpoch",
        "Redis",
        "Sink",
        "SinkContext",
        "Spark",
        "Wal",
        "Writer",
        "list_published",
    ]
    declared = {
        name
        for name, value in vars(cairn.state).items()
        if inspect.isclass(value) and value.__module__ == "cairn.state"
    }
    assert declared == {
        "Aggregate",
        "Aggregating",
        "Broadcast",
        "Declaration",
        "List",
        "Map",
        "OperatorList",
        "Reducing",
        "TTL",
        "Value",
        "_Items",
        "_Mapping",
    }
    for module in (cairn, cairn.sinks):
        assert all(hasattr(module, name) for name in module.__all__)


def test_every_error_is_exported() -> None:
    errors = {
        name
        for name, value in vars(cairn.errors).items()
        if inspect.isclass(value) and issubclass(value, Exception)
    }
    assert errors <= set(cairn.__all__)
    assert all(name.endswith("Error") for name in errors)
