"""Other users of the host: what they can lock, and what they may load."""

import contextlib
import fcntl
import multiprocessing
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from schemas import Plant
from start import get_storage
from tests.support.server import HERE, PATIENCE
from tests.support.users import NOBODY, open_folder, run_as_nobody
from transfer import main

FORK = multiprocessing.get_context("fork")


@pytest.fixture
def database() -> Iterator[Path]:
    """A file of root's in a folder that everybody may read."""
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    with open_folder() as folder:
        folder.chmod(0o755)
        yield folder / "plants.db"


def mode_and_owner(file: Path) -> tuple[int, int, int]:
    """The rights to a file, and the numbers of its owner and group."""
    found = file.stat()
    return stat.S_IMODE(found.st_mode), found.st_uid, found.st_gid


def test_nobody_can_keep_the_service_from_writing(storage, database):
    """A user who locks all that he may open, the folder too, keeps nobody waiting."""
    storage.add(Plant(1, "one"))
    is_locked, is_over = FORK.Event(), FORK.Event()

    def lock_all() -> None:
        for path in (database.parent, *database.parent.iterdir()):
            with contextlib.suppress(PermissionError):
                opened = os.open(path, os.O_RDONLY)
                fcntl.flock(opened, fcntl.LOCK_EX)
                fcntl.lockf(opened, fcntl.LOCK_SH)  # SQLite's own are of this kind
        is_locked.set()
        assert is_over.wait(PATIENCE)

    neighbour = FORK.Process(target=run_as_nobody, args=[lock_all])
    neighbour.start()
    try:
        assert is_locked.wait(PATIENCE)
        storage.add(Plant(2, "two"))
    finally:
        is_over.set()
        neighbour.join(PATIENCE)


def test_who_runs_the_workers_makes_the_files(serve, database):
    """A first start as root, with --user, in a folder that anybody may write."""
    database.parent.chmod(0o777)
    # The rights to read go on, for the code may be in a folder of root's; those to write do not.
    bound = ["setpriv", "--securebits=+no_setuid_fixup", "--bounding-set=-dac_override"]
    url, user = f"sqlite:///{database}", ["--user", "nobody", "--group", f"{NOBODY}"]
    assert serve(command=[*bound, *HERE, *user], DATABASE_URL=url).post({"id": 7, "name": "n"}) == (
        200,
        {"name": "n"},
    )
    for file in database.parent.iterdir():
        assert mode_and_owner(file) == (0o600, NOBODY, NOBODY), file


def load_as_nobody(url: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> tuple[bool, str]:
    """Load a plant; return whether that succeeded, and what was said."""
    lines = tmp_path / "lines"
    lines.write_text('{"id": 7, "name": "Monstera"}\n')
    with lines.open() as file:

        def load() -> None:
            os.dup2(file.fileno(), 0)
            assert main(["load", url]) == 0

        try:
            run_as_nobody(load)
        except AssertionError:
            return False, capfd.readouterr().err
    return True, capfd.readouterr().out


def test_a_user_of_the_group_loads_plants_while_the_service_runs(
    storage, url, database, tmp_path, capfd
):
    """Where the group may write the file and its folder, it may hold the lock too."""
    storage.add(Plant(1, "one"))
    for path in (database.parent, *database.parent.glob("plants.db*")):
        os.chown(path, 0, NOBODY)
        path.chmod(0o775 if path.is_dir() else 0o660)
    Path(f"{database}-lock").chmod(0o600)
    with contextlib.closing(get_storage(url)) as worker:  # as of a service that is restarted
        worker.add(Plant(2, "two"))
        assert mode_and_owner(Path(f"{database}-lock")) == (0o660, 0, NOBODY)
        assert load_as_nobody(url, tmp_path, capfd)[0]
        worker.add(Plant(8, "n"))
    assert [plant.id for plant in storage.rows()] == [1, 2, 7, 8]


@pytest.mark.parametrize("is_new", [False, True])
def test_who_may_not_write_is_told_whose_the_file_is(
    storage, url, database, tmp_path, capfd, is_new
):
    """In one line, also where there is no lock file yet."""
    storage.open_or_create()
    storage.close()
    if is_new:
        os.unlink(f"{database}-lock")
    is_loaded, said = load_as_nobody(url, tmp_path, capfd)
    name = database if is_new else f"{database}-lock"
    assert not is_loaded
    assert f"{name} belongs to root, and this runs as nobody" in said.splitlines()[0]


def test_what_root_makes_is_for_the_owner_of_the_file(storage, database):
    """An operator who loads plants as root does not keep the service out afterwards."""
    os.chown(database.parent, NOBODY, NOBODY)
    os.chown(database, NOBODY, NOBODY)
    storage.add(Plant(1, "one"))
    assert mode_and_owner(Path(f"{database}-lock")) == (0o600, NOBODY, NOBODY)
    storage.close()

    def add() -> None:
        with contextlib.closing(get_storage(f"sqlite:///{database}")) as own:
            own.add(Plant(2, "two"))

    run_as_nobody(add)
