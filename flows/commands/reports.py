"""The command that writes reports of runs: report."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from onward.flows.commands.common import Json, print_facts


def report(
    runs: Annotated[
        list[str] | None,
        Argument(
            metavar="RUN ...", help="Runs, each as in `onward status`; several are compared in one file. Default: last."
        ),
    ] = None,
    output: Annotated[
        Path | None,
        Option(
            "--output",
            "-o",
            help="The HTML file to write. Default: report.html in the run's directory; of several runs a file under "
            "ONWARD_HOME/reports.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Write the report of a run as one HTML file, or compare several runs in one.

    It shows what was trained and how it ended, curves, where the time went, the worst samples, what changed in the
    model, the export, the environment and the configuration. The file needs no network, fits a phone and can be
    printed. A run writes its report itself when it ends.
    """
    from onward.flows.run_reports.report_api import report as write_report

    written = write_report(*(runs or ()), output=output)
    if as_json:
        print_facts(written.model_dump(mode="json"), as_json=True)
        return
    for problem in written.left_out:
        print(f"left out: {problem}")
    print(written.path)
