"""What these tests share beyond what all do."""

from pathlib import Path

import pytest


@pytest.fixture
def url(database: Path) -> str:
    """SQLite alone: what is tested here is what clients see."""
    return f"sqlite:///{database}"
