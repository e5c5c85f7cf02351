"""Hosts on this machine, each with its own network, /tmp, /dev/shm and process ids.

    with Hosts(shared) as hosts:
        host = hosts.add("h1")
        process = host.run(["python", "-m", "…"])      # as a process of that host
        host.cut(); host.heal()                        # its network
        host.kill()                                    # all its processes at once

A host is a process in network, mount, PID and UTS namespaces. A bridge connects the hosts with
each other and with this process, and with nothing else. The repository, this Python and `shared`
are at their usual paths on every host; /tmp and /dev/shm are not shared.

Always true here:
- nothing is left after the block, whatever failed in it: the kernel ends all processes of a
  host with its first one, and the network with them;
- links that a killed test run has left are removed by the next one.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parents[2]
_LINK = re.compile(r"ctb(\d+)(h\d+)?")

# Run by the first process of a host. It becomes `first`, which keeps its number, 1.
_BECOME_HOST = """
set -e
mount --make-rprivate /
mount -t proc proc /proc
number=10
for folder in {visible}; do
  eval "exec $number<$folder"
  number=$((number + 1))
done
mount -t tmpfs tmpfs /tmp
mount -t tmpfs tmpfs /dev/shm
number=10
for folder in {visible}; do
  mkdir -p "$folder"
  mount --no-canonicalize --bind /proc/self/fd/$number "$folder"
  eval "exec $number<&-"
  number=$((number + 1))
done
cd {root}
hostname {name}
printf '127.0.0.1 localhost\\n{address} {name}\\n' >/tmp/.hosts
mount --bind /tmp/.hosts /etc/hosts
until ip link show eth0 >/dev/null 2>&1; do sleep 0.02; done
ip link set lo up
ip address add {address}/24 dev eth0
ip link set eth0 up
echo ready
exec {first}
"""
_UNSHARE = ("unshare", "--net", "--mount", "--pid", "--uts", "--fork")
_PR_SET_PDEATHSIG = 1
# Collects what is left to it, as an init does.
_INIT = ["bash", "-c", "while :; do sleep 3600 & wait; done"]


@functools.cache
def why_no_hosts() -> str | None:
    """Return why hosts cannot be made here; None if they can."""
    name = f"ctp{os.getpid()}"
    try:
        _ip("link", "add", name, "type", "bridge")
        _ip("link", "delete", name)
        command = [*_UNSHARE, "mount", "-t", "tmpfs", "tmpfs", "/dev/shm"]
        subprocess.run(command, check=True, capture_output=True, timeout=20)
    except (OSError, subprocess.SubprocessError) as error:
        return f"network, mount and PID namespaces cannot be made here: {error}"
    return None


class Host:
    """One host; see the module."""

    def __init__(
        self,
        name: str,
        number: int,
        bridge: str,
        network: str,
        shared: Path,
        environment: Mapping[str, str],
        first: Sequence[str] | None = None,
    ) -> None:
        """`first` is its process 1; without it an init that does nothing."""
        self.name = name
        self.address = f"{network}.{number}"
        self._link = f"{bridge}h{number}"
        self._environment = dict(environment)
        self.log = shared / f"{name}.log"
        self._log = self.log.open("ab")
        visible = {str(path) for path in (ROOT, shared, Path(sys.prefix))}
        script = _BECOME_HOST.format(
            visible=" ".join(shlex.quote(path) for path in sorted(visible)),
            root=shlex.quote(str(ROOT)),
            name=name,
            address=self.address,
            first=shlex.join(_INIT if first is None else first),
        )
        self._outside = subprocess.Popen(
            [*_UNSHARE, "--kill-child", "bash", "-c", script],
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            start_new_session=True,
            preexec_fn=_end_with_parent,
        )
        try:
            self._connect(bridge)
            assert self._outside.stdout is not None
            line = self._outside.stdout.readline()
            assert line == "ready\n", f"host {name} did not start: {self.log.read_text()}"
            self._first = psutil.Process(self._outside.pid).children()[0]
        except BaseException:
            self.kill()
            raise

    def _connect(self, bridge: str) -> None:
        # The process has its own network before it runs anything.
        own = os.readlink("/proc/self/ns/net")
        while os.readlink(f"/proc/{self._outside.pid}/ns/net") == own:
            assert self._outside.poll() is None, f"host {self.name} did not start"
            time.sleep(0.01)
        peer = ("peer", "name", "eth0", "netns", str(self._outside.pid))
        _ip("link", "add", self._link, "type", "veth", *peer)
        _ip("link", "set", self._link, "master", bridge, "up")

    def run(self, command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Start a process on this host; its output goes to the log of the host, unless given."""
        environment = self._environment | options.pop("env", {})
        target = f"nsenter --target {self._first.pid} --mount --pid --net --uts --wd={ROOT} --"
        given: dict[str, Any] = {"stdout": self._log, "stderr": self._log, **options}
        return subprocess.Popen(
            [*target.split(), *command], env=environment, stdin=subprocess.DEVNULL, **given
        )

    def processes(self) -> list[psutil.Process]:
        """Return the processes that live on this host, seen from outside."""
        try:
            namespace = os.readlink(f"/proc/{self._first.pid}/ns/pid")
        except OSError:
            return []
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(OSError, psutil.Error):
                is_here = os.readlink(f"/proc/{process.pid}/ns/pid") == namespace
                if is_here and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    @property
    def first(self) -> psutil.Process:
        """The process that has the number 1 on this host."""
        return self._first

    def running(self, *words: str) -> list[psutil.Process]:
        """Return its processes whose command has all these words."""
        found = []
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                command = " ".join([process.name(), *process.cmdline()])
                if all(word in command for word in words):
                    found.append(process)
        return found

    def cut(self) -> None:
        """Disconnect the host: packets to and from it are lost."""
        _ip("link", "set", self._link, "down")

    def heal(self) -> None:
        _ip("link", "set", self._link, "up")

    def kill(self) -> None:
        """End all processes of the host at once, as a power cut does."""
        with contextlib.suppress(AttributeError, psutil.Error):
            self._first.kill()
        self._outside.kill()
        self._outside.wait()
        if self._outside.stdout is not None:
            self._outside.stdout.close()
        if not self._log.closed:
            self._log.close()
        # It goes with the network of the host, a little later; the next one may need the name.
        with contextlib.suppress(subprocess.CalledProcessError):
            _ip("link", "delete", self._link)


class Hosts:
    """A bridge and its hosts."""

    def __init__(self, shared: Path, environment: Mapping[str, str] | None = None) -> None:
        self.shared = shared
        self.environment = dict(os.environ if environment is None else environment)
        self._bridge = f"ctb{os.getpid()}"
        # One cluster per process at a time, and a network for each of several.
        self._network = f"10.{190 + os.getpid() // 250 % 50}.{os.getpid() % 250}"
        self.address = f"{self._network}.1"
        """The address of this process for the hosts."""
        self.hosts: dict[str, Host] = {}
        self._numbers = 1

    def __enter__(self) -> Hosts:
        _remove_stale()
        _ip("link", "add", self._bridge, "type", "bridge")
        try:
            _ip("address", "add", f"{self.address}/24", "dev", self._bridge)
            _ip("link", "set", self._bridge, "up")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        for host in self.hosts.values():
            host.kill()
        with contextlib.suppress(subprocess.CalledProcessError):
            _ip("link", "delete", self._bridge)

    def next_address(self) -> str:
        return f"{self._network}.{self._numbers + 1}"

    def add(self, name: str, first: Sequence[str] | None = None) -> Host:
        self._numbers += 1
        self.hosts[name] = Host(
            name,
            self._numbers,
            self._bridge,
            self._network,
            self.shared,
            self.environment,
            first,
        )
        return self.hosts[name]


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _remove_stale() -> None:
    for name in os.listdir("/sys/class/net"):
        match = _LINK.fullmatch(name)
        if match and not psutil.pid_exists(int(match[1])):
            with contextlib.suppress(subprocess.CalledProcessError):
                _ip("link", "delete", name)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True, timeout=20)
