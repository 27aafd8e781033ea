"""PostgreSQL behind PgBouncer, as many platforms hand it out.

In transaction mode each transaction may get another session, which others have had before.
"""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator

import psycopg
import pytest

from tests.support.postgresql import USER
from tests.support.server import PATIENCE, Writers, wait_until

ROLE = "pooled"
NOTE_SETTINGS = """
    CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
        INSERT INTO seen SELECT current_setting('synchronous_commit'), pg_backend_pid();
        RETURN NEW;
    END $$;
    CREATE TABLE seen (setting text, session int);
    CREATE TRIGGER notes BEFORE INSERT ON plants FOR EACH ROW EXECUTE FUNCTION note()"""


@pytest.fixture(params=["session", "transaction"])
def pooler_url(postgresql, request) -> Iterator[str]:
    """The URL of a pooler, for a role whose commits do not wait for the disk."""
    if not (program := shutil.which("pgbouncer", path="/usr/sbin:/usr/bin")):
        pytest.skip("pgbouncer is not installed")
    name = f"pooled_{request.param}"
    with contextlib.suppress(psycopg.errors.DuplicateObject):
        postgresql.execute(f"CREATE ROLE {ROLE} LOGIN")
        postgresql.execute(f"ALTER ROLE {ROLE} SET synchronous_commit = off")
    postgresql.execute(f"CREATE DATABASE {name} OWNER {ROLE}")
    folder = postgresql.folder / name
    folder.mkdir()
    own = {"user": USER} if os.geteuid() == 0 else {}  # it refuses to run as root
    if own:
        shutil.chown(folder, USER)
    (folder / "users").write_text(f'"{ROLE}" ""\n')
    (folder / "settings").write_text(
        f"[databases]\n{name} = host={postgresql.folder}\n"
        f"[pgbouncer]\npool_mode = {request.param}\nunix_socket_dir = {folder}\n"
        f"auth_type = trust\nauth_file = {folder}/users\n"
        "listen_addr =\nlisten_port = 6432\nserver_lifetime = 1\ndefault_pool_size = 4\n"
    )
    with (folder / "log").open("wb") as log:
        pooler = subprocess.Popen([program, folder / "settings"], stderr=log, **own)
    try:
        wait_until((folder / ".s.PGSQL.6432").exists)
        yield f"postgresql:///{name}?host={folder}&port=6432&user={ROLE}"
    finally:
        pooler.kill()
        pooler.wait(PATIENCE)


def test_a_pooler_changes_nothing(serve, pooler_url):
    """Every plant is stored after a commit that waited, and no setting stays behind for others."""
    wanted = 3 if "transaction" in pooler_url else 1  # sessions: each lives for a second
    server = serve(DATABASE_URL=pooler_url)
    assert server.post({"id": -1, "name": "n"})[0] == 200
    with psycopg.connect(pooler_url, autocommit=True, prepare_threshold=None) as neighbour:
        neighbour.execute(NOTE_SETTINGS)
        sessions = "SELECT count(DISTINCT session) FROM seen"
        with Writers(server.port) as writers:
            for _ in range(200):
                neighbour.execute("SET synchronous_commit = off")
                assert writers.goes_on(50)
                assert server.post({"id": -1, "name": "n"})[0] == 200
                assert server.post({"id": -1, "name": "other"})[0] == 409
                if neighbour.execute(sessions).fetchone()[0] >= wanted:
                    break
        assert writers.answers.keys() == {200} and not writers.failures
        assert neighbour.execute("SELECT DISTINCT setting FROM seen").fetchall() == [("on",)]
        assert neighbour.execute("SHOW lock_timeout").fetchone() == ("0",)
        rows = neighbour.execute("SELECT id, name FROM plants WHERE id >= 0").fetchall()
    assert dict(rows).items() >= writers.acknowledged.items()
