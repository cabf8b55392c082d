"""Write the report of one run: `python -m onward.flows.run_reports RUN_DIR --summary FILE`. The flow starts it."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from onward.flows.run_reports.page import page_of
from onward.flows.run_reports.reported_run import read_facts
from onward.flows.run_reports.summary import markdown
from onward.trainer.run.directory import RunDir
from onward.trainer.run.durable_files import write_durably


def main() -> int:
    """Write report.html into the run directory, and its summary in Markdown into a file."""
    parser = argparse.ArgumentParser(prog="python -m onward.flows.run_reports")
    parser.add_argument("run", type=lambda path: RunDir(Path(path).resolve()))
    parser.add_argument("--summary", type=Path, required=True)
    arguments = parser.parse_args()
    facts = read_facts(arguments.run)
    write_durably(arguments.run.report, page_of(facts).encode())
    arguments.summary.write_text(markdown(facts))
    return 0


if __name__ == "__main__":
    sys.exit(main())
