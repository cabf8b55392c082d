"""Commands for servers and deployments: up, deploy, ui, down."""

from __future__ import annotations

import contextlib
import shlex
from typing import Annotated, Any
from urllib.parse import urlsplit

from typer import Option

from onward.flows import api
from onward.flows.commands.common import ConfigFile, Json, Overrides, Profile, layers_of, print_facts, print_json
from onward.trainer.errors import RuntimeUnavailable, say


def up(as_json: Json = False) -> None:
    """Start Prefect, MLflow and a worker for deployments.

    The servers listen on 127.0.0.1, ask for the login that is in ONWARD_HOME/login, and run until `onward down` or the
    next start of the machine. Not for use with a Prefect server of your own: start a worker for that one instead.
    """
    api.require_flow("onward up")
    from onward.flows.deploying.work_pool import START
    from onward.infra.servers import services

    if configured := services.configured_prefect():
        raise RuntimeUnavailable(
            f"the Prefect server {configured} is configured, so Onward does not start another one; start a worker for "
            f"it with `{START}`, or unset PREFECT_API_URL"
        )
    links = _start_services("prefect", "mlflow", "worker")
    from onward.flows.running.local_run import mark_orphaned_runs_crashed, prefect_server

    with prefect_server():
        # A killed run that Prefect still shows as running blocks its deployment, whose concurrency limit is 1.
        mark_orphaned_runs_crashed()
    _show(links, as_json=as_json)


def deploy(
    config: ConfigFile,
    overrides: Overrides = None,
    profile: Profile = "",
    name: Annotated[str, Option(help="Name of the deployment, shown as train-onnx/NAME.")] = "default",
    cron: Annotated[str, Option(help="When to run, as a cron expression, for example '0 2 * * *'.")] = "",
    interval: Annotated[
        float, Option(min=0.0, max=1e9, help="Seconds between two runs, in place of --cron.", show_default=False)
    ] = 0.0,
    timezone: Annotated[str, Option(help="Time zone of --cron, for example Europe/Berlin.")] = "UTC",
    allow: Annotated[
        list[str] | None,
        Option(
            metavar="DIRECTORY",
            help="A directory whose files a run may name in its parameters, besides those of the configuration. "
            "Repeatable.",
        ),
    ] = None,
    all_waiting: Annotated[
        bool, Option("--all-waiting", help="Start every scheduled run that has waited, not the newest alone.")
    ] = False,
    pool: Annotated[
        str, Option(help="A work pool of Prefect for its runs: processes, docker or kubernetes.")
    ] = "onward",
    queue: Annotated[str, Option(help="A queue of the pool, for example of a kind of GPU.")] = "",
    image: Annotated[str, Option(help="The image of a docker or kubernetes pool's containers.")] = "",
    as_json: Json = False,
) -> None:
    """Create or replace a Prefect deployment of a configuration.

    Needs the servers of `onward up`, or your own Prefect server with a worker. Without --cron and --interval the
    deployment runs when it is started in Prefect. One run at a time: of scheduled runs that wait for it, the newest
    starts, and the others end as Cancelled (--all-waiting). `onward deployments` lists, pauses, resumes and deletes.

    Parameters that are changed in Prefect may name files in the directories that the configuration names, and in those
    of --allow; Python is executed only from the files that it names now.
    """
    api.require_flow("onward deploy")
    files, changes = layers_of(config, overrides)
    resolved = api.checked_config(files, changes, profile=profile)
    from onward.flows.running.local_run import prefect_server

    with prefect_server(start=False) as url:
        from onward.flows.deploying import deploy as deploying

        deployment_id, limits = deploying.deploy(
            resolved,
            name,
            cron=cron,
            interval_s=interval,
            timezone=timezone,
            allowed=allow or (),
            all_waiting=all_waiting,
            place=deploying.Place(pool=pool, queue=queue, image=image),
        )
    facts: dict[str, Any] = {
        "deployment": f"train-onnx/{name}",
        "deployment_id": deployment_id,
        "url": f"{url.removesuffix('/api')}/v2/deployments/deployment/{deployment_id}",
        "may_use": limits.roots if as_json else ", ".join(limits.roots),
    }
    if limits.code:
        facts["executes"] = list(limits.code) if as_json else ", ".join(limits.code)
    print_facts(facts, as_json=as_json)


def ui(as_json: Json = False) -> None:
    """Print the addresses of Prefect and MLflow, and where the login is that both ask for.

    Starts both servers if they do not run; `onward down` stops them.
    """
    api.require_flow("onward ui")
    from onward.flows.run_state.runs import all_runs, identity_of
    from onward.infra.mlflow.mlflow_store import TrackingError
    from onward.infra.mlflow.tracking import page_on_own_server, table_of

    links = _start_services("prefect", "mlflow")
    if (known := all_runs()[:1]) and (identity := identity_of(known[0])):
        if identity.prefect_url.startswith("http://127.0.0.1:"):  # the server may use another port today
            links["last run"] = links["prefect"].removesuffix("/v2/runs") + urlsplit(identity.prefect_url).path
        with contextlib.suppress(TrackingError):  # a damaged database must not hide the other links
            if page := identity.mlflow_url or page_on_own_server(identity.tracking_uri, identity.mlflow_run_id):
                links["last run in mlflow"], links["runs in mlflow"] = page, table_of(page)
    _show(links, as_json=as_json)


def down(as_json: Json = False) -> None:
    """Stop the servers that Onward started.

    Deployed runs save a checkpoint first, which takes at most about a minute. Temporary directories of processes that
    were killed are removed.
    """
    from onward.infra.job.temporary_folders import remove_abandoned
    from onward.infra.servers import services
    from onward.trainer.run.directory import onward_home

    stopped, left = services.down(onward_home())
    removed = [str(path) for path in remove_abandoned()]
    if as_json:
        print_json({"stopped": stopped, "left": left, "removed": removed})
        return
    print("stopped: " + (", ".join(stopped) or "nothing was running"))
    if removed:
        print(f"removed the temporary directories of killed processes: {', '.join(removed)}")
    if left:
        print(f"{', '.join(left)} is still in use by an `onward run` and stops when that run ends")


def _start_services(*names: str) -> dict[str, str]:
    """Start services that run until `onward down`; return their links."""
    from onward.infra.mlflow.tracking import TRAINING_PAGES
    from onward.infra.servers import services
    from onward.infra.servers.login import login_file
    from onward.trainer.run.directory import onward_home
    from onward.trainer.run.machine.private_home import make_private

    make_private(onward_home())
    if missing := [name for name in names if name not in services.running(onward_home())]:
        say(f"starting {', '.join(missing)}, which may take a minute")
    try:
        urls = services.up(onward_home(), names)
    except services.ServiceError as error:
        raise RuntimeUnavailable(str(error)) from None
    return {
        "prefect": f"{urls['prefect']}/v2/runs",
        "mlflow": f"{urls['mlflow']}/#/experiments?{TRAINING_PAGES}",
        "home": str(onward_home()),
        "login": str(login_file(onward_home())),
    }


def _show(links: dict[str, str], *, as_json: bool) -> None:
    """Print the links of the servers, and how to log in. The password itself is not printed: logs keep what is."""
    print_facts(links, as_json=as_json)
    if not as_json:
        print(
            f"Both ask for a login. `cat {shlex.quote(links['login'])}` shows it, as USER:PASSWORD. Prefect takes the "
            "whole line for a password, MLflow the two parts."
        )
