"""What is wrong with a host is said before anything is started on it: over ssh, on hosts with their own network."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from onward.trainer.run.directory import RunDir
from onward.trainer.run.records import Networks, read_record
from tests.support.machines import Machines, machines, missing
from tests.support.workshop import Workshop

pytestmark = [
    pytest.mark.slow,
    pytest.mark.mpi,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(missing("nft")), reason=missing("nft")),
]
FIREWALL = "add table inet f; add chain inet f i {{ type filter hook input priority 0; }}; add rule inet f i {rule}"
NEW_CONNECTIONS = "tcp dport != 22 ct state new drop"


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workshop]:
    workshop = Workshop.made(tmp_path_factory.mktemp("hosts-asked"))
    workshop.home.mkdir()
    yield workshop
    workshop.close()


@pytest.fixture(scope="module")
def cluster(workshop: Workshop) -> Iterator[Machines]:
    with machines(workshop.root / "machines", 3) as found:
        yield found


def said(workshop: Workshop, cluster: Machines, *words: str, status: int, limit_s: float = 300.0) -> str:
    log = workshop.root / f"{time.monotonic_ns()}.log"
    command = [sys.executable, "-m", "onward.flows.cli", *words]
    ended = cluster.start(command, workshop.environment, log).wait(limit_s)
    text = log.read_text()
    assert ended == status, text[-4000:]
    return text


def run_words(workshop: Workshop, cluster: Machines, *more: str) -> list[str]:
    config = str(workshop.root / "config.toml")
    settings = ["launch.rehearsal='off'", "train.num_steps=20", "train.evaluation_period=0", "monitor.report_to=[]"]
    return ["run", config, *settings, f"launch.hostfile='{cluster.hostfile(1)}'", *more]


def test_everything_that_is_wrong_is_said_at_once_and_nothing_is_started(workshop: Workshop, cluster: Machines) -> None:
    torch = Path(importlib.util.find_spec("torch").origin).with_name("version.py")  # type: ignore[union-attr,arg-type]
    other = workshop.root / "version.py"
    other.write_text(torch.read_text().replace("__version__ = '2.", "__version__ = '1."))
    loop = Path(__file__).parents[2] / "trainer" / "loop.py"
    changed = workshop.root / "loop.py"
    changed.write_text(loop.read_text() + "# changed\n")
    cluster.do("h1", "mount", "--bind", str(other), str(torch))
    cluster.do("h1", "mount", "-t", "tmpfs", "none", str(workshop.home))
    cluster.do("h2", "mount", "--bind", str(changed), str(loop))
    cluster.do("h2", "nft", FIREWALL.format(rule=NEW_CONNECTIONS))
    try:
        text = " ".join(said(workshop, cluster, *run_words(workshop, cluster), status=3).split())
    finally:
        for host, path in (("h1", torch), ("h1", workshop.home), ("h2", loop)):
            cluster.do(host, "umount", str(path))
        cluster.do("h2", "nft", "delete", "table", "inet", "f")
    assert "the hosts have different versions of torch: 2." in text
    assert "on h0, h2; 1." in text
    assert "different versions of Onward (digest of its source): " in text
    assert f"h1 does not see what the first host has written to {workshop.home}: the directory is not shared" in text
    assert "h2 answers ssh, and does not answer at 10.77.31.12:" in text
    assert not (workshop.home / "runs").exists()


def test_docker0_with_one_address_on_all_hosts_just_works(workshop: Workshop, cluster: Machines) -> None:
    for number in range(3):
        cluster.do(f"h{number}", "ip", "link", "add", "docker0", "type", "bridge")
        cluster.do(f"h{number}", "ip", "addr", "add", "172.17.0.1/16", "dev", "docker0")
        cluster.do(f"h{number}", "ip", "link", "set", "docker0", "up")
    # a line without a number of slots is one rank, on a host with two cores, too
    (workshop.root / "bare").write_text("h0\nh1\nh2\n")
    words = run_words(workshop, cluster, f"launch.hostfile='{workshop.root}/bare'", "parallel.data=3")
    text = said(workshop, cluster, *words, "train.global_batch_size=24", status=0)
    (root,) = (workshop.home / "runs").iterdir()
    run = RunDir(root)
    assert read_record(run.networks, Networks).networks == ("10.77.31.0/24",)
    assert [line.split(", ")[0].split()[-1] for line in text.splitlines() if "1 rank on h" in line] == [
        "h0",
        "h1",
        "h2",
    ]
    examined = said(workshop, cluster, "doctor", "--hostfile", f"{workshop.root}/bare", status=0)
    assert "h2 at 10.77.31.12: Python 3." in examined


def test_a_host_of_which_ssh_is_silent_is_named_in_seconds(workshop: Workshop, cluster: Machines) -> None:
    cluster.do("h1", "nft", FIREWALL.format(rule="tcp dport 22 drop"))
    began_at = time.monotonic()
    try:
        text = said(workshop, cluster, "doctor", "--hostfile", str(cluster.hostfile(1)), status=3)
    finally:
        cluster.do("h1", "nft", "delete", "table", "inet", "f")
    assert "h1 does not answer: ssh: connect to host h1 port 22: Connection timed out" in text
    assert "reinstall mpi4py" not in text, "MPI is not tried"
    assert time.monotonic() - began_at < 90


def test_the_hosts_can_be_cut_by_their_tools(cluster: Machines) -> None:
    """The tools of these tests do what they say: a rule that drops nothing would let the tests above pass."""
    cluster.do("h1", "nft", FIREWALL.format(rule=NEW_CONNECTIONS))
    listening = subprocess.Popen([*cluster.on("h1"), sys.executable, "-m", "http.server", "8000"])
    try:
        reached = [*cluster.on("h0"), "bash", "-c", "timeout 3 bash -c '</dev/tcp/10.77.31.11/8000'"]
        assert subprocess.run(reached).returncode == 124
    finally:
        listening.kill()
        listening.wait()
        cluster.do("h1", "nft", "delete", "table", "inet", "f")
