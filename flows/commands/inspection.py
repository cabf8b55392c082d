"""Commands that only read: doctor, config, plan, diff."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Annotated

from typer import Argument, Exit, Option

from onward.flows import api, model_api
from onward.flows.commands.common import All, ConfigFile, Json, Overrides, Profile, layers_of, print_json
from onward.trainer.errors import ConfigError, RuntimeUnavailable
from onward.trainer.run.machine.quick_imports import quick_imports


def doctor(
    model: Annotated[
        Path | None,
        Argument(
            metavar="MODEL.onnx|CONFIG",
            help="The ONNX file, or a run's TOML file. Without one this machine is examined.",
        ),
    ] = None,
    data: Annotated[
        str | None, Argument(metavar="DATA", help="Labelled data to try preprocessings on, as data.source.")
    ] = None,
    overrides: Overrides = None,
    label: Annotated[str, Option(help="The column of labels; short for data.label=NAME.")] = "",
    rows: Annotated[int, Option(help="Rows of the data to try preprocessings on.", min=2, max=1_000_000)] = 300,
    converters: Annotated[
        list[Path] | None,
        Option(help="A Python file with your own operator rules, as in model.converters. Repeatable."),
    ] = None,
    hostfile: Annotated[str, Option(help="Without MODEL: also examine the hosts of this MPI hostfile.")] = "",
    everything: All = False,
    as_json: Json = False,
) -> None:
    """Diagnose an ONNX file before training; without one, this machine.

    Lists every weight with its role and the reason (trained weight, running statistic, constant), how each operator is
    imported, what is not supported, and what the exporter has lost, with the export that keeps it. Also says whether
    onnxruntime, which verifies the trained file, opens this one.

    With DATA it also runs the model on some labelled rows under the preprocessings that models are usually trained with
    (scales, means, order of channels and classes, crops, special tokens), and prints the settings of the best.

    Without MODEL it examines this machine: MPI with real ranks, compilers, GPUs, disks and their file systems, memory,
    limits, servers, packages, clock. The status is 3 if there is a problem; a note is none.
    """
    from onward.flows.shown.inspection_report import show_diagnosis

    changes = list(overrides or ())
    if model is None or str(model).startswith("launch.hostfile="):
        # as a setting, the hosts are named as in a run
        named = "" if model is None else str(model).partition("=")[2].strip("'\"")
        _examine(hostfile or named, others=[*([data] if data else []), *changes], as_json=as_json)
        return
    if hostfile:
        raise ConfigError("--hostfile is for the examination of a machine; leave it out, or leave MODEL out")
    if data is not None and re.match(r"\w+(\.\w+)+=", data):  # a setting, after a configuration that names the data
        changes = [data, *changes]
        data = None
    with quick_imports():
        import onward.trainer.diagnostics.doctor  # noqa: F401 - and torch, which `model_api.doctor` would import
    found = model_api.doctor(model, data, changes, label=label, rows=rows, converters=converters or ())
    if as_json:
        print_json(found.model_dump(mode="json"))
    else:
        show_diagnosis(found, everything=everything)
    if not found.importable or not found.runtime.valid:
        raise Exit(2)


def _examine(hostfile: str, *, others: list[str], as_json: bool) -> None:
    """Examine the machine; raises Exit with the status of a machine that cannot run it."""
    from onward.flows.shown.inspection_report import show_machine

    if others:
        raise ConfigError(f"without MODEL there is no {others[0]!r}: give only --hostfile or launch.hostfile=FILE")
    found = api.examine(hostfile)
    if as_json:
        print_json(found.model_dump(mode="json") | {"problems": len(found.problems)})
    else:
        show_machine(found)
    if found.problems:
        raise Exit(RuntimeUnavailable.exit_code)


def config(
    config: ConfigFile,
    overrides: Overrides = None,
    profile: Profile = "",
    changed: Annotated[bool, Option("--changed", help="Only the settings that differ from the defaults.")] = False,
    as_json: Json = False,
) -> None:
    """Print the resolved configuration with the meaning and the origin of every setting.

    The output is itself a configuration file. The comment behind a setting says where its value came from: a file and
    its table, a profile, an override, or the default. The model and the data are not opened.
    """
    from onward.flows.shown.terminal_tables import changed_lines, config_lines, meanings
    from onward.trainer.config.flat_settings import changed_settings

    files, changes = layers_of(config, overrides)
    resolved = api.config(files, changes, profile=profile)
    origins = api.origins(files, changes, profile=profile)
    if as_json and changed:
        print_json({"changed": changed_settings(resolved), "origins": origins})
    elif as_json:
        print_json({"config": resolved.model_dump(mode="json"), "meanings": meanings(), "origins": origins})
    else:
        lines = changed_lines(changed_settings(resolved), origins) if changed else config_lines(resolved, origins)
        print("\n".join(lines))


def plan(
    config: ConfigFile,
    overrides: Overrides = None,
    profile: Profile = "",
    measure: Annotated[
        bool, Option("--measure", help="Train some steps on the ranks, and keep how long they took.")
    ] = False,
    steps: Annotated[int, Option(help="How many steps --measure measures.", min=1, max=100_000)] = 10,
    device: Annotated[
        str, Option(metavar="GPU", help="Plan for a GPU by its name, such as H100, that may be elsewhere.")
    ] = "",
    hosts: Annotated[str, Option(metavar="HxG", help="Hosts x GPUs of each, such as 8x8.")] = "",
    network: Annotated[
        str, Option(metavar="RATE", help="From one GPU to another host, such as 50GB/s or 400Gbit/s.")
    ] = "",
    latency: Annotated[str, Option(metavar="TIME", help="Of a message to another host, such as 5us.")] = "",
    storage: Annotated[str, Option(metavar="RATE", help="At which all ranks write a checkpoint, such as 2GB/s.")] = "",
    failures_every: Annotated[
        str, Option(metavar="TIME", help="Mean time between failures, such as 6h: what they cost.")
    ] = "",
    everything: All = False,
    as_json: Json = False,
) -> None:
    """Show the layout of a run, and what it takes: memory, messages, steps, time and disk.

    Shows the stages, the memory of one rank at its peak, what each mesh axis sends, and which layers are tensor
    parallel. With parallel.sizes="auto" it compares the possible layouts and chooses one.

    The time of a step is what --measure has measured for such a run on this machine, else that of a finished run, else
    an estimate from counted FLOPs; the output says which. --measure starts the ranks in a directory that is deleted,
    without Prefect and MLflow; without it no ranks are started.

    With --device and --hosts it plans for a cluster that need not be there, and asks no GPU of this machine.
    """
    from onward.flows.planning.cluster_options import read_cluster
    from onward.flows.shown.inspection_report import show_plan

    files, changes = layers_of(config, overrides)
    cluster = read_cluster(
        device=device, hosts=hosts, network=network, latency=latency, storage=storage, failures=failures_every
    )
    if measure and cluster.gpu:
        raise ConfigError("--measure trains on this machine, and --device plans for another one; give one of them")
    found = api.plan(
        files, changes, profile=profile, measure=steps if measure else 0, cluster=cluster, progress=sys.stderr
    )
    if as_json:
        print_json(found.model_dump(mode="json") | {"num_ranks": found.num_ranks})
    else:
        from onward.flows.planning.shown import show_run_plan

        show_plan(found, everything=everything)
        show_run_plan(found)


def diff(
    a: Annotated[Path, Argument(metavar="A.onnx", help="The first file.")],
    b: Annotated[Path, Argument(metavar="B.onnx", help="The second file.")],
    everything: All = False,
    as_json: Json = False,
) -> None:
    """Compare two ONNX files: graph, inputs, outputs and every tensor."""
    from onward.flows.shown.inspection_report import show_difference

    found = model_api.diff(a, b)
    if as_json:
        print_json({"same": found.same, **found.model_dump(mode="json")})
    else:
        show_difference(found, everything=everything)
    if not found.same:
        raise Exit(1)
