"""The service beside another commit of itself: runs both in turn, and tells the ratios."""

import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Collection, Iterable
from contextlib import ExitStack
from pathlib import Path

from calls import measure_calls
from competitors import Competitor, this_service
from environments import HERE, ROOT, environment
from load import SETTINGS, Setting, post
from service import empty_folder, running

sys.path.append(str(ROOT))
from tests.support.postgresql import PostgreSQL, running_postgresql

PARTS = ("1", "32", "128", "packets", "slow", "postgresql", "memory", "calls")
PRESENT = "present"


class Comparison:
    """The working tree and another commit, and what was measured of both."""

    def __init__(self, commit: str, parts: Collection[str], seconds: int) -> None:
        """`parts` are what is measured, each run for so many seconds."""
        self.commit = commit_of(commit)
        self.settings = [SETTINGS[part] for part in parts if part in SETTINGS]
        self.parts, self.seconds = parts, seconds
        self.pairs: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)

    def measure(self, rounds: int) -> None:
        """Measure both, in turn. The one that comes first changes with each round."""
        with ExitStack() as stack:
            temporary = tempfile.TemporaryDirectory(dir=HERE, prefix=".")
            folder = Path(stack.enter_context(temporary))
            check_out(self.commit, folder / "other")
            sides = [side(PRESENT, ROOT), side(self.commit, folder / "other")]
            server = None
            if any(setting.database == "postgresql" for setting in self.settings):
                tempfile.tempdir = "/var/tmp"  # not in memory
                server = stack.enter_context(running_postgresql())
            for each in sides:  # it compiles its Python, and shows that it starts
                with empty_folder(folder) as own, running(each, own):
                    pass
            for number in range(rounds):
                self._measure_round(sides[:: -1 if number % 2 else 1], folder, server)

    def _measure_round(
        self, sides: list[Competitor], folder: Path, server: PostgreSQL | None
    ) -> None:
        """Measure everything once, and keep what was measured of both sides."""
        found: dict[str, dict[str, float]] = {each.title: {} for each in sides}
        groups: defaultdict[tuple[bool, str], list[Setting]] = defaultdict(list)
        for setting in self.settings:
            groups[setting.slow, setting.database].append(setting)
        for group in groups.values():
            self._measure_load(sides, group, folder, server, found)
        for each in sides:
            figures = found[each.title]
            if "memory" in self.parts:
                self._measure_memory(each, folder, figures)
            if "calls" in self.parts:
                calls = measure_calls(Path(each.command[0]).parent, each.source)
                figures["a call, us of CPU time"] = calls.application
                figures["a call of a constant, us"] = calls.constant
        present, other = found[PRESENT], found[self.commit]
        for title in present:
            if title in other:
                self.pairs[title].append((present[title], other[title]))

    def _measure_load(
        self, sides: list[Competitor], settings: list[Setting], folder: Path,
        server: PostgreSQL | None, found: dict[str, dict[str, float]],
    ) -> None:  # fmt: skip
        """Start both, and post to them in turn. All settings have the same disk and database."""
        slow = settings[0].slow
        with ExitStack() as stack:
            services = []
            for each in sides:
                own, url = stack.enter_context(empty_folder(folder)), ""
                if server and settings[0].database == "postgresql":
                    url = server.new_schema()
                services.append(stack.enter_context(running(each, own, url, slow)))
            for setting in settings:
                for service in services:
                    if run := post(service, setting, self.seconds):
                        figures = found[service.competitor.title]
                        figures[f"{setting.title}: plants/s"] = run.rate
                        figures[f"{setting.title}: p99, ms"] = run.p99

    def _measure_memory(self, each: Competitor, folder: Path, figures: dict[str, float]) -> None:
        """Start one alone, as PSS counts what two have in common for half, and post to it."""
        with empty_folder(folder) as own, running(each, own) as service:
            if post(service, SETTINGS["128"], self.seconds):
                figures["memory, MB (PSS)"] = service.memory()
                figures["seconds to the first 200"] = service.seconds_to_first

    def table(self) -> str:
        """The medians of both, and those of the ratios within a round, as Markdown."""
        lines = [
            f"| | {PRESENT} | {self.commit} | {PRESENT} / {self.commit} (lowest to highest) |",
            "|---|---|---|---|",
        ]
        for title, pairs in self.pairs.items():
            ratios = [present / other for present, other in pairs]
            present, other = (figure(values) for values in zip(*pairs, strict=True))
            spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
            ratio = f"{statistics.median(ratios):.2f} ({spread})"
            lines.append(f"| {title} | {present} | {other} | {ratio} |")
        return "\n".join(lines) + "\n"


def figure(values: Iterable[float]) -> str:
    """The median of `values`, with four digits or so."""
    median = statistics.median(values)
    return (
        f"{median:,.0f}" if median >= 1000 else f"{median:.1f}" if median >= 10 else f"{median:.2f}"
    )


def commit_of(name: str) -> str:
    """The short id of the commit that is called `name`; ends the benchmark if there is none."""
    command = ["git", "-C", str(ROOT), "rev-parse", "--short", "--verify", f"{name}^{{commit}}"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    return done.stdout.strip() or sys.exit(f"there is no commit {name}")


def check_out(commit: str, folder: Path) -> None:
    """Put the files of a commit into a new folder."""
    folder.mkdir()
    archive = ["git", "-C", str(ROOT), "archive", commit]
    files = subprocess.run(archive, check=True, stdout=subprocess.PIPE).stdout
    subprocess.run(["tar", "-x", "-C", folder], input=files, check=True)


def side(title: str, source: Path) -> Competitor:
    """The service in the folder `source`, in an environment with what it requires."""
    return this_service(title, environment(source / "requirements.txt"), source)
