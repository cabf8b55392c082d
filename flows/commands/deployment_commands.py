"""Commands for what `onward deploy` has made: deployments list, pause, resume, delete, run."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Annotated

from typer import Argument

from onward.flows import api
from onward.flows.commands.common import Json, print_facts, print_json

if TYPE_CHECKING:
    from onward.flows.deploying.deployments import DeploymentFacts

Name = Annotated[str, Argument(metavar="NAME", help="The deployment, as `onward deploy --name` has named it.")]


def listed(as_json: Json = False) -> None:
    """List the deployments: when they run, the last run and how it ended, and what waits."""
    api.require_flow("onward deployments list")
    from onward.flows.running.local_run import prefect_server

    with prefect_server(start=False):
        from onward.flows.deploying.deployments import deployments

        found = deployments()
    if as_json:
        print_json({"deployments": [each.model_dump() for each in found]})
        return
    for each in found:
        _print(each)
    if not found:
        print("there is no deployment; `onward deploy CONFIG --name NAME` makes one")


def pause(name: Name, as_json: Json = False) -> None:
    """Stop the schedules of a deployment.

    No run begins by itself any more; one that has begun goes on, and `onward deployments run` starts one all the same.
    """
    from onward.flows.deploying.deployments import set_paused

    _change(name, partial(set_paused, paused=True), as_json=as_json)


def resume(name: Name, as_json: Json = False) -> None:
    """Start the schedules of a paused deployment again."""
    from onward.flows.deploying.deployments import set_paused

    _change(name, partial(set_paused, paused=False), as_json=as_json)


def delete(name: Name, as_json: Json = False) -> None:
    """Delete a deployment with its schedules and the runs that have not begun.

    Finished runs and their files stay, and a run that has begun goes on.
    """
    from onward.flows.deploying.deployments import delete

    _change(name, delete, as_json=as_json, done="deleted: ")


def run(name: Name, as_json: Json = False) -> None:
    """Start a run of a deployment now and print its id.

    It begins when no other run of the deployment is running.
    """
    api.require_flow("onward deployments run")
    from onward.flows.running.local_run import prefect_server

    with prefect_server(start=False) as url:
        from onward.flows.deploying.deployments import run_now

        started = run_now(name)
    page = f"{url.removesuffix('/api')}/v2/runs/flow-run/{started}"
    print_facts({"run": started, "url": page}, as_json=as_json)


def _change(name: str, change: Callable[[str], DeploymentFacts], *, as_json: bool, done: str = "") -> None:
    """Change a deployment, and print what it is now; of a deleted one, what it was."""
    api.require_flow("onward deployments")
    from onward.flows.running.local_run import prefect_server

    with prefect_server(start=False):
        facts = change(name)
    if as_json:
        print_json(facts.model_dump())
    else:
        _print(facts, done)


def _print(facts: DeploymentFacts, done: str = "") -> None:
    print(f"{done}{facts.name}: {'paused, ' if facts.paused else ''}{facts.schedule}")
    if facts.next_at and not facts.paused and not done:
        print(f"  next run  {facts.next_at}" + (f", {facts.waiting} waiting" if facts.waiting else ""))
    if facts.last_run:
        print(f"  last run  {facts.last_at}  {facts.last_state}  {facts.last_run}")
