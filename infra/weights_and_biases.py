"""Write metrics to Weights & Biases, or to its files in offline mode. Only this module imports wandb.

The package is the extra `wandb`, imported only where `monitor.report_to` names it. WANDB_MODE, WANDB_ENTITY,
WANDB_BASE_URL and the login are wandb's own; what it would find out by itself (host, git, packages, code, terminal,
usage) stays here.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import re
import shutil
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np

log = logging.getLogger(__name__)

CONNECT_S = 2.0
"""Longest time in which the server must accept a connection; else the run is written to files."""
WITHOUT_SERVER = ("offline", "dryrun", "disabled")
"""Values of WANDB_MODE with which nothing is sent."""
INIT_TIMEOUT_S = 20.0
"""Longest wait for the server's answer when a run begins."""
FINISH_TIMEOUT_S = 60.0
"""Longest wait at the end for what is not sent yet; the files keep the rest."""


def is_installed() -> bool:
    """Return whether wandb can be imported."""
    return importlib.util.find_spec("wandb") is not None


def login_problem() -> str:
    """Return why nothing could be sent from this machine, and what to do; "" if there is a login, or none is needed."""
    import wandb

    try:
        with _hooks_kept():
            # the settings of wandb itself decide: files, environment and login are read as `wandb` does
            session = wandb.setup(wandb.Settings(silent=True))
            if session.settings.mode in WITHOUT_SERVER or wandb.login(prompt=False, verify=False):
                return ""
        why = f"no login for {session.settings.base_url} on this machine"
    except Exception as error:  # such as a key that is none
        why = str(error)
    return (
        f"Weights & Biases has {why}: run `wandb login`, or set WANDB_API_KEY; with WANDB_MODE=offline the run writes "
        "files, which `wandb sync` sends later"
    )


class WeightsAndBiases:
    """One run of W&B, found again by its id when a run is resumed. Its files are in `folder`/wandb.

    Files of an earlier monitor are deleted, because the whole event log is read again, and a server says from which
    step on it lacks the rest. A server that cannot be reached at the beginning is replaced by files; one that is lost
    later delays nothing but `close`.
    """

    def __init__(
        self, folder: Path, *, run_id: str, project: str, name: str, config: Mapping[str, Any], notes: str
    ) -> None:
        import wandb

        if problem := login_problem():
            raise RuntimeError(problem)  # wandb would ask for a key on the terminal
        # offline files of a former attempt would be sent a second time by `wandb sync`
        shutil.rmtree(folder / "wandb", ignore_errors=True)
        folder.mkdir(exist_ok=True)
        settings = wandb.Settings(
            silent=True,
            console="off",
            disable_code=True,
            disable_git=True,
            host="-",
            root_dir=str(folder),
            stop_fn=lambda: None,  # the button "Stop run" would interrupt the flow like Ctrl-C
            init_timeout=INIT_TIMEOUT_S,
            finish_timeout=FINISH_TIMEOUT_S,
            x_disable_machine_info=True,
            x_disable_meta=True,
            x_disable_stats=True,
            x_save_requirements=False,
        )
        with _hooks_kept():
            self._run = wandb.init(
                # an id that is the same at each resume: the server then goes on with the same run
                id=re.sub(r"[^A-Za-z0-9_-]", "-", run_id)[-64:],
                project=re.sub(r"[/\\#?%:]", "-", project)[:128],
                name=name,
                config=dict(config),
                notes=notes,
                resume="allow",
                reinit="create_new",  # other runs of this process keep theirs
                settings=settings,
                mode=None if _can_be_reached() else "offline",
            )
        # a server that has a part of the steps already refuses them
        self._next = self._run.starting_step
        if self._run.offline:
            log.info("Weights & Biases: `wandb sync %s/wandb/offline-run-*` sends what is written there", folder)
        else:
            log.info("Weights & Biases: %s", self._run.url)

    def scalars(self, values: Mapping[str, Any], *, step: int, at_ms: int) -> None:
        """Add values to the row of a step. Rows are sent in the order of steps, and an earlier one is closed."""
        # wandb closes a row as soon as a later step is logged, and drops values for an earlier one
        if step >= self._next:
            self._run.log({**values, "_timestamp": at_ms / 1000}, step=step)
            self._next = step

    def histogram(self, name: str, counts: Sequence[int], edges: Sequence[float], *, step: int, at_ms: int) -> None:
        """Add a histogram; `len(edges) == len(counts) + 1`."""
        import wandb

        drawn = wandb.Histogram(np_histogram=(np.asarray(counts), np.asarray(edges)))
        self.scalars({name: drawn}, step=step, at_ms=at_ms)

    def flush(self) -> None:
        """Do nothing: a process of wandb sends what it gets."""

    def close(self, *, failed: bool) -> None:
        """Send or write the rest, and the run's final state."""
        self._run.finish(exit_code=int(failed))


def _can_be_reached() -> bool:
    """Return whether something listens where the server should be; True where none is asked, or a proxy is."""
    import wandb

    settings = wandb.setup().settings
    url = urlsplit(str(settings.base_url))
    # behind a proxy a direct connection proves nothing
    if settings.mode in WITHOUT_SERVER or any(name.lower().endswith("_proxy") for name in os.environ):
        return True
    try:
        port = url.port or (443 if url.scheme == "https" else 80)
        socket.create_connection((url.hostname or "", port), timeout=CONNECT_S).close()
    except OSError as error:
        log.warning("Weights & Biases at %s cannot be reached (%s): this run is written to files", url.netloc, error)
        return False
    return True


@contextlib.contextmanager
def _hooks_kept() -> Iterator[None]:
    """Leave sys.exit and sys.excepthook as they were: wandb replaces both, and would print each traceback twice."""
    before = sys.exit, sys.excepthook
    try:
        yield
    finally:
        sys.exit, sys.excepthook = before
