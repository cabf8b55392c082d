"""Commands that train, and that show runs: run, resume, status, runs."""

from __future__ import annotations

import signal
import sys
from typing import TYPE_CHECKING, Any

from onward.flows.commands.common import ConfigFile, Json, Overrides, RunName, load_checked_config, print_json
from onward.trainer.errors import ConfigError

if TYPE_CHECKING:
    from onward.trainer.config.run_config import RunConfig
    from onward.trainer.run.directory import RunDir
    from onward.trainer.run.records import ExportedModel


def run(config: ConfigFile, overrides: Overrides = None, as_json: Json = False) -> None:
    """Train a model and export it.

    Checks the configuration, the model and the data first and lists everything that is wrong. Then runs the flow in
    this process, on the ranks that mpirun starts, and prints the result. Ctrl-C saves a checkpoint and stops.
    """
    _train(load_checked_config(config, overrides), as_json=as_json)


def resume(run: RunName, as_json: Json = False) -> None:
    """Continue a run from its newest complete checkpoint.

    For a run that was killed, stopped or failed. It continues with its saved configuration, in the same run directory
    and the same MLflow run.
    """
    from onward.flows.runs import find_run, is_running
    from onward.trainer.config.loading import build_config
    from onward.trainer.diagnostics.config_check import check_sections
    from onward.trainer.run.directory import onward_home, read_config

    found, home = find_run(run), onward_home().resolve()
    if found.root.resolve().parent != home / "runs":
        raise ConfigError(
            f"{found.root} is not a run of {home}; to resume it, set ONWARD_HOME={found.root.resolve().parents[1]}"
        )
    if is_running(found):
        raise ConfigError(f"{found.root.name} is running already; `onward status {found.root.name[:8]}` shows its step")
    config = build_config(dict(read_config(found)), check=check_sections)
    _train(config, resume=found.root.name, as_json=as_json)


def status(run: RunName = "last", as_json: Json = False) -> None:
    """Show the state of a run, and the error of a failed one."""
    from onward.flows.report import table
    from onward.flows.runs import describe, find_run

    facts = describe(find_run(run))
    if as_json:
        print_json(facts)
    else:
        values = facts.pop("values")
        shown = [(key.replace("_", " "), str(value)) for key, value in facts.items() if value not in ("", 0)]
        table([*shown, *((key, f"{value:.6g}") for key, value in values.items())])


def runs(as_json: Json = False) -> None:
    """List all runs, newest first."""
    from onward.flows.report import table
    from onward.flows.runs import all_runs, describe

    found = [describe(run) for run in all_runs()]
    if as_json:
        print_json({"runs": found})
        return
    rows = [
        (f["run_id"][:8], f["name"], f["state"], f"{f['step']}/{f['num_steps']}", f["created_at"], f["directory"])
        for f in found
    ]
    table(rows, heads=("run", "name", "state", "step", "created", "directory"))


def _train(config: RunConfig, *, resume: str = "", as_json: bool) -> None:
    """Run the flow to its end in this process and print the result."""
    from onward.flows.local_run import create_flow_run, prefect_server, readable_log, run_to_end

    # Prefect handles SIGTERM first: it stops the job and then calls the handler that was installed before its own.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    with prefect_server():
        from onward.flows.progress import live_progress

        run, flow_run = create_flow_run(config, resume=resume)
        print(f"onward: run {run.root}", file=sys.stderr)
        try:
            with readable_log(run), live_progress(run):
                exported = run_to_end(flow_run, config, resume=resume)
        except BaseException:
            if run.identity.exists():
                print(f"onward: to continue from the newest checkpoint: onward resume {run.root.name}", file=sys.stderr)
            raise
    facts = _result_facts(config, run, exported)
    if as_json:
        print_json(facts)
    else:
        from onward.flows.report import outcome, table, variant_rows

        table([*outcome(facts), *variant_rows(exported)])


def _result_facts(config: RunConfig, run: RunDir, exported: ExportedModel) -> dict[str, Any]:
    """Return what is known of a finished run, as JSON-able values."""
    from onward.flows.report import bits_per_byte
    from onward.flows.runs import describe, held_out_text
    from onward.trainer.run.records import TrainResult, read_record

    trained = read_record(run.train, TrainResult)
    text = held_out_text(run) if config.model.loss == "cross_entropy" else b""
    return {
        **describe(run),
        "bits_per_byte": bits_per_byte(exported.after["evaluation/loss"], text) if text else {},
        "before": exported.before,
        "after": exported.after,
        "parity": exported.parity,
        "sha256": exported.sha256,
        "variants": [variant.model_dump(mode="json") for variant in exported.variants],
        "registered": f"{exported.registered_as} version {exported.version}" if exported.registered_as else "",
        "elapsed_s": trained.elapsed_s,
        "attempts": trained.attempts,
        "step": trained.step,
    }
