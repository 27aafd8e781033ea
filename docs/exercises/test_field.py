"""What the first exercise of docs/code.md has to pass, for each of the three fields."""

import pytest

from tests.support.server import STORED
from tests.support.wire import new_plant

OLD = {"id": 1, "name": "Sequoia"}  # stored before there was a field
VALUES = {"height": [1.1, 0, 12], "evergreen": [False, True], "year": [0, 2024]}
MISTAKES = {
    "height": ["1", True, None, -1, 10**400, [1.5]],
    "evergreen": [0, 1, "true", None],
    "year": ["2024", True, None, -1, 2024.5, 10**20],
}


@pytest.mark.parametrize("field", VALUES)
def test_a_plant_may_have_the_field(server, field):
    """It is stored and answered as it was sent, and the same plant again is a success."""
    for value in VALUES[field]:
        for plant in (new_plant(**{field: value}), OLD) * 2:
            status, answer = server.post(plant)
            assert (status, {"id": plant["id"], **answer}) == (STORED, plant)
            assert type(answer.get(field)) in (type(plant.get(field)), float)


@pytest.mark.parametrize("field", VALUES)
def test_a_plant_with_another_value_or_none_is_another_plant(server, field):
    """So it is a conflict; also for a plant that was stored before there was a field."""
    first, second, *_ = VALUES[field]
    plant = new_plant(**{field: first})
    without = {name: plant[name] for name in ("id", "name")}
    assert server.post(plant)[0] == STORED
    for other in ({**plant, field: second}, without, {**OLD, field: first}):
        assert server.post(other)[0] == 409
    assert server.post(plant)[0] == STORED


@pytest.mark.parametrize("field", VALUES)
def test_what_is_not_of_the_type_is_refused(server, field):
    """The message says where the mistake is."""
    for value in MISTAKES[field]:
        status, answer = server.post(new_plant(**{field: value}))
        assert status == 400
        assert answer["message"].startswith(f"{field}: must be ")
