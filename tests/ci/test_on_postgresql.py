"""The interface and the storage once more, on PostgreSQL."""

from tests.ci.test_garbage import (
    test_what_is_a_plant_is_stored_and_answered_exactly,  # noqa: F401
)
from tests.support.on_postgresql import *  # noqa: F403
from tests.test_app import *  # noqa: F403
from tests.test_storage import *  # noqa: F403
