"""How fast the service is beside what people would pick instead: `python tests/bench`.

Needs wrk (of Debian's packages), a C compiler and npm; makes environments of its own. Writes
results.md and chart.svg beside this file. The servers run on this machine, one at a time and in
turn, in several rounds; only ratios of one run mean something.

`python tests/bench --against COMMIT` runs the service of that commit beside the one in the working
tree instead, and writes no files. For its setting `postgresql` PostgreSQL is needed, too.
"""

import argparse
import signal
import sys

from environments import HERE, compile_c, require
from load import SETTINGS
from peers import PARTS, Peers


def main() -> None:
    """Measure; print what came of it, and write it down if it is the whole of it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--against", metavar="COMMIT", help="compare with this commit of the service"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=int, default=4, help="of each run")
    parser.add_argument(
        "--settings", nargs="+", choices=[*PARTS, "postgresql"], help="only these; writes no files"
    )
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))  # leaves no server behind
    require("wrk", "cc", "git")
    compile_c()
    default = SETTINGS if options.against else PARTS
    bench = Peers(options.settings or default, options.seconds, options.against)
    text = bench.measure(options.rounds).report(options.rounds, options.seconds)
    print(text)
    if not (options.settings or options.against):
        (HERE / "results.md").write_text(text)
        bench.draw(HERE / "chart.svg")


if __name__ == "__main__":
    main()
