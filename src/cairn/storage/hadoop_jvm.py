"""The JVM in which Hadoop's client runs: a small one, which the processes of a host share.

    <runtime>/hadoop-<digest>/     alive (a pipe), address, lock, jvm.log

Driver, workers, slots and commands with the same settings use the same JVM. Its standard input is a
named pipe that each of them holds open for writing. When the last one has ended, however it ended,
the pipe is at its end, and so the JVM ends too.

Settings are those of HADOOP_CONF_DIR and of the session (`spark.hadoop.…`). A driver gives the
session's to its Python workers in an environment variable, and slots inherit it. Classes come from
CLASSPATH, `spark.jars` and Spark's own jars, in this order.

Always true here:
- no setting is in the arguments of a process or in a log; the address, which has the token of the
  JVM, is in a folder that is closed to other users;
- opening the pipe for writing fails when no JVM reads it, so a JVM that has ended is never waited
  for. One that ends in a call is replaced in the next one.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

from cairn.errors import PlanError
from cairn.java import find_java
from cairn.runtime_folder import hold_made, runtime_root
from cairn.storage.store import HADOOP_JVM_MB

VARIABLE: Final = "CAIRN_HADOOP_SETTINGS"
_START_S_MAX: Final = 60.0
_PREFIX: Final = "spark.hadoop."
_JARS: Final = "spark.jars"
_OPTIONS: Final = (
    "-Xms8m",
    f"-Xmx{HADOOP_JVM_MB // 2}m",
    "-Xss512k",
    "-XX:+UseSerialGC",
    "-XX:TieredStopAtLevel=1",
    "-XX:ReservedCodeCacheSize=32m",
    "-XX:+ExitOnOutOfMemoryError",
)
# Hadoop's client finds its user and its settings by these, and by those that begin with HADOOP_.
_READ: Final = ("CLASSPATH", "KRB5CCNAME", "KRB5_CONFIG")


class _Surroundings(NamedTuple):
    """Processes that have the same may share a JVM."""

    settings: str
    environment: tuple[tuple[str, str], ...]


class Jvm:
    """A JVM with Hadoop's classes, and the file systems that this process has opened in it."""

    def __init__(self, gateway: Any, settings: Any, held: contextlib.ExitStack) -> None:
        self.gateway = gateway
        self.classes = gateway.jvm.org.apache.hadoop
        self._settings = settings
        self._held = held
        self._lock = threading.Lock()
        self._file_systems: dict[str, Any] = {}

    def file_system(self, url: str) -> Any:
        """Return the FileSystem of a url without a path."""
        with self._lock:
            if url not in self._file_systems:
                where = self.gateway.jvm.java.net.URI.create(f"{url}/")
                # One for all processes: they have the same settings, and nobody closes it.
                self._file_systems[url] = self.classes.fs.FileSystem.get(where, self._settings)
            return self._file_systems[url]

    def close(self) -> None:
        """Give up this process's part; other processes may use the JVM further."""
        with contextlib.suppress(Exception):
            self.gateway.close()
        self._held.close()

    def give_to_parent(self) -> None:
        """Send nothing more from a forked child: the connections are its parent's."""
        self.gateway._gateway_client.is_connected = False


_lock = threading.Lock()
_jvms: dict[_Surroundings, Jvm] = {}
_seen: Any = None
"""The session whose settings are in the environment."""


def connect() -> Jvm:
    """Return the JVM of this process; start it if need be. PlanError if there can be none."""
    surroundings = _look_around()
    with _lock:
        if surroundings not in _jvms:
            _jvms[surroundings] = _open(surroundings)
        return _jvms[surroundings]


def disconnect(jvm: Jvm) -> None:
    """Forget a JVM that has not answered: the next `connect` finds or starts another."""
    with _lock:
        for surroundings in [key for key, each in _jvms.items() if each is jvm]:
            del _jvms[surroundings]
    jvm.close()


def _forget_all() -> None:
    global _lock
    _lock = threading.Lock()  # Another thread of the parent may have held it.
    for jvm in _jvms.values():
        jvm.give_to_parent()
    _jvms.clear()


os.register_at_fork(after_in_child=_forget_all)


def _find_settings() -> str:
    """Return the settings of the session, in a driver, or those that its driver has passed on."""
    global _seen
    spark = sys.modules.get("pyspark")
    context = None if spark is None else spark.SparkContext._active_spark_context
    if context is not None and context is not _seen:
        given = {
            name: value
            for name, value in context.getConf().getAll()
            if name.startswith(_PREFIX) or name == _JARS
        }
        settings = json.dumps(given, sort_keys=True)
        # Python workers that start from now on have it, and so have the slots that they start.
        context.environment[VARIABLE] = settings
        # For this process it outlives the session.
        os.environ[VARIABLE] = settings
        _seen = context
    return os.environ.get(VARIABLE, "{}")


def _look_around() -> _Surroundings:
    names = sorted(name for name in os.environ if name in _READ or name.startswith("HADOOP_"))
    return _Surroundings(_find_settings(), tuple((name, os.environ[name]) for name in names))


def _home(surroundings: _Surroundings, class_path: str) -> Path:
    parts = json.dumps([*surroundings, class_path])
    return runtime_root() / f"hadoop-{hashlib.sha256(parts.encode()).hexdigest()[:12]}"


def _open(surroundings: _Surroundings) -> Jvm:
    from py4j.java_gateway import GatewayParameters, JavaGateway
    from py4j.protocol import Py4JError

    given = json.loads(surroundings.settings)
    class_path = os.pathsep.join(_class_path(given))
    with contextlib.ExitStack() as held:
        home = _home(surroundings, class_path)
        held.enter_context(hold_made(home))
        address = _join(home, held)
        if address is None:
            with (home / "lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                # Another process may have started it meanwhile.
                address = _join(home, held) or _start(home, held, class_path)
        gateway = JavaGateway(
            gateway_parameters=GatewayParameters(
                port=address["port"], auth_token=address["token"], auto_convert=True
            )
        )
        try:
            settings = gateway.jvm.org.apache.hadoop.conf.Configuration()
            for name, value in given.items():
                if name.startswith(_PREFIX):
                    settings.set(name.removeprefix(_PREFIX), value)
            return Jvm(gateway, _hasten(settings), held.pop_all())
        except Py4JError as error:
            # It was ending, as its last user had ended.
            raise ConnectionAbortedError(errno.ECONNABORTED, f"Hadoop's JVM: {error}") from error
        except TypeError:  # py4j takes the name of a class that is not there for a package.
            raise PlanError(
                f"the JVM of Hadoop's client has no classes of Hadoop\n  searched: {class_path}\n"
                "  next: set SPARK_HOME to a Spark that has them, or CLASSPATH"
            ) from None


def _hasten(settings: Any) -> Any:
    """Let Hadoop's client give up early where its user has not set it: we try again ourselves."""
    settings.setIfUnset("dfs.client.failover.max.attempts", "2")
    for name in ("ipc.client.connect.max.retries", "ipc.client.connect.max.retries.on.timeouts"):
        if settings.get(name) in ("10", "45"):  # As shipped.
            settings.set(name, "2")
    return settings


def _join(home: Path, held: contextlib.ExitStack) -> dict[str, Any] | None:
    """Hold the pipe of a JVM that lives, and return its address; None if none does."""
    try:
        pipe = os.open(home / "alive", os.O_WRONLY | os.O_NONBLOCK)
    except OSError as error:
        if error.errno in (errno.ENXIO, errno.ENOENT):
            return None
        raise
    try:
        address: dict[str, Any] = json.loads((home / "address").read_text())
    except (OSError, ValueError):
        os.close(pipe)
        return None  # It is being started.
    held.callback(os.close, pipe)
    return address


def _start(home: Path, held: contextlib.ExitStack, class_path: str) -> dict[str, Any]:
    for name in ("alive", "address"):
        (home / name).unlink(missing_ok=True)
    os.mkfifo(home / "alive", 0o600)
    end = os.open(home / "alive", os.O_RDONLY | os.O_NONBLOCK)
    try:
        held.callback(os.close, os.open(home / "alive", os.O_WRONLY))
        os.set_blocking(end, True)
        with (home / "jvm.log").open("wb") as log:
            child = subprocess.Popen(
                _command(class_path), stdin=end, stdout=subprocess.PIPE, stderr=log,
                start_new_session=True,
            )  # fmt: skip
    finally:
        os.close(end)
    assert child.stdout is not None
    with child.stdout as out:
        lines = _first_lines(out.fileno(), 2)
    if len(lines) < 2:
        child.kill()
        child.wait()
        raise PlanError(
            "the JVM of Hadoop's client does not start\n"
            f"  found: {_end_of(home / 'jvm.log')}\n"
            f"  next: see {home / 'jvm.log'}; it needs Java 17 or later, and {HADOOP_JVM_MB} MiB"
        )
    # It is collected when it ends, if this process is still there then.
    threading.Thread(target=child.wait, daemon=True, name="cairn-hadoop").start()
    address = {"port": int(lines[0]), "token": lines[1]}
    new = home / "address.new"
    new.touch(mode=0o600)
    new.write_text(json.dumps(address))
    new.replace(home / "address")
    return address


def _command(class_path: str) -> list[str]:
    java = find_java().partition(": ")[0]
    if not os.path.isfile(java):  # That from PyPI is named by its home.
        java = os.path.join(os.environ["JAVA_HOME"], "bin", "java")
    server = ["py4j.GatewayServer", "--die-on-broken-pipe", "--enable-auth", "0"]
    return [java, *_OPTIONS, "-cp", class_path, *server]


def _class_path(given: dict[str, str]) -> Iterator[str]:
    yield from filter(None, (os.environ.get("HADOOP_CONF_DIR"), os.environ.get("CLASSPATH")))
    for jar in filter(None, given.get(_JARS, "").split(",")):
        # Executors have a copy in their working folder.
        for place in (jar.removeprefix("file://").removeprefix("file:"), os.path.basename(jar)):
            if os.path.exists(place):
                yield os.path.abspath(place)
                break
    from pyspark.find_spark_home import _find_spark_home

    yield os.path.join(_find_spark_home(), "jars", "*")


def _first_lines(descriptor: int, count: int) -> list[str]:
    deadline = time.monotonic() + _START_S_MAX
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    read = b""
    while read.count(b"\n") < count:
        left_ms = 1000 * (deadline - time.monotonic())
        if left_ms <= 0 or not poll.poll(left_ms):
            break
        chunk = os.read(descriptor, 4096)
        if not chunk:
            break
        read += chunk
    return read.decode(errors="replace").split("\n")[:count] if read.count(b"\n") >= count else []


def _end_of(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()
    return lines[-1] if lines else "nothing in its log"


__all__ = ["VARIABLE", "Jvm", "connect", "disconnect"]
