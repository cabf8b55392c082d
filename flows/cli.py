"""`onward`: the command line. Thin: each command reads its arguments, calls one function, prints.

Exit status: that of the error (trainer/errors.py); 130 after Ctrl-C. Heavy imports are inside the commands.
"""

from __future__ import annotations

import json
import signal
import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn
from urllib.parse import urlsplit

import typer

from onward.trainer.errors import ConfigError, OnwardError, Refused, RuntimeUnavailable

if TYPE_CHECKING:
    from onward.trainer.config.run_config import RunConfig
    from onward.trainer.run.directory import RunDir
    from onward.trainer.run.records import ExportedModel

app = typer.Typer(
    help="ONNX in, trained ONNX out, at scale.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
reference = typer.Typer(help="Write a reference model as an ONNX file, untrained.", no_args_is_help=True)
app.add_typer(reference, name="reference")

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout; everything else to stderr.")]
ConfigFile = Annotated[Path, typer.Argument(metavar="CONFIG", help="A TOML file; examples: flows/configs/.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[SECTION.KEY=VALUE]...", help="Lines of TOML, stronger than the file.")
]
ModelFile = Annotated[Path, typer.Argument(metavar="MODEL.onnx", help="An ONNX file.")]
All = Annotated[bool, typer.Option("--all", help="Print every row.")]
RunName = Annotated[str, typer.Argument(metavar="RUN", help="A name, the beginning of an id, a directory, or last.")]
Output = Annotated[Path, typer.Option("--output", "-o", help="The ONNX file to write.")]


@app.command()
def run(config: ConfigFile, overrides: Overrides = None, as_json: Json = False) -> None:
    """Train a model: check everything, then run the flow here and show how it ended."""
    _train(_load(config, overrides), as_json=as_json)


@app.command()
def resume(run: RunName, as_json: Json = False) -> None:
    """Go on with a run that was killed, stopped or failed, from its newest whole checkpoint."""
    from onward.flows.runs import find_run, is_owned
    from onward.trainer.config.loading import build_config
    from onward.trainer.diagnostics.config_check import check_sections
    from onward.trainer.run.directory import onward_home, read_config

    found, home = find_run(run), onward_home().resolve()
    if found.root.resolve().parent != home / "runs":
        raise ConfigError(
            f"{found.root} is not a run of {home}; to go on with it, set ONWARD_HOME={found.root.resolve().parents[1]}"
        )
    if is_owned(found):
        raise ConfigError(f"{found.root.name} is running; `onward status {found.root.name[:8]}` says how far it is")
    config = build_config(dict(read_config(found)), check=check_sections)
    _train(config, resume=found.root.name, as_json=as_json)


@app.command()
def status(run: RunName = "last", as_json: Json = False) -> None:
    """Say how a run stands, or why it died."""
    from onward.flows.report import table
    from onward.flows.runs import describe, find_run

    facts = describe(find_run(run))
    if as_json:
        _print_json(facts)
    else:
        values = facts.pop("values")
        shown = [(key.replace("_", " "), str(value)) for key, value in facts.items() if value not in ("", 0)]
        table([*shown, *((key, f"{value:.6g}") for key, value in values.items())])


@app.command()
def runs(as_json: Json = False) -> None:
    """List what ran, the newest first."""
    from onward.flows.report import table
    from onward.flows.runs import all_runs, describe

    found = [describe(run) for run in all_runs()]
    if as_json:
        _print_json({"runs": found})
        return
    rows = [
        (f["run_id"][:8], f["name"], f["state"], f"{f['step']}/{f['num_steps']}", f["created_at"], f["directory"])
        for f in found
    ]
    table(rows, heads=("run", "name", "state", "step", "created", "directory"))


@app.command()
def config(config: ConfigFile, overrides: Overrides = None, as_json: Json = False) -> None:
    """Print the resolved configuration, every setting with its meaning; the output is a config file."""
    from onward.flows.report import config_lines, meanings
    from onward.trainer.config.loading import load_config

    resolved = load_config(config, overrides or ())
    if as_json:
        _print_json({"config": resolved.model_dump(mode="json"), "meanings": meanings()})
    else:
        print("\n".join(config_lines(resolved)))


@app.command()
def plan(config: ConfigFile, overrides: Overrides = None, everything: All = False, as_json: Json = False) -> None:
    """Say how a run would be divided over its ranks, what each would hold and send; choose sizes if `auto`."""
    from onward.flows.inspection_report import show_plan
    from onward.tasks.configure import plan as make_plan

    found = make_plan(_load(config, overrides))
    if as_json:
        _print_json(found.model_dump(mode="json") | {"num_ranks": found.num_ranks})
    else:
        show_plan(found, everything=everything)


VariantKind = StrEnum("VariantKind", ["optimized", "fp16", "bf16", "int8_dynamic", "int8_static"])  # export.variants


@app.command()
def export(
    source: Annotated[str, typer.Argument(metavar="CHECKPOINT_OR_RUN", help="A checkpoint directory, or a run.")],
    output: Output,
    variant: Annotated[
        list[VariantKind] | None,
        typer.Option(help="Also write this variant, if it passes its gate; repeatable."),
    ] = None,
    training: Annotated[bool, typer.Option("--training", help="Also what trains it where no torch is.")] = False,
    as_json: Json = False,
) -> None:
    """Write a checkpoint's weights back into its ONNX file, and prove the result."""
    from onward.flows.report import variant_rows
    from onward.flows.runs import find_checkpoint
    from onward.tasks.export import export_file
    from onward.trainer.config.sections import ExportConfig

    extras = ExportConfig.model_validate({"variants": variant or (), "training": training})
    run, checkpoint = find_checkpoint(source)
    exported = export_file(run, checkpoint, output, extras=extras)
    facts = {"path": str(exported.path), "sha256": exported.sha256, "checkpoint": str(checkpoint)}
    metrics = {"parity": exported.parity, "before": exported.before, "after": exported.after}
    made: dict[str, Any] = {"training": [str(path) for path in exported.training]} if training else {}
    if exported.training_refused:
        made = {"training": "", "training_refused": exported.training_refused}
    if as_json:
        variants = [each.model_dump(mode="json") for each in exported.variants]
        _print_json({**facts, "step": exported.step, **metrics, **made, "variants": variants})
    else:
        _print({**facts, "step": exported.step, **metrics, **made, **dict(variant_rows(exported))}, as_json=False)


@app.command()
def doctor(
    model: ModelFile,
    converters: Annotated[
        list[Path] | None,
        typer.Option(help="A Python file of your own operators, as in model.converters; repeatable."),
    ] = None,
    everything: All = False,
    as_json: Json = False,
) -> None:
    """Say what of an ONNX file is trained and why, how it is imported, and what to look out for."""
    from onward.flows.inspection_report import show_diagnosis
    from onward.trainer.diagnostics.doctor import diagnose

    found = diagnose(model, converters=converters or ())
    if as_json:
        _print_json(found.model_dump(mode="json"))
    else:
        show_diagnosis(found, everything=everything)
    if not found.importable:
        raise typer.Exit(2)


@app.command()
def diff(
    a: Annotated[Path, typer.Argument(metavar="A.onnx")],
    b: Annotated[Path, typer.Argument(metavar="B.onnx")],
    everything: All = False,
    as_json: Json = False,
) -> None:
    """Say what distinguishes two ONNX files. Exit status: 0 nothing, 1 something, 2 one cannot be read."""
    from onward.flows.inspection_report import show_difference
    from onward.trainer.diagnostics.diff import compare

    found = compare(a, b)
    if as_json:
        _print_json({"same": found.same, **found.model_dump(mode="json")})
    else:
        show_difference(found, everything=everything)
    if not found.same:
        raise typer.Exit(1)


@reference.command()
def squeezenet(
    output: Output,
    num_classes: Annotated[int, typer.Option(min=1)] = 1000,
    image_size: Annotated[int, typer.Option(min=17, help="Side in pixels.")] = 224,
    channels: Annotated[int, typer.Option(min=1)] = 3,
    dropout: Annotated[float, typer.Option(min=0.0, max=1.0)] = 0.5,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    as_json: Json = False,
) -> None:
    """SqueezeNet v1.1: `image` -> `logits`."""
    from onward.trainer.onnx_graph.reference_models import build_squeezenet

    model = build_squeezenet(
        num_classes=num_classes, image_size=image_size, channels=channels, dropout=dropout, seed=seed
    )
    _write_model(model, output, as_json=as_json)


@reference.command()
def gpt2(
    output: Output,
    vocab_size: Annotated[int, typer.Option(min=2, help="256 = bytes.")] = 50257,
    sequence_length: Annotated[int, typer.Option(min=1, help="The longest.")] = 1024,
    num_layers: Annotated[int, typer.Option(min=1)] = 12,
    num_heads: Annotated[int, typer.Option(min=1)] = 12,
    width: Annotated[int, typer.Option(min=1)] = 768,
    dropout: Annotated[float, typer.Option(min=0.0, max=1.0)] = 0.1,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    as_json: Json = False,
) -> None:
    """GPT-2: `input_ids` -> `logits`; the defaults are the 124M model."""
    from onward.trainer.onnx_graph.reference_models import build_gpt2

    model = build_gpt2(
        vocab_size=vocab_size,
        sequence_length=sequence_length,
        num_layers=num_layers,
        num_heads=num_heads,
        width=width,
        dropout=dropout,
        seed=seed,
    )
    _write_model(model, output, as_json=as_json)


@app.command()
def up(as_json: Json = False) -> None:
    """Start Prefect, MLflow and the worker that runs deployments, to stay until `onward down`."""
    from onward.infra import services
    from onward.infra.supervisor import POOL

    if configured := services.configured_prefect():
        raise RuntimeUnavailable(
            f"the Prefect server {configured} is configured, so Onward starts none of its own; give that one a worker "
            f"with `prefect worker start --pool {POOL} --type process`, or unset PREFECT_API_URL"
        )
    links = _serve("prefect", "mlflow", "worker")
    from onward.flows.local_run import bury_the_dead, prefect_server

    with prefect_server():
        bury_the_dead()  # a run that was killed would hold its deployment's only slot
    _print(links, as_json=as_json)


@app.command()
def ui(as_json: Json = False) -> None:
    """Print the links to Prefect and MLflow, starting both if need be; `onward down` ends them."""
    from onward.flows.runs import all_runs
    from onward.trainer.run.records import RunIdentity, read_record

    links = _serve("prefect", "mlflow")
    if known := all_runs()[:1]:
        identity = read_record(known[0].identity, RunIdentity)
        base, _, query = links["mlflow"].partition("?")
        if identity.prefect_url.startswith("http://127.0.0.1:"):  # the port may be another one today
            links["last run"] = links["prefect"].removesuffix("/v2/runs") + urlsplit(identity.prefect_url).path
        if identity.tracking_uri.startswith("sqlite:"):
            links["last run in mlflow"] = f"{base}#/runs/{identity.mlflow_run_id}?{query}"
    _print(links, as_json=as_json)


@app.command()
def down(as_json: Json = False) -> None:
    """Stop Onward's servers; deployed runs save a checkpoint first."""
    from onward.infra import services
    from onward.trainer.run.directory import onward_home

    stopped, left = services.down(onward_home())
    if as_json:
        _print_json({"stopped": stopped, "left": left})
        return
    print("stopped: " + (", ".join(stopped) or "nothing was running"))
    if left:
        print(f"{', '.join(left)} leaves with the `onward run` that still uses it")


@app.command()
def deploy(
    config: ConfigFile,
    overrides: Overrides = None,
    name: Annotated[str, typer.Option(help="The deployment becomes train-onnx/NAME.")] = "default",
    cron: Annotated[str, typer.Option(help="When to run, as a cron expression: '0 2 * * *'.")] = "",
    interval: Annotated[float, typer.Option(min=0.0, help="Seconds between runs, instead of --cron.")] = 0.0,
    timezone: Annotated[str, typer.Option(help="The time zone of --cron.")] = "UTC",
    as_json: Json = False,
) -> None:
    """Make a Prefect deployment of a configuration, with a schedule; needs `onward up`."""
    resolved = _load(config, overrides)
    from onward.flows.local_run import prefect_server

    with prefect_server(start=False) as url:
        from onward.flows.deploy import deploy as make_deployment

        deployment_id = make_deployment(resolved, name, cron=cron, interval_s=interval, timezone=timezone)
    facts = {
        "deployment": f"train-onnx/{name}",
        "deployment_id": deployment_id,
        "url": f"{url.removesuffix('/api')}/v2/deployments/deployment/{deployment_id}",
    }
    _print(facts, as_json=as_json)


# -- what the commands share


def _load(path: Path, overrides: list[str] | None) -> RunConfig:
    """The configuration, checked against the files it names: all that can be refused is refused here."""
    from onward.trainer.config.loading import load_config
    from onward.trainer.diagnostics.config_check import check_sections

    return load_config(path, overrides or (), check=check_sections)


def _train(config: RunConfig, *, resume: str = "", as_json: bool) -> None:
    from onward.flows.local_run import announce, prefect_server, readable_log, run_here

    # Prefect stops the job softly, then hands the signal on to whoever was there before: to this
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    with prefect_server():
        from onward.flows.progress import live_progress

        run, flow_run = announce(config, resume=resume)
        print(f"onward: run {run.root}", file=sys.stderr)
        try:
            with readable_log(run), live_progress(run):
                exported = run_here(flow_run, config, resume=resume)
        except BaseException:
            if run.identity.exists():
                print(f"onward: to go on from the newest checkpoint: onward resume {run.root.name}", file=sys.stderr)
            raise
    facts = _facts(config, run, exported)
    if as_json:
        _print_json(facts)
    else:
        from onward.flows.report import outcome, table, variant_rows

        table([*outcome(facts), *variant_rows(exported)])


def _facts(config: RunConfig, run: RunDir, exported: ExportedModel) -> dict[str, Any]:
    """What is known of a finished run, as JSON-able values."""
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


def _write_model(model: Any, output: Path, *, as_json: bool) -> None:
    from onward.trainer.run.durable_files import sha256, write_durably

    write_durably(output, model.SerializeToString())
    inputs = [value.name for value in model.graph.input]
    outputs = [value.name for value in model.graph.output]
    facts = {"path": str(output), "bytes": output.stat().st_size, "sha256": sha256(output)}
    _print({**facts, "inputs": inputs, "outputs": outputs}, as_json=as_json)


def _serve(*names: str) -> dict[str, str]:
    """Start services to stay; their links."""
    from onward.infra import services
    from onward.trainer.run.directory import onward_home

    try:
        urls = services.up(onward_home(), names)
    except services.ServiceError as error:
        raise RuntimeUnavailable(str(error)) from None
    return {
        "prefect": f"{urls['prefect']}/v2/runs",
        "mlflow": f"{urls['mlflow']}/?workflowType=machine_learning",
        "home": str(onward_home()),
    }


def _print(facts: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        _print_json(facts)
        return
    from onward.flows.report import table

    table((key.replace("_", " "), str(value)) for key, value in facts.items())


def _print_json(facts: dict[str, Any]) -> None:
    print(json.dumps(facts, indent=2, default=str))


def main() -> None:
    """Run a command; an error Onward raises on purpose becomes a list on stderr and its exit status."""
    try:
        app()
    except OnwardError as error:
        _give_up(error)
    except (PermissionError, IsADirectoryError, NotADirectoryError, FileExistsError) as error:  # a place of the user's
        _give_up(RuntimeUnavailable(f"cannot use {error.filename}: {error.strerror}"))
    except KeyboardInterrupt:
        sys.exit(130)


def _give_up(error: OnwardError) -> NoReturn:
    problems = error.problems if isinstance(error, Refused) else (str(error),)
    for problem in problems:
        print(f"  - {problem}", file=sys.stderr)
    if "--json" in sys.argv:
        _print_json({"error": type(error).__name__, "problems": list(problems), "exit_code": error.exit_code})
    sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
