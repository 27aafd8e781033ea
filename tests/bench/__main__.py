"""How fast the service is beside what people would pick instead: `python tests/bench`.

Needs wrk (of Debian's packages) and a C compiler, and npm for the peer that runs on node; makes
environments of its own. Writes results.md and chart.svg beside this file. The servers run on this
machine, one at a time and in turn, in several rounds; only ratios of one run mean something.

`python tests/bench --against COMMIT` runs the service of that commit beside the one in the working
tree instead, and prints the ratios of both. For its setting `postgresql` PostgreSQL is needed, too.
"""

import argparse
import signal
import sys

import comparison
import peers
from comparison import Comparison
from environments import HERE, compile_c, require
from peers import Peers


def read_options() -> argparse.Namespace:
    """What the command line asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts = list(dict.fromkeys([*comparison.PARTS, *peers.PARTS]))
    parser.add_argument(
        "--against", metavar="COMMIT", help="compare with this commit of the service"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=int, default=4, help="of each run")
    parser.add_argument("--settings", nargs="+", choices=parts, help="only these; writes no files")
    options = parser.parse_args()
    possible = comparison.PARTS if options.against else peers.PARTS
    if wrong := set(options.settings or ()) - set(possible):
        parser.error(f"not possible here: {', '.join(sorted(wrong))}")
    options.parts = options.settings or possible
    return options


def main() -> None:
    """Measure; print what came of it, and write it down if it is the whole of it."""
    options = read_options()
    signal.signal(
        signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM")
    )  # leaves no server behind
    require("wrk", "cc", "git")
    compile_c()
    if options.against:
        pair = Comparison(options.against, options.parts, options.seconds)
        pair.measure(options.rounds)
        print(pair.table())
        return
    bench = Peers(options.parts, options.seconds)
    text = bench.measure(options.rounds).report(options.rounds, options.seconds)
    print(text)
    if not options.settings:
        (HERE / "results.md").write_text(text)
        bench.draw(HERE / "chart.svg")


if __name__ == "__main__":
    main()
