"""What a Ray cluster is asked for, and what the program that starts ranks on it prints about the end of a job."""

from __future__ import annotations

import argparse
import importlib.util
import os
import signal
import socket
from typing import Any

import pytest

from onward.infra.job.launcher import LauncherEnding, RankEnding, Ranks
from onward.infra.job.ray_launcher import Ray

needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed")
RANKS = Ranks(module=("onward.trainer", "train", "/run"), num_ranks=4, device="cuda", ranks_per_gpu=3, threads=2)
KILLED = "ray: rank 1 on h1 was ended by signal 9"
EXITED = "step 3\nray: rank 0 on h0 exited with status 70\n"
LOST = "ray: rank 2 lost its node h2: The actor died because its node has died."


@pytest.mark.parametrize(
    ("output", "returncode", "ending"),
    [
        ("", 0, LauncherEnding("ray")),
        (KILLED, 137, LauncherEnding("ray", RankEnding(1, "h1", "SIGKILL", 137))),
        (f"{KILLED}, with its actor: ...", 137, LauncherEnding("ray", RankEnding(1, "h1", "SIGKILL", 137))),
        (EXITED, 70, LauncherEnding("ray", RankEnding(0, "h0", "", 70))),
        (LOST, 137, LauncherEnding("ray", lost_host="h2")),
        ("ray: asked to end by SIGTERM\n", 143, LauncherEnding("ray", signal="SIGTERM")),
        ("", -signal.SIGKILL, LauncherEnding("ray", signal="SIGKILL")),
        ("a rank says: ray: rank 1 on h1 was ended by signal 9", 1, LauncherEnding("ray")),
    ],
)
def test_what_is_said_about_the_end_of_a_job(output: str, returncode: int, ending: LauncherEnding) -> None:
    assert Ray().read_ending(output, returncode) == ending


def test_the_command_line_has_what_each_rank_reserves() -> None:
    words = Ray().arguments(RANKS, ["/venv/bin/python"], {})
    assert words[1:] == [
        *(
            "-m",
            "onward.infra.job.ray_ranks",
            "--ranks",
            "4",
            "--cpus",
            "2",
            "--device",
            "cuda",
            "--ranks-per-gpu",
            "3",
        ),
        *("--", "/venv/bin/python", "-m", "onward.trainer", "train", "/run"),
    ]


@needs_ray
@pytest.mark.parametrize(
    ("device", "nodes", "room"),
    [
        ("cuda", [(8, 2)], ""),
        ("cuda", [(8, 1)], "has room for 3 ranks, but the job needs 4, each with 2 CPU and 0.3333 GPU"),
        # three of the GPUs, but CPUs for one
        ("cuda", [(2, 3), (3, 0)], "has room for 1 rank, but the job needs 4"),
        ("auto", [(8, 0)], ""),
        ("auto", [(8, 0), (2, 1)], "has room for 1 rank, but"),
        ("cpu", [(3, 1), (5, 0)], "has room for 3 ranks, but the job needs 4, each with 2 CPU; its nodes are"),
        ("cpu", [], "its nodes are none"),
    ],
)
def test_what_the_cluster_lacks_is_named_with_numbers(device: str, nodes: list[tuple[int, int]], room: str) -> None:
    from onward.infra.job.ray_ranks import needs_of

    arguments = argparse.Namespace(ranks=4, cpus=2, device=device, ranks_per_gpu=3)
    having: list[dict[str, Any]] = []
    for number, (cpus, gpus) in enumerate(nodes):
        resources = {"CPU": float(cpus), "GPU": float(gpus)} if gpus else {"CPU": float(cpus)}
        having.append({"NodeManagerHostname": f"h{number}", "Resources": resources})
    missing = needs_of(arguments, having).missing(having)
    assert room in missing
    assert bool(room) == bool(missing)


@needs_ray
@pytest.mark.parametrize("address", ["127.0.0.1:{port}", "ray://127.0.0.1:10001"])
def test_without_a_cluster_it_is_said_what_to_start(address: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # nobody listens there
        address = address.format(port=taken.getsockname()[1])
        (problem,) = Ray().problems(RANKS, {**os.environ, "RAY_ADDRESS": address})
    assert address in problem
    assert "start a node here by `ray start --head`" in problem


def test_without_the_package_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    (problem,) = Ray().problems(RANKS, {})
    assert "there is no Python package ray; install it" in problem
