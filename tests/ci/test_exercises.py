"""docs/exercises/field.patch is a solution of the first exercise in docs/code.md."""

import json
import shutil
import subprocess
import sys

import psycopg
import pytest

from tests.support.pages import block
from tests.support.server import HERE, ROOT

OLD = {"id": 1, "name": "n"}  # stored before the patch
PLANT = {"id": 7, "name": "n", "height": 1.1, "evergreen": True, "year": 2024}
OTHER = {"id": 8, "name": "n", "tag": "t", "height": 0.0, "evergreen": False, "year": 0}
CHANGES = [{"height": 1}, {"evergreen": False}, {"year": 2025}]
MISTAKES = [{"height": 10**400}, {"evergreen": 1}, {"year": True}, {"year": 1.5}]


@pytest.mark.parametrize("engine", ["url", "postgresql_url"])
def test_a_plant_may_have_a_number_a_boolean_and_an_integer(serve, tmp_path, request, engine):
    """Each is stored, answered, compared, dumped and loaded, beside plants of an older version."""
    copy, url = tmp_path / "copy", request.getfixturevalue(engine)
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".*", "plants.db*", "tests"))
    transfer, there = f"'{sys.executable}' transfer.py", "sqlite:///elsewhere.db"
    begin = f"{transfer} load '{url}' && patch -p1 --fuzz=0 -i docs/exercises/field.patch"
    subprocess.run(begin, shell=True, cwd=copy, check=True, text=True, input=json.dumps(OLD))
    if engine == "postgresql_url":
        with psycopg.connect(url) as connection:
            connection.execute(block("sql", "ALTER TABLE plants ADD"))
    server = serve(command=["env", f"--chdir={copy}", *HERE], DATABASE_URL=url)
    for plant in [OLD, PLANT, OTHER] * 2:
        status, answer = server.post(plant)
        assert (status, {"id": plant["id"], **answer}) == (200, plant)
    assert [server.post({**PLANT, **change})[0] for change in CHANGES] == [409] * len(CHANGES)
    assert [server.post({**PLANT, **each})[0] for each in MISTAKES] == [400] * len(MISTAKES)
    move = f"{transfer} dump '{url}' | {transfer} load {there} && {transfer} dump {there}"
    printed = subprocess.check_output(move, shell=True, cwd=copy, text=True)
    assert printed.splitlines() == ["3 stored, 0 refused", *map(json.dumps, (OLD, PLANT, OTHER))]
