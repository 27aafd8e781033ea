"""The interface and the storage once more, on PostgreSQL."""

from tests.support.on_postgresql import *  # noqa: F403
from tests.test_app import *  # noqa: F403
from tests.test_storage import *  # noqa: F403
