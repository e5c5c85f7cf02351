"""Credentials that expire are asked for again, in a store that stays open."""

from __future__ import annotations

import pickle
import time
from collections.abc import Iterator
from typing import Any

import pytest

from cairn.errors import PlanError
from cairn.storage.credentials import VARIABLE, provider_for
from cairn.storage.store import open_store
from tests.s3 import LIFE_MS, S3, s3_server


@pytest.fixture(scope="module")
def s3() -> Iterator[S3]:
    with s3_server() as server, server.in_environment():
        yield server


def no_provider(url: str) -> None:
    return None


def of_url(url: str) -> Any:
    return lambda: {"url": url}


def a_dict(url: str) -> Any:
    return {}


def broken(url: str) -> Any:
    raise OSError("no metadata service")


def test_an_open_store_outlives_the_keys_it_began_with(
    s3: S3, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "until-1")
    with pytest.raises(Exception, match="Expired"):
        open_store(f"{s3.url}/keys").put("a", b"1")
    monkeypatch.setenv(VARIABLE, "tests.s3:expiring")
    store = open_store(f"{s3.url}/keys")
    assert store.put_if_absent("a", b"1")
    time.sleep(LIFE_MS / 1000 + 0.1)
    assert not store.put_if_absent("a", b"2")
    store.put("b", b"3")
    assert pickle.loads(pickle.dumps(store)).get("a") == b"1", "as a slot opens it"
    assert [found.path for found in store.list()] == ["a", "b"]


def test_keys_in_the_options_go_before_a_provider(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, f"{__name__}:of_url")
    assert provider_for("s3://b/x", {"aws_region": "eu"})() == {"url": "s3://b/x"}
    assert provider_for("s3://b/x", {"aws_access_key_id": "k"}) is None
    assert provider_for("gs://b/x", {"google_application_credentials": "key.json"}) is None
    monkeypatch.setenv(VARIABLE, f"{__name__}:no_provider")
    assert provider_for("s3://b/x", {}) is None


@pytest.mark.parametrize(
    ("name", "url"),
    [("boto3", "gs://b/x"), ("boto3", "az://b/x"), ("google", "s3://b/x"), ("azure", "s3a://b/x")],
)
def test_a_provider_of_one_cloud_leaves_the_stores_of_others_alone(
    name: str, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, name)
    assert provider_for(url, {}) is None


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("nowhere.at.all:f", "cannot be loaded"),
        ("json", "expected: module:function, or one of boto3, google, azure"),
        (f"{__name__}:gone", "cannot be loaded"),
        (f"{__name__}:a_dict", "return the function itself"),
        (f"{__name__}:broken", "found no credentials on .*: OSError: no metadata service"),
    ],
)
def test_a_provider_that_cannot_serve_is_refused(
    name: str, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, name)
    with pytest.raises(PlanError, match=problem):
        open_store("s3://bucket/x")


def test_boto3_reads_the_login_of_this_machine(s3: S3, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("boto3")
    monkeypatch.setenv(VARIABLE, "boto3")
    store = open_store(f"{s3.url}/boto3")
    store.put("a", b"1")
    assert store.get("a") == b"1"
