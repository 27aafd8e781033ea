"""The pages are true: what they have for a shell is typed, and prints what they show.

What is for a container or a Linux host is in test_deploy.py; the ladder has a test of its own.
"""

import json
import os
import re
import subprocess
from pathlib import Path
from shlex import quote

import pytest

from tests.support.pages import BLOCK, PAGES, block, command, make_folder
from tests.support.rows import read_names
from tests.support.server import ROOT, TOKEN, free_port, wait_until
from tests.support.wire import MONSTERA

PATIENCE = 120  # seconds for a page: one of them downloads packages
TYPED = [ROOT / "README.md", ROOT / "docs/interface.md", ROOT / "docs/data.md"]
ELSEWHERE = r"(?m)^(docker|systemctl|mkdir replaced)|/pytest$"
VARYING = r"\b[0-9a-f]{32}\b|(?<=Bearer )[^'\n]+|http://[\w.:]+|\[\d\d/\w+/.*?\]|\b[\d.]+s\b"
URL = re.compile(r"(postgresql://user:password@([a-z,]+)/database)")
START = ".venv/bin/gunicorn &\nuntil curl -sf localhost:8000/healthz; do kill -0 $!; done\n"
STOP = "kill %% 2>&- && wait || true\n"  # as Ctrl+C does, if it runs


def run(folder: Path, commands: str, **settings: str) -> str:
    """Type commands there, with a free port in place of 8000; return what is printed.

    What they leave running ends with them.
    """
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
    lines = ""
    for language, text in BLOCK.findall(PAGES[page]):
        if language == "python":
            lines += f"cat >client.py <<'END'\n{text}END\n.client/bin/python client.py\n"
        elif text.endswith("gunicorn\n"):
            setting = "" if text.startswith("python3") else text.rpartition(".venv")[0]
            lines += STOP + setting + START
        elif language == "sh" and not re.search(ELSEWHERE, text):
            lines += text
    return lines


@pytest.mark.parametrize("page", TYPED, ids=lambda page: page.stem)
def test_a_page_is_typed_from_top_to_bottom(page, tmp_path, postgresql):
    """All that it shows as printed is printed; where none is started on it, the service runs."""
    url, commands, settings = postgresql.new_url(), typed(page), {}
    if page != TYPED[0]:
        commands, settings["PLANTS_TOKENS"] = START + block("sh", "curl") + commands, TOKEN
    for example, hosts in URL.findall(commands):
        others = "/nowhere," * hosts.count(",")
        commands = commands.replace(example, quote(url.replace("host=", f"host={others}")))
    printed = re.sub(VARYING, "X", run(make_folder(tmp_path / "plant store"), commands, **settings))
    for language, text in BLOCK.findall(PAGES[page]):
        assert language not in ("", "json") or re.sub(VARYING, "X", text) in printed, text


def test_a_deleted_file_is_rescued(serve, database, tmp_path):
    """With all that was answered with 200."""
    server = serve(WEB_CONCURRENCY="1")
    assert {server.post({**MONSTERA, "id": number})[0] for number in range(20)} == {200}
    database.unlink()
    wait_until(lambda: server.health() == 503)
    (rescued := tmp_path / "rescued").mkdir()
    found = run(rescued, f"{command('find /proc')} || true")  # processes may end meanwhile
    for link, path in (line.split(" ", 1) for line in found.splitlines()):
        if path.startswith(str(database)):
            name = Path(path.removesuffix(" (deleted)")).name
            (rescued / name).write_bytes(Path(link).read_bytes())
    assert run(rescued, block("sh", "mkdir -p backups")) == "ok\n20\n"


def test_what_is_newer_than_the_backup_is_read_from_a_damaged_file(tmp_path):
    """All plants are there again but those of the damaged page, which has older ones here."""
    folder = make_folder(tmp_path / "plant store")
    lines = [json.dumps({"id": number, "name": "Monstera" * 5}) for number in range(6100)]
    (folder / "older.jsonl").write_text("\n".join(lines[:6000]))
    (folder / "newer.jsonl").write_text("\n".join(lines[6000:]))
    load = ".venv/bin/python transfer.py load <"
    run(folder, f"{load}older.jsonl\n{block('sh', 'mkdir -p backups')}{load}newer.jsonl")
    with (folder / "plants.db").open("r+b") as file:
        file.seek(4096 * 20)
        file.write(b"\xff" * 4096)
    *rescue, last = block("sh", "mkdir damaged").splitlines()
    restore = "rm plants.db*; cp backups/* plants.db"
    run(folder, "\n".join(["set +e", *rescue, restore, "set -e", last]))
    assert 5950 < len((folder / "rescued.jsonl").read_text().splitlines()) < 6100
    assert list(read_names(f"sqlite:///{folder}/plants.db")) == [*range(6100)]
