"""The worker of deployed runs, and with `run` the process of one run: `python -m onward.flows.deploying.worker`.

    worker --closes the pool--> Prefect's worker --the pool's fixed command--> `... worker run`, Prefect's engine

`onward up` starts it for Onward's own server; for a server of the user's it is started by hand, with PREFECT_API_URL.
"""

from __future__ import annotations

import logging
import os
import runpy
import shlex
import socket
import sys

from onward.flows.configuration import prefect_client
from onward.infra.servers.login import keep_from_others
from onward.infra.servers.service_definitions import CLIENT_SETTINGS, POOL
from onward.trainer.errors import OnwardError
from onward.trainer.run.directory import onward_home

RUN = "run"
"""The word with which this module executes one run."""


def work() -> None:
    """Take deployed runs until SIGTERM."""
    # before Prefect is imported, whose client would send the login with its first call
    is_own = _keep_login()
    for name, value in CLIENT_SETTINGS.items():
        os.environ.setdefault(name, value)
    os.environ["ONWARD_HOME"] = str(onward_home())  # its runs look there for what they may use
    from onward.flows.deploying.work_pool import prepare_pool

    with prefect_client() as client:
        # the command replaces Prefect's own only on Onward's server: another one may have workers of other machines
        prepare_pool(client, shlex.join([sys.executable, "-m", "onward.flows.deploying.worker", RUN]) if is_own else "")
    # Without --limit: with it, Prefect's worker exits when a run that is still running is scheduled again.
    words = ["--pool", POOL, "--type", "process", "--name", f"onward-{socket.gethostname()}"]
    _as_program("prefect", "worker", "start", *words, "--install-policy", "never")


def run() -> None:
    """Execute the flow run that Prefect's worker names in the environment."""
    from prefect.exceptions import CancelledRun

    def is_no_cancellation(record: logging.LogRecord) -> bool:
        return not (record.exc_info and isinstance(record.exc_info[1], CancelledRun))

    _keep_login()
    # Prefect's engine logs the end of a flow that returns a Cancelled state as an "unexpected exception"
    logging.getLogger("prefect.flow_runs").addFilter(is_no_cancellation)
    _as_program("prefect.engine")


def _keep_login() -> bool:
    """Send the login of Onward's own server to nobody else; return whether the Prefect server is that one."""
    return keep_from_others(os.environ.get("PREFECT_API_URL", ""), os.environ.get("PREFECT_API_AUTH_STRING", ""))


def _as_program(module: str, *words: str) -> None:
    """Run a module in this process as `python -m MODULE WORDS` does in one of its own."""
    sys.argv = [module, *words]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    try:
        run() if sys.argv[1:] == [RUN] else work()
    except OnwardError as error:
        sys.exit(f"onward: {error}")
