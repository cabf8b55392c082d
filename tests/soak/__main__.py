"""Inject faults into a run, and account for what was lost.

    python -m tests.soak squeezenet-digits train.num_epochs=4 --kinds rank-kill,flow-term --faults 5 --mtbf 1s
    python -m tests.soak --faults 50 --home DIR

The first command runs a configuration undisturbed, then with faults, under a home of its own with its own servers, and
resumes a run that a fault has ended. The second one does so for a tiny net in each of --layouts; a layout with an
account in DIR is not run again. Tables and HOME/account.json say what was lost; the exit status is 0 if all is right.
Ctrl-C ends the injection, and the run goes on to its end. `disk-full` needs a HOME on a small file system of its own:
mount -t tmpfs -o size=1g none HOME.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from onward.trainer.errors import ConfigError
from tests.soak.account import Account
from tests.soak.driver import run_soak
from tests.soak.kinds import KINDS
from tests.soak.layouts import LAYOUTS, soak_of_layout
from tests.soak.plan import seconds
from tests.soak.tables import tables


def main(arguments: Sequence[str] | None = None) -> int:
    kinds = "\n".join(f"  {name:24}{kind.what}; ends {kind.ends}" for name, kind in KINDS.items())
    parser = argparse.ArgumentParser(
        prog="python -m tests.soak",
        description=__doc__,
        epilog=f"the kinds of faults, and what has to end by them:\n{kinds}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("words", nargs="*", metavar="CONFIG [SECTION.KEY=VALUE]", help="default: a tiny net")
    parser.add_argument("--layouts", nargs="+", default=list(LAYOUTS), choices=list(LAYOUTS), help="of the tiny net")
    parser.add_argument("--faults", type=int, default=0, help="how many; 0 = each kind once")
    parser.add_argument("--kinds", default="all", help="separated by commas; all = all but disk-full")
    parser.add_argument("--mtbf", default="1s", help="mean time of work between two faults, such as 500ms or 20s")
    parser.add_argument("--seed", type=int, default=1, help="of the first layout; the next ones count on")
    parser.add_argument("--home", type=Path, help="a new or empty directory; default: a temporary one")
    given = parser.parse_args(arguments)
    accounts: dict[str, Account] = {}
    with tempfile.TemporaryDirectory() as temporary:
        home = (given.home or Path(temporary)).absolute()
        if given.words:
            config, *overrides = given.words
            names = [] if given.kinds == "all" else given.kinds.split(",")
            drawn = {"mtbf_s": seconds(given.mtbf), "kinds": names, "seed": given.seed, "faults": given.faults}
            accounts[config] = run_soak(config, overrides, home, **drawn)
            print(tables(accounts))
        else:
            for seed, name in enumerate(given.layouts, start=given.seed):
                options = {"faults": given.faults, "kinds": given.kinds, "mtbf": given.mtbf, "seed": seed}
                accounts[name] = soak_of_layout(name, home, **options)
                print(tables(accounts), flush=True)
    problems = [f"{name}: {problem}" for name, account in accounts.items() for problem in account.problems]
    print("\n".join(problems), file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ConfigError as error:
        print("\n".join(error.problems), file=sys.stderr)
        sys.exit(error.exit_code)
