"""Compare the service with the servers that people would pick instead: `python tests/bench`.

Needs the Debian packages that results.md names, and installs everything else into `.build` beside
this file. Writes results.md and chart.svg. The servers run on this machine, one at a time and in
turn, in several rounds. Only ratios within one run mean something.

`python tests/bench --against COMMIT` compares the service of that commit with the one in the
working tree, and writes no results. It needs only gcc and wrk.
"""

import itertools
import signal
import sys
from argparse import ArgumentParser, RawTextHelpFormatter
from collections import defaultdict

from results import Results, draw, report
from run import SETTINGS, measure, time_of_sync
from servers import HERE, missing_packages, others, service_of, this_service

MARK = "<!-- tests/bench writes what follows -->\n"


def main() -> None:
    """Measure and print the results. Write the files if every peer and setting was measured."""
    parser = ArgumentParser(description=__doc__, formatter_class=RawTextHelpFormatter)
    parser.add_argument("--against", metavar="COMMIT", help="compare with this commit's service")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=int, default=3, help="of each run")
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, help="only these; no files")
    options = parser.parse_args()
    if missing := missing_packages(peers=not options.against):
        sys.exit(f"install what is missing: apt-get install {' '.join(missing)}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))  # Lets `finally` end the server.
    servers = [this_service(), *([service_of(options.against)] if options.against else others())]
    results: Results = defaultdict(list)
    syncs = []
    for number, setting in itertools.product(range(options.rounds), options.settings or SETTINGS):
        syncs.append(time_of_sync())
        for server in servers[:: -1 if number % 2 else 1]:
            results[setting, server.title].append(measure(server, setting, options.seconds))
    text = report(results, syncs, options.rounds, options.seconds)
    print(text)
    if not (options.settings or options.against):
        page = HERE / "results.md"
        page.write_text(page.read_text().partition(MARK)[0] + MARK + "\n" + text)
        (HERE / "chart.svg").write_text(draw(results, syncs))


main()
