"""The command that sends a run to a scheduler."""

from __future__ import annotations

from typing import Annotated, Literal

from typer import Option

from onward.flows.commands.common import ConfigFile, Json, Overrides, Profile, layers_of, print_facts


def submit(
    config: ConfigFile,
    overrides: Overrides = None,
    name: Annotated[str, Option(metavar="NAME", help="Of the run, by which it is found and continued.")] = "",
    on: Annotated[Literal["slurm", "kubernetes"], Option("--on", help="The scheduler.")] = "slurm",
    profile: Profile = "",
    nodes: Annotated[int, Option(min=1, max=100_000, help="Hosts that share the ranks.")] = 1,
    sbatch: Annotated[
        list[str] | None, Option(metavar="OPTION", help="Of sbatch, such as time=2:00:00 or partition=gpu. Repeatable.")
    ] = None,
    kind: Annotated[
        Literal["job", "trainjob", "mpijob"],
        Option(help="On Kubernetes: one pod, one pod by Kubeflow Trainer, or --nodes pods with ssh."),
    ] = "job",
    image: Annotated[str, Option(help="On Kubernetes: the image of the pods.")] = "onward",
    claim: Annotated[
        str, Option(help="On Kubernetes: the PersistentVolumeClaim that all pods mount at /onward.")
    ] = "onward",
    dry_run: Annotated[bool, Option("--dry-run", help="Print the script, and send nothing.")] = False,
    as_json: Json = False,
) -> None:
    """Send a run to Slurm, or print it for Kubernetes, as a job that is requeued until it is finished.

    Checks the configuration, writes a script for sbatch and sends it. Before the time limit and when it is preempted
    the job saves a checkpoint and is requeued; each start of it goes on with the same run. `onward status NAME` also
    says what Slurm knows of it, `onward stop NAME` and scancel save and end it. The output is in NAME-JOB.out in the
    working directory.

    With --on kubernetes nothing is sent: the manifests are printed, for `kubectl apply -f -`. The TOML files become a
    part of them; the files that settings name must be below /onward on the volume, or URLs.
    """
    from pathlib import Path

    from onward.flows import api
    from onward.flows.submitting import slurm_script
    from onward.trainer.errors import ConfigError

    files, changes = layers_of(config, overrides)
    # of the machine on which it runs nothing is known here
    found = api.config(files, changes, profile=profile)
    if name == found.name:
        raise ConfigError(f"--name {name} is the name of the configuration; the run needs one of its own")
    words = [*changes, *(["--profile", profile] if profile else [])]
    if on == "kubernetes":
        from onward.flows.submitting.kubernetes_manifests import Pods, manifests_of

        print(manifests_of(name, found, files, words, Pods(kind, image, claim, nodes)), end="")
        return
    words = [*(str(Path(file).resolve()) if Path(file).is_file() else file for file in files), *words]
    script = slurm_script.script_of(name, found.launch, found.parallel, words, nodes=nodes, options=sbatch or ())
    if dry_run:
        print(script, end="")
        return
    job = slurm_script.send(name, script)
    facts = {"name": name, "job": job.job, "state": job.state, "output": str(Path(f"{name}-{job.job}.out").resolve())}
    print_facts(facts, as_json=as_json)
