"""Whether ranks and servers can reach each other, and whether hosts and servers that are named answer."""

from __future__ import annotations

import importlib.util
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from onward.flows.configuration import prefect_client
from onward.flows.machine.machine_findings import Finding
from onward.infra.job.hosts import read_hostfile
from onward.infra.servers import services
from onward.infra.servers.service_definitions import SERVICES
from onward.infra.servers.service_state import directory, is_supervised
from onward.tasks.checks.host_table import ask_hosts
from onward.tasks.checks.machine_check import store_problems
from onward.tasks.checks.registered_models import store_of
from onward.trainer.config.sections.ranks import LaunchConfig
from onward.trainer.config.sections.results import MonitorConfig
from onward.trainer.config.urls import redacted
from onward.trainer.errors import RuntimeUnavailable
from onward.trainer.extras import how_to_install
from onward.trainer.run.directory import onward_home

LOOPBACK = "127.0.0.1"


def loopback() -> Iterator[Finding]:
    """Look up the name of this machine, and look for proxies in the way of local calls."""
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError as error:
        what = f"the name of this machine, {name}, has no address ({error}); ranks of several hosts look it up"
        yield Finding.note("loopback", what, f"add `{LOOPBACK} {name}` to /etc/hosts")
    else:
        yield Finding.ok("loopback", f"{name} is {address}")
    # https_proxy is no matter: the servers speak http
    proxies = sorted(key for key in os.environ if key.lower() in ("http_proxy", "all_proxy"))
    excepted = os.environ.get("no_proxy", os.environ.get("NO_PROXY", ""))
    if proxies and not {LOOPBACK, "*"} & {each.strip() for each in excepted.split(",")}:
        what = f"{', '.join(proxies)} would send the calls to servers of yours at {LOOPBACK} to a proxy"
        fix = f"export NO_PROXY={LOOPBACK},localhost"
        yield Finding.note("loopback", what, fix)


def servers() -> Iterator[Finding]:
    """Report Onward's own servers, and whether a configured Prefect server and MLflow store answer."""
    if missing := [name for name in ("prefect", "mlflow") if importlib.util.find_spec(name) is None]:
        what = f"{' and '.join(missing)} not installed: `onward run` cannot work here, a compute node can"
        yield Finding.note("servers", what, how_to_install("flow"))
    yield from _own_servers()
    url = services.configured_prefect()
    if not url:
        yield Finding.ok("Prefect", "none is configured: `onward run` uses Onward's own")
    else:
        try:
            services.check_reachable(url)
            yield Finding.ok("Prefect", f"{redacted(url)} answers")
        except services.ServiceError as error:
            what, _, fix = str(error).rpartition("; ")
            yield Finding.problem("Prefect", what, fix)
    uri = store_of(MonitorConfig())
    if problems := list(store_problems(uri)):
        what, _, fix = problems[0].rpartition("; ")
        yield Finding.problem("MLflow", what, fix)
    else:
        is_remote = uri.startswith(("http:", "https:"))
        what = f"{redacted(uri)} answers" if is_remote else f"runs are recorded in {redacted(uri)}"
        yield Finding.ok("MLflow", what)


def work_pool() -> Iterator[Finding]:
    """Report a work pool with which somebody who may start runs can run any program."""
    # a look at the pool must not be what makes the home
    has_server = services.configured_prefect() or (onward_home() / "services").is_dir()
    if not has_server or importlib.util.find_spec("prefect") is None:
        return
    from onward.flows.running.local_run import prefect_server

    try:
        with prefect_server(start=False):
            from onward.flows.deploying.work_pool import problem_of_pool

            with prefect_client() as client:
                problem = problem_of_pool(client)
    except RuntimeUnavailable:
        return  # without a server or a worker, which the servers' own check reports
    if problem:
        what, _, fix = problem.rpartition("; ")
        yield Finding.problem("work pool", what, fix)
    else:
        what = "what deployed runs execute is decided by the worker, not by those who start them"
        yield Finding.ok("work pool", what)


def _own_servers() -> Iterator[Finding]:
    home = onward_home()
    if not (home / "services").is_dir():
        yield Finding.ok("servers", "Onward's own have not been started yet; `onward run` does it")
        return
    healthy = services.running(home)
    for name in SERVICES:
        if name in healthy:
            yield Finding.ok("servers", f"{name} is running {healthy[name]}".rstrip())
        elif is_supervised(home, name):
            what = f"{name} was started and does not answer; the end of {directory(home) / name}.log says why"
            fix = "wait if it was started just now; else `onward down`, then `onward up`"
            yield Finding.problem("servers", what, fix)
    if not healthy:
        yield Finding.ok("servers", "none of Onward's own is running; `onward run` starts them")


def hosts(hostfile: str) -> tuple[list[Finding], tuple[str, ...]]:
    """Ask the hosts of a hostfile over ssh; return a finding for each, and the networks by which they were reached."""
    path = Path(hostfile)
    try:
        named = read_hostfile(path)
    except (OSError, UnicodeDecodeError) as error:
        return [Finding.problem("hosts", f"{path} cannot be read: {error}", "name a hostfile")], ()
    if not named:
        fix = "write one in each line, such as `node1 slots=4`"
        return [Finding.problem("hosts", f"{path} names no host", fix)], ()
    home = onward_home()
    table = ask_hosts(LaunchConfig(hostfile=hostfile), home, {})
    found = []
    for problem in table.problems:
        what, _, fix = problem.rpartition("; ")
        found.append(Finding.problem("hosts", what, fix))
    for warning in table.warnings:
        what, _, fix = warning.partition("; ")
        found.append(Finding.note("hosts", what, fix))
    for row in table.rows:
        if row.report and not row.problems:
            found.append(Finding.ok("hosts", str(row)))
    return found, table.networks
