"""Tests for a solution of the second exercise of docs/exercises.md, for each of its fields."""

import psycopg
import pytest

from tests.support.server import STORED, Server
from tests.support.wire import new_plant

OLD = {"id": 1, "name": "Sequoia"}  # stored before the table had the fields
VALUES = {"height": [1.1, 0, 12], "evergreen": [False, True], "year": [0, 2024]}
MISTAKES = {
    "height": ["1", True, None, -1, 10**400, [1.5]],
    "evergreen": [0, 1, "true", None],
    "year": ["2024", True, None, -1, 2024.5, 10**20],
}


@pytest.mark.parametrize("field", VALUES)
def test_a_plant_may_have_the_field(server, field):
    """It is stored and returned as it was sent, and a retry succeeds, even of an old plant."""
    for value in VALUES[field]:
        for plant in (new_plant(**{field: value}), OLD) * 2:
            status, stored = server.post(plant)
            assert (status, {"id": plant["id"], **stored}) == (STORED, plant)
            assert type(stored.get(field)) in (type(plant.get(field)), float)


@pytest.mark.parametrize("field", VALUES)
def test_a_plant_with_another_value_or_none_is_another_plant(server, field):
    """So it is a conflict, even if the plant was stored before the table had the fields."""
    first, second, *_ = VALUES[field]
    plant = new_plant(**{field: first})
    without = {name: plant[name] for name in ("id", "name")}
    assert server.post(plant)[0] == STORED
    for other in ({**plant, field: second}, without, {**OLD, field: first}):
        assert server.post(other)[0] == 409
    assert server.post(plant)[0] == STORED


@pytest.mark.parametrize("field", VALUES)
def test_a_value_of_a_wrong_type_or_size_is_refused(server, field):
    """The message says where the mistake is."""
    for value in MISTAKES[field]:
        status, error = server.post(new_plant(**{field: value}))
        assert status == 400
        assert error["message"].startswith(f"{field}: must be ")


@pytest.mark.parametrize("engine", ["sqlite", "postgresql"])
def test_a_new_database_has_the_fields(request, tmp_path, engine):
    """Nobody adds columns to it: the service itself makes the table."""
    url = f"sqlite:///{tmp_path}/plants.db"
    if engine == "postgresql":
        old = request.getfixturevalue("postgresql")
        with psycopg.connect(old, autocommit=True) as connection:
            connection.execute("CREATE DATABASE new")
        url = old.replace("///postgres?", "///new?")
    plant = new_plant(height=1.5, evergreen=True, year=2024)
    with Server(tmp_path, DATABASE_URL=url) as server:
        status, stored = server.post(plant)
    assert (status, {"id": plant["id"], **stored}) == (STORED, plant)
