"""The pages are true: what they have for a shell is typed, and prints what they show."""

import os
import re
import subprocess
import sys
from pathlib import Path
from shlex import quote

import pytest

from plant import Plant
from tests.support.pages import BLOCK, PAGES, block, command
from tests.support.server import ROOT, STORED, TOKEN, free_port, wait_until
from tests.support.storage import read_names, read_rows
from tests.support.wire import MONSTERA

PATIENCE = 120  # seconds for a page: one of them downloads packages
TYPED = [ROOT / "README.md", ROOT / "docs/interface.md", ROOT / "docs/data.md"]
ELSEWHERE = r"(?m)^(docker|systemctl|mkdir replaced|for order)|/pytest$"
VARYING = r"\b[0-9a-f]{32}\b|(?<=Bearer )[^'\n]+|http://[\w.:]+|\b[\dT:+-]+\.\d+[\d+:]*"
SERVER = "postgresql://user:password@host/database"
START = ".venv/bin/gunicorn &\nuntil curl -sf localhost:8000/healthz; do kill -0 $!; done\n"
STOP = "kill %% 2>&- && wait || true\n"  # as Ctrl+C does, if it runs
POST = block("sh", ". ./.env").partition("\n")[2]
TEXTS = ["", "\\.", "a\n\\.\nb", "\r\n", "\t", '"', "'", "NULL", "\\N", "é\x7f🌵"]
PLANTS = [Plant(-(2**63), "n"), *map(Plant, range(10), TEXTS, TEXTS), Plant(2**63 - 1, "n")]
STORE = """sqlite3 plants.db 'WITH RECURSIVE new (id) AS (
    VALUES ({}) UNION ALL SELECT id + 1 FROM new WHERE id < {}
) INSERT INTO plants SELECT id, hex(zeroblob(20)), NULL FROM new'\n"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder like that of README.md, without plants."""
    (folder := tmp_path / "plant store").mkdir()
    for source in ROOT.glob("[!.]*"):
        if not source.name.startswith("plants.db"):
            (folder / source.name).symlink_to(source)
    (folder / ".venv").symlink_to(sys.prefix)
    return folder


def run(folder: Path, commands: str, **settings: str) -> str:
    """Type commands there, with a free port in place of 8000; return what they print."""
    port = f":{free_port()}"
    kept = {name: value for name, value in os.environ.items() if name != "DATABASE_URL"}
    kept |= {"PATH": "/usr/bin:/bin", "GUNICORN_CMD_ARGS": f"--bind localhost{port}", **settings}
    bash = ["unshare", "--pid", "--fork", "--kill-child", "bash", "-eo", "pipefail", "-c"]
    done = subprocess.run(
        [*bash, commands.replace(":8000", port)], cwd=folder, env=kept, timeout=PATIENCE,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    return done.stdout


def typed(page: Path) -> str:
    """What a page has for a shell; a service runs in the background until the next is started."""
    lines = "" if page == TYPED[0] else START + POST
    for language, text in BLOCK.findall(PAGES[page]):
        if language == "python":
            lines += f"cat >client.py <<'END'\n{text}END\n.client/bin/python client.py\n"
        elif text.endswith("gunicorn\n"):
            lines += STOP + re.sub(r"(?m)^(python3 .*)?\.venv/bin/gunicorn\n", START, text)
        elif language == "sh" and not re.search(ELSEWHERE, text):
            lines += text
    return lines


@pytest.mark.parametrize("page", TYPED, ids=lambda page: page.stem)
def test_a_page_is_typed_from_top_to_bottom(page, folder, postgresql_url):
    """All that it shows as printed is printed; where none is started on it, the service runs."""
    commands = typed(page).replace(SERVER, quote(postgresql_url))
    printed = run(folder, commands, **({"PLANTS_TOKENS": TOKEN} if page != TYPED[0] else {}))
    for language, text in BLOCK.findall(PAGES[page]):
        if language in ("", "json"):
            assert re.sub(VARYING, "X", text) in re.sub(VARYING, "X", printed)


def test_a_move_and_its_repetition_change_no_plant(folder, open_storage, postgresql_url):
    """Whatever is in it, there and back."""
    storage = open_storage(url := f"sqlite:///{folder}/plants.db")
    for plant in PLANTS:
        storage.add(plant)
    there, back = block("sh", "# From SQLite").replace(SERVER, quote(postgresql_url)).split("\n\n")
    run(folder, f"{there}\n{there}", PLANTS_TOKENS=TOKEN)
    assert read_rows(postgresql_url) == PLANTS
    run(folder, f"sqlite3 plants.db 'DELETE FROM plants WHERE id > 3'\n{back}\n{back}")
    assert read_rows(url) == PLANTS


def test_a_deleted_file_is_rescued(serve, database, tmp_path):
    """With all that was answered with 200."""
    server = serve(WEB_CONCURRENCY="1")
    assert {server.post({**MONSTERA, "id": number})[0] for number in range(20)} == {STORED}
    database.unlink()
    wait_until(lambda: server.health() == 503)
    (rescued := tmp_path / "rescued").mkdir()
    found = run(rescued, f"{command('find /proc')} || true")  # processes may end meanwhile
    for link, path in (line.split(" ", 1) for line in found.splitlines()):
        if path.startswith(str(database)):
            name = Path(path.removesuffix(" (deleted)")).name
            (rescued / name).write_bytes(Path(link).read_bytes())
    assert run(rescued, block("sh", "mkdir -p backups")) == "ok\n20\n"


def test_what_is_newer_than_the_backup_is_read_from_a_damaged_file(folder, open_storage):
    """All plants are there again but those of the damaged page, which has older ones here."""
    open_storage(url := f"sqlite:///{folder}/plants.db").close()
    run(folder, STORE.format(0, 5999) + block("sh", "mkdir -p backups") + STORE.format(6000, 6099))
    with (folder / "plants.db").open("r+b") as file:
        file.seek(4096 * 20)
        file.write(b"\xff" * 4096)
    restore = "mkdir replaced; mv plants.db* replaced; cp backups/* plants.db\n"
    rescue, load = block("sh", "for order"), block("sh", "# From SQLite").partition("\nflock")[2]
    run(folder, f"{restore}set +e\n{rescue}set -e\nflock{load}")
    assert 5950 < len((folder / "plants.jsonl").read_text().splitlines()) < 6100
    assert list(read_names(url)) == [*range(6100)]
