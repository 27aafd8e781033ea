"""What these tests share beyond what all do."""

from pathlib import Path

import pytest
from hypothesis.configuration import set_hypothesis_home_dir


@pytest.fixture(autouse=True, scope="session")
def hypothesis_home(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Where hypothesis keeps its tables: not in the folder of the project."""
    set_hypothesis_home_dir(tmp_path_factory.mktemp("hypothesis"))


@pytest.fixture
def url(database: Path) -> str:
    """SQLite alone: what is tested here is what clients see."""
    return f"sqlite:///{database}"
