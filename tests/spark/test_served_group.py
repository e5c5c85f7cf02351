"""A group of two drivers over HTTP: one leads, the other waits and serves meanwhile."""

from __future__ import annotations

import json
import socket
import threading
import time
import urllib.request
from typing import Any

import cairn
from cairn import Serve
from tests.spark.programs.ledger import build, payments
from tests.spark.support import Input
from tests.unit.cli.command_line import call, json_of

CONTROL = "a-token-for-control"


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def read(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=20) as answer:
        return json.load(answer)


def await_standby(url: str) -> Any:
    """Wait until the driver at `url` is seen to wait, by itself and by the leader."""
    deadline = time.monotonic() + 60
    while True:
        try:
            found = read(f"{url}/api/leader")
            if found["group"]["leader"] and found["group"]["standbys"]:
                return found
        except OSError:
            pass  # Its Spark may not be ready.
        assert time.monotonic() < deadline, "no standby came"
        time.sleep(0.1)


def test_a_standby_serves_while_it_waits_and_gets_the_lead_by_a_hand_over(
    spark, tmp_path, monkeypatch
):
    monkeypatch.setenv("CAIRN_CONTROL_TOKEN", CONTROL)
    files = payments(2)
    source = Input(tmp_path / "in", "id bigint, account string, amount bigint")
    ports = [free_port(), free_port()]
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    started: list[Any] = []

    def start(at: int) -> Any:
        serve = Serve(f"127.0.0.1:{ports[at]}", control_token=CONTROL, flight=False)
        run = build(spark, source.folder, tmp_path).start(
            checkpoint=str(tmp_path / "checkpoint"), ha="store:?lease=6s", parallelism=1,
            trigger="50 milliseconds", serve=serve,
        )  # fmt: skip
        started.append(run)
        return run

    first = start(0)
    waiting = threading.Thread(target=start, args=(1,))
    try:
        source.add(*files[0])
        first.process_all_available()
        waiting.start()
        seen = await_standby(urls[1])
        assert (seen["status"], seen["is_leader"], len(started)) == ("standby", False, 1)
        assert seen["group"]["leader"]["url"] == urls[0]
        with urllib.request.urlopen(f"{urls[1]}/metrics", timeout=20) as answer:
            assert 'cairn_is_leader{job_name="ledger"} 0.0' in answer.read().decode()
        with urllib.request.urlopen(f"{urls[1]}/api/job", timeout=20) as answer:
            assert answer.url == f"{urls[0]}/api/job", "readers are sent to the leader"
        with cairn.client(urls[::-1]) as job:
            assert job.job()["status"] in ("running", "idle") and job.url == urls[0]
            led = json_of("leader", tmp_path / "checkpoint")
            assert led["group"]["leader"]["url"] == urls[0]
            assert [each["url"] for each in led["group"]["standbys"]] == [urls[1]]
            handed = call("handover", *urls)
            assert handed.exit_code == 0 and urls[1] in handed.stdout, handed.stderr
            waiting.join(60)
            second = started[1]
            source.add(*files[1])
            second.process_all_available()
            assert job.epochs(limit=1)[0].epoch == second.metrics().epoch and job.url == urls[1]
            assert read(f"{urls[0]}/api/leader")["waiting"] is True
    finally:
        for run in started[::-1]:
            run.stop()
