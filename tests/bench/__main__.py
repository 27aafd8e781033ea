"""How fast the service is beside what people would pick instead: `python tests/bench`.

Needs wrk, a C compiler and npm; installs what else it needs into `.build` beside this file. Writes
results.md and chart.svg. The servers run on this machine, one at a time and in turn, in several
rounds; only ratios of one run mean something.

`python tests/bench --against COMMIT` runs the service of that commit beside the one in the working
tree instead, and writes no files.
"""

import itertools
import shutil
import signal
import sys
from argparse import ArgumentParser, RawTextHelpFormatter
from collections import defaultdict

from results import Results, draw, report
from run import SETTINGS, measure
from servers import HERE, others, service_of, this_service

MARK = "<!-- tests/bench writes what follows -->\n"


def main() -> None:
    """Measure; print what came of it, and write it down if it is the whole of it."""
    parser = ArgumentParser(description=__doc__, formatter_class=RawTextHelpFormatter)
    parser.add_argument("--against", metavar="COMMIT", help="compare the service with this one")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=int, default=4, help="of each run")
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, help="only these; no files")
    options = parser.parse_args()
    if missing := [name for name in ("cc", "npm", "wrk") if not shutil.which(name)]:
        sys.exit(f"needs {', '.join(missing)}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))  # leaves no server behind
    servers = [this_service(), *([service_of(options.against)] if options.against else others())]
    results: Results = defaultdict(list)
    for number, setting in itertools.product(range(options.rounds), options.settings or SETTINGS):
        for server in servers[:: -1 if number % 2 else 1]:
            results[setting, server.title].append(measure(server, setting, options.seconds))
    text = report(results, options.rounds, options.seconds)
    print(text)
    if not (options.settings or options.against):
        page = HERE / "results.md"
        page.write_text(page.read_text().partition(MARK)[0] + MARK + "\n" + text)
        (HERE / "chart.svg").write_text(draw(results))


main()
