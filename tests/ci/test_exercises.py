"""docs/exercises/field.patch is a solution of the first exercise in docs/code.md."""

import contextlib
import json
import shutil
import subprocess
import sys

import psycopg
import pytest

from schemas import parse_new_plant
from start import get_storage
from tests.support.readme import block
from tests.support.server import GUNICORN, HEADERS, ROOT

OLD = '{"id": 1, "name": "n"}'  # stored before the patch
PLANTS = (
    '{"id": 7, "name": "n", "height": 1.10000000000000000001, "evergreen": true, "year": 2024}',
    '{"id": 8, "name": "n", "tag": "t", "height": 0, "evergreen": false, "year": 0}',
)
CHANGES = ("1.1", "2.1"), ("true", "false"), ("2024", "2025")
MISTAKES = ("true", "1"), ("2024", "true"), ("2024", "1.5"), ("1.1", "1e400"), ("1.1", "9" * 400)


@pytest.mark.parametrize("engine", ["url", "postgresql_url"])
def test_a_plant_may_have_a_number_a_boolean_and_an_integer(serve, tmp_path, request, engine):
    """Each is stored, answered, compared, dumped and loaded, beside plants of an older version."""
    for source in (*ROOT.glob("*.py"), ROOT / "schemas", ROOT / "static"):
        (shutil.copytree if source.is_dir() else shutil.copy)(source, tmp_path / source.name)
    patch = ["patch", "-p1", "--fuzz=0", "-i", ROOT / "docs/exercises/field.patch"]
    subprocess.run(patch, cwd=tmp_path, check=True)
    url = request.getfixturevalue(engine)
    with contextlib.closing(get_storage(url)) as storage:
        storage.add(parse_new_plant(OLD.encode()))
    if engine == "postgresql_url":
        with psycopg.connect(url) as connection:
            connection.execute(block("sql", "ALTER TABLE plants ADD"))
    command = ["env", f"--chdir={tmp_path}", GUNICORN, "--bind=127.0.0.1:0"]
    server = serve(command=command, DATABASE_URL=url)

    def post(plant: str) -> int:
        status, _, answer = server.request("POST", "/plants", plant, HEADERS)
        assert status != 200 or {"id": json.loads(plant)["id"], **answer} == json.loads(plant)
        return status

    assert [post(plant) for plant in (*PLANTS, OLD) * 2] == [200] * 6
    assert [post(PLANTS[0].replace(*change)) for change in CHANGES] == [409] * 3
    assert [post(PLANTS[0].replace(*mistake)) for mistake in MISTAKES] == [400] * 5

    def run(command: str, url: str, lines: str = "") -> str:
        transfer = [sys.executable, "transfer.py", command, url]
        return subprocess.check_output(transfer, cwd=tmp_path, text=True, input=lines)

    lines = run("dump", url)
    assert [json.loads(line) for line in lines.splitlines()] == [*map(json.loads, (OLD, *PLANTS))]
    assert '"height": 0.0, "evergreen": false, "year": 0}' in lines
    assert run("load", url, lines).startswith("0 new, 3 there already")
    elsewhere = f"sqlite:///{tmp_path}/elsewhere.db"
    assert run("load", elsewhere, lines).startswith("3 new")
    assert run("dump", elsewhere) == lines
