"""The service beside its peers: runs everything in turn, and draws what came of it."""

import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Collection
from pathlib import Path

from competitors import PYTHON_PEERS, Competitor, competitors, this_service
from environments import BUILD, HERE, ROOT, environment, install_node_packages
from load import SETTINGS, post
from results import Results
from service import make_table, running

sys.path.append(str(ROOT))
from tests.support.postgresql import running_postgresql

OURS = {"ours", "other"}
PARTS = ("1", "32", "128", "slow")


class Peers:
    """The competitors, and a folder for what they store."""

    def __init__(self, parts: Collection[str], seconds: int, commit: str | None = None) -> None:
        """`parts` are what is measured, each run for so many seconds.

        With a `commit`, that is what the service is compared with.
        """
        requirements = ROOT / "requirements.txt", HERE / "requirements.txt"
        self.tools = environment(*requirements)
        self.parts, self.seconds = parts, seconds
        if commit:
            self.competitors = against(commit, self.tools)
        else:
            self.competitors = competitors(self.tools)
            install_node_packages()
        self.results = Results(self.competitors)

    def measure(self, rounds: int) -> Results:
        """Measure all of them, in turn."""
        with contextlib.ExitStack() as stack:
            temporary = tempfile.TemporaryDirectory(dir=HERE, prefix=".")
            folder, server = Path(stack.enter_context(temporary)), None
            if "postgresql" in self.parts:
                tempfile.tempdir = "/var/tmp"  # not in memory
                server = stack.enter_context(running_postgresql())
            for number in range(rounds):
                names = list(self.competitors)[:: -1 if number % 2 else 1]
                for name in names:
                    self._measure_load(folder, name, slow=False)
                for name in names:
                    if self.competitors[name].stores:
                        self._measure_load(folder, name, slow=True)
                    if server and name in OURS:
                        self._measure_load(folder, name, slow=False, url=server.new_schema())
        return self.results

    def _measure_load(self, folder: Path, name: str, slow: bool, url: str = "") -> None:
        """One competitor, in all settings with or without the slow disk, or PostgreSQL."""
        kind = slow, "postgresql" if url else "sqlite"
        settings = [p for p in self.parts if (SETTINGS[p].slow, SETTINGS[p].database) == kind]
        if not settings:
            return
        with tempfile.TemporaryDirectory(dir=folder) as own:
            if name in PYTHON_PEERS:
                make_table(Path(own))
            with running(self.competitors[name], Path(own), url, slow) as service:
                for part in settings:
                    if run := post(service, SETTINGS[part], self.seconds):
                        self.results.runs[name, part].append(run)
                if not (slow or url):
                    self.results.starts[name].append(service.seconds_to_first)
                    if service.process.poll() is None:
                        self.results.memory[name].append(service.memory())

    def draw(self, file: Path) -> None:
        """Draw plants a second of those that store them in SQLite."""
        rates = {
            competitor.title: self.results.median(name, "32").rate
            for name, competitor in self.competitors.items()
            if competitor.stores and self.results.runs[name, "32"]
        }
        program = [self.tools / "python", HERE / "draw.py", file]
        subprocess.run(program, input=json.dumps(rates), text=True, check=True)


def against(name: str, tools: Path) -> dict[str, Competitor]:
    """The service in the working tree, and the one in the commit that is called `name`."""
    command = ["git", "-C", str(ROOT), "rev-parse", "--short", "--verify", f"{name}^{{commit}}"]
    commit = subprocess.run(command, stdout=subprocess.PIPE, text=True).stdout.strip()
    if not commit:
        sys.exit(f"there is no commit {name}")
    folder = BUILD / commit
    folder.mkdir(exist_ok=True)
    archive = subprocess.check_output(["git", "-C", ROOT, "archive", commit])
    subprocess.run(["tar", "-x", "-C", folder], input=archive, check=True)
    other = this_service(commit, environment(folder / "requirements.txt"), folder)
    return {"ours": this_service("this service", tools, ROOT), "other": other}
