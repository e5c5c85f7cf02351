"""The address of a database, and what never shows a password."""

from __future__ import annotations

import msgspec
import pytest

from cairn.backends import make_backend
from cairn.backends.postgres.link import Link, address_of, describe, parameters_of
from cairn.errors import EpochError, PlanError
from cairn.protocol.spec import JobSpec
from tests.backends import backend_name, write_base

URL = "postgresql://me:s3cret@127.0.0.1:1/state?connect_timeout=2"


def test_an_address_has_no_password() -> None:
    address = address_of(parameters_of(URL))
    assert address == {
        "connect_timeout": "2", "dbname": "state", "host": "127.0.0.1", "port": "1", "user": "me"
    }  # fmt: skip
    assert describe(address) == "postgresql://127.0.0.1:1/state"


def test_the_error_of_a_database_that_is_away_has_no_password() -> None:
    link = Link(address_of(parameters_of(URL)), "test")
    with pytest.raises(EpochError, match="cannot be reached") as raised:
        link.run(lambda connection: connection.execute("select 1"))
    assert raised.value.facts["is_away"] is True
    shown = f"{raised.value!r} {raised.value.facts} {raised.value.__cause__!r}"
    assert "s3cret" not in shown


def test_a_url_that_cannot_be_read_is_not_shown() -> None:
    with pytest.raises(PlanError, match="cannot be read") as raised:
        parameters_of("postgresql://me:s3cret@[host/db")
    assert "s3cret" not in str(raised.value)


def test_a_job_does_not_show_its_url() -> None:
    spec = JobSpec("id", "name", 8, "memory:", URL, ())
    assert "s3cret" not in repr(spec)


def test_a_variable_may_have_the_url(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    with pytest.raises(PlanError, match="STATE_URL, which is not set"):
        make_backend("env:STATE_URL", f"{tmp_path}/state")
    monkeypatch.setenv("STATE_URL", backend_name("postgres"))
    backend = make_backend("env:STATE_URL", f"{tmp_path}/state")
    assert write_base(backend, groups=range(2)).format == "postgres"
    backend.close()


def test_the_index_of_a_base_has_no_password(tmp_path: object) -> None:
    url = backend_name("postgres").replace("postgres:@", "postgres:s3cret@")
    assert "s3cret" in url
    backend = make_backend(url, f"{tmp_path}/state")
    assert b"s3cret" not in msgspec.json.encode(backend.versions.address)  # type: ignore[attr-defined]
    backend.close()
