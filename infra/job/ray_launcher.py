"""Ray: the launcher on a cluster of Ray, of which this host is a node.

    flow
      +-- ray_ranks.py --> placement group: a bundle of CPUs and GPUs for each rank
                       --> an actor in each bundle --> the rank, its child process

Ranks find each other by RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT (trainer/distributed/env_world.py). Ray only
starts them: attempts and checkpoints are Onward's, as under any launcher.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from onward.infra.job import launcher
from onward.infra.job.launcher import (
    Environment,
    LauncherEnding,
    RankEnding,
    Ranks,
    ended_by_signal,
    signal_name,
    with_settings,
)

PROGRAM = ("-m", "onward.infra.job.ray_ranks")
ANSWER_S = 60.0
"""Longest time for the cluster's answer to which nodes it has."""

_ENDED = re.compile(
    r"^ray: rank (\d+) on (\S+) (?:was ended by signal (?P<signal>\d+)|exited with status (?P<status>\d+))", re.M
)
_LOST_NODE = re.compile(r"^ray: rank \d+ lost its node (\S+):", re.M)
_ASKED = re.compile(r"^ray: asked to end by (\w+)", re.M)
"""What ray_ranks.py prints about the end of a job."""


class Ray:
    """Starts ranks by actors of a cluster of Ray."""

    name = "ray"
    rank_variable = "RANK"

    def problems(self, ranks: Ranks, environment: Environment) -> list[str]:
        """Return that Ray is not installed, no cluster answers, or it is too small."""
        if importlib.util.find_spec("ray") is None:
            return [
                "launch.launcher is 'ray', and there is no Python package ray; install it, which Onward's extra `ray` "
                "contains, in the version of the cluster"
            ]
        # a process of its own: a connection leaves threads and handlers of signals behind
        words = [sys.executable, *PROGRAM, "--ask", *_options(ranks)]
        try:
            answer = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=ANSWER_S)
        except subprocess.TimeoutExpired:
            where = environment.get("RAY_ADDRESS", "this host")
            return [f"the Ray cluster at {where} has not answered within {ANSWER_S:g} s; `ray status` shows its state"]
        if answer.returncode == 0:
            # with --ask the program prints why the ranks have no room, or nothing
            return answer.stdout.splitlines()
        return [f"the Ray cluster could not be asked: {answer.stderr.strip()[-2000:]}"]

    def uses_other_hosts(self, hostfile: str, environment: Environment) -> bool:
        """Return True: also a rank of this host is started by its Ray."""
        return True

    def arguments(self, ranks: Ranks, python: Sequence[str], environment: Environment) -> list[str]:
        """Return the command line."""
        return [sys.executable, *PROGRAM, *_options(ranks), "--", *python, "-m", *ranks.module]

    def environment(self, ranks: Ranks, users: Environment, folder: Path) -> dict[str, str]:
        """Return the environment of the program, which sends the ranks a part of it."""
        return with_settings(users, launcher.SETTINGS)

    def read_ending(self, output: str, returncode: int | None = None) -> LauncherEnding:
        """Return what the program says about the end of a job."""
        lost = _LOST_NODE.search(output)
        first_rank = None
        if ended := _ENDED.search(output):
            number = int(ended["signal"] or 0)
            status = 128 + number if number else int(ended["status"])
            first_rank = RankEnding(int(ended[1]), ended[2], signal_name(number) if number else "", status)
        ended_by = ended_by_signal(returncode)
        # a program that was killed could not print what has ended it
        if not ended_by and (asked := _ASKED.search(output)):
            ended_by = asked[1]
        return LauncherEnding(self.name, first_rank, ended_by, lost[1] if lost else None)


def _options(ranks: Ranks) -> list[str]:
    return [
        *("--ranks", str(ranks.num_ranks), "--cpus", str(ranks.threads or 1)),
        *("--device", ranks.device, "--ranks-per-gpu", str(ranks.ranks_per_gpu)),
    ]
