"""The function behind `onward report` and `onward.report`."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import TYPE_CHECKING

from onward.flows.api import require_flow
from onward.flows.configuration import AnyPath

if TYPE_CHECKING:
    from onward.flows.run_reports.page import ReportFile


def report(*runs: str, output: AnyPath | None = None) -> ReportFile:
    """Write the report of a run as one HTML file, or one file that compares several runs; return its record.

        onward.report("last")
        onward.report("digits-3", "digits-4", output="comparison.html")

    `runs`: each a name, the beginning of an id, a directory, or "last"; none = "last". `output`: the file to write;
    default: report.html in the run's directory, of several runs a file under ONWARD_HOME/reports. The file needs no
    network. Raises ConfigError when there is no such run.
    """
    require_flow("onward.report")
    from onward.flows.run_reports.page import ReportFile, page_of
    from onward.flows.run_reports.reported_run import read_facts
    from onward.flows.run_reports.run_comparison import page_of_several
    from onward.flows.run_state.runs import find_run
    from onward.trainer.run.directory import onward_home
    from onward.trainer.run.durable_files import write_durably

    found = list(dict.fromkeys(find_run(name) for name in runs or ("last",)))
    facts = [read_facts(run) for run in found]
    if len(facts) == 1:
        path = found[0].report
        page = page_of(facts[0])
    else:
        path = onward_home() / "reports" / f"{'-'.join(each.short_id for each in facts)[:100]}.html"
        page = page_of_several(facts)
    path = Path(os.fspath(output)).absolute() if output else path
    write_durably(path, page.encode())
    names = tuple(run.root.name for run in found)
    left_out = tuple(itertools.chain.from_iterable(run_facts.left_out for run_facts in facts))
    return ReportFile(path=path, runs=names, bytes=path.stat().st_size, left_out=left_out)
