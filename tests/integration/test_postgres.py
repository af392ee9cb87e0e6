"""Rows of a PostgreSQL database become shards: a real server, which this test starts."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

import cerebro
from cerebro.errors import InputError

adbc = pytest.importorskip("adbc_driver_postgresql.dbapi")

ROWS, WIDTH = 3000, 6
RNG = np.random.default_rng(4)
X = RNG.normal(size=(ROWS, WIDTH)).astype(np.float32)
Y = RNG.integers(0, 3, ROWS)
NAMES = [f"f{i}" for i in range(WIDTH)]


def programs() -> Path:
    """The folder of the server's programs, or skip."""
    found = shutil.which("initdb")
    folders = [Path(found).parent] if found else []
    folders += sorted(Path("/usr/lib/postgresql").glob("*/bin"))
    for folder in reversed(folders):
        if (folder / "initdb").exists():
            return folder
    pytest.skip("needs PostgreSQL's server programs (initdb, pg_ctl)")


@pytest.fixture(scope="module")
def uri(tmp_path_factory):
    """A server with its own folder and socket; it listens on no port."""
    folder = tmp_path_factory.mktemp("postgres")
    binaries, user = programs(), {}
    if os.geteuid() == 0:  # the server refuses to run as root
        import pwd

        try:
            owner = pwd.getpwnam("postgres")
        except KeyError:
            pytest.skip("needs a user 'postgres', because PostgreSQL does not run as root")
        user = {"user": owner.pw_uid, "group": owner.pw_gid, "extra_groups": []}
        for parent in [folder, *folder.parents]:
            if parent.is_relative_to(tmp_path_factory.getbasetemp().parent.parent):
                parent.chmod(parent.stat().st_mode | 0o011)
        os.chown(folder, owner.pw_uid, owner.pw_gid)

    def run(program, *arguments):
        subprocess.run(
            [binaries / program, "-D", folder / "data", *arguments],
            check=True, cwd=folder, stdout=subprocess.DEVNULL, **user,
        )  # fmt: skip

    sockets = folder / "s"
    sockets.mkdir(mode=0o777)
    sockets.chmod(0o777)
    run("initdb", "--username=test", "--auth=trust", "--no-sync", "--encoding=UTF8")
    run(
        "pg_ctl", "start", "-w", "-l", folder / "log", "-o",
        f"-c listen_addresses='' -c unix_socket_directories='{sockets}' -c fsync=off",
    )  # fmt: skip
    try:
        yield f"postgresql://test@/postgres?host={sockets}"
    finally:
        run("pg_ctl", "stop", "-w", "-m", "immediate")


@pytest.fixture(scope="module")
def table(uri):
    """The rows, inserted in another order than their keys', with a packed copy of the vector."""
    columns = ", ".join(f"{name} real" for name in NAMES)
    with adbc.connect(uri) as connection, connection.cursor() as cursor:
        cursor.execute(f"create table clicks (id bigint, {columns}, label bigint, packed bytea)")
        order = RNG.permutation(ROWS)
        import pyarrow as pa

        batch = pa.table(
            {
                "id": order,
                **{name: X[order, i] for i, name in enumerate(NAMES)},
                "label": Y[order],
                "packed": pa.array([X[i].tobytes() for i in order], pa.binary()),
            }
        )
        cursor.adbc_ingest("clicks", batch, mode="append")
        connection.commit()
    return "clicks"


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    return cerebro.shard({"x": X, "y": Y}, tmp_path_factory.mktemp("arrays") / "d", shards=3)


def query(uri, text, folder, **options):
    """Stream the rows of a query into shards."""
    with adbc.connect(uri) as connection, connection.cursor() as cursor:
        cursor.execute(text)
        return cerebro.shard(cursor.fetch_record_batch(), folder, **options)


COLUMNS = {"columns": {"x": NAMES, "y": "label"}, "shards": 3}


def test_a_query_is_streamed_into_shards(uri, table, expected, tmp_path):
    data = query(uri, f"select * from {table} order by id", tmp_path / "d", **COLUMNS)
    assert data.checksum == expected.checksum


def test_packed_vectors_are_read_as_they_are(uri, table, expected, tmp_path):
    text = f"select packed as x, label as y from {table} order by id"
    data = query(uri, text, tmp_path / "d", dtypes={"x": ("float32", (WIDTH,))}, shards=3)
    assert data.checksum == expected.checksum


def test_without_order_by_the_row_order_differs(uri, table, expected, tmp_path):
    """Why the page says ``order by``: a table has no order of its own."""
    data = query(uri, f"select * from {table}", tmp_path / "d", **COLUMNS)
    assert data.checksum != expected.checksum
    assert sorted(np.concatenate([data.shard(i)["y"] for i in range(3)])) == sorted(Y)


def test_nulls_are_refused_and_numeric_is_read_as_text(uri, table, tmp_path):
    with pytest.raises(InputError, match=r"'y'.*missing value"):
        query(uri, f"select nullif(label, 1) as y from {table} order by id", tmp_path / "d")
    few = f"from {table} where id < 3 order by id"
    text = query(uri, f"select id::numeric as y {few}", tmp_path / "text")
    assert text.classes["y"] == ["0", "1", "2"]
    cast = query(uri, f"select id::numeric::real as y {few}", tmp_path / "cast")
    assert cast.columns["y"].dtype == "float32"


def test_copy_gives_the_same_shards(uri, table, expected, tmp_path):
    """The way without a driver: COPY to a CSV file, with what comes with the server."""
    host = uri.partition("host=")[2]
    columns = ", ".join([*NAMES, "label"])
    with (tmp_path / "rows.csv").open("wb") as file:
        subprocess.run(
            [
                programs() / "psql", "-h", host, "-U", "test", "-d", "postgres", "-v",
                "ON_ERROR_STOP=1", "-c",
                f"copy (select {columns} from {table} order by id) to stdout (format csv, header)",
            ],
            check=True, stdout=file,
        )  # fmt: skip
    data = cerebro.shard(
        tmp_path / "rows.csv",
        tmp_path / "d",
        columns={"x": NAMES, "y": "label"},
        dtypes={"x": "float32"},
        shards=3,
    )
    assert data.checksum == expected.checksum
