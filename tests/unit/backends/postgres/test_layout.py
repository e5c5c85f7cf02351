"""The tables of a job, also those that an earlier version has made."""

from __future__ import annotations

from pathlib import Path

import psycopg

from cairn.backends.versioned.contract import place_of
from cairn.ids import new_id
from cairn.types.codec import codec
from tests.backends import backend_name, make, write_base


def test_tables_that_do_not_note_claims_are_taken_over(tmp_path: Path) -> None:
    job_id = new_id()

    def write(name: str) -> None:
        backend = make("postgres", str(tmp_path / name), 1 << 20, job_id=job_id, operator="op")
        backend.open_state("s", "value", codec("long"), codec("long"), None)
        backend.rows("s", 0).promote({1: 2})
        write_base(backend, groups=range(1))
        backend.close()

    write("before")
    with psycopg.connect(backend_name("postgres"), autocommit=True) as connection:
        connection.execute(f"alter table {place_of(job_id)}.ranges drop column claimed".encode())
        write("after")
        rows = connection.execute(f"select claimed from {place_of(job_id)}.ranges".encode())
        ((claimed,),) = rows.fetchall()
    assert claimed > 0
