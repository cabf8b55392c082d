"""A real Slurm on the hosts of machines.py: slurmctld on h0, slurmd on each, munge for all.

Its two partitions share the hosts: jobs of `urgent` take the hosts of those in `main`, which are requeued. There is no
accounting: what squeue knows of a job is forgotten after MinJobAge.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.machines import NETWORK, Machines
from tests.support.machines import missing as missing_for_hosts
from tests.support.workshop import until

NEEDED = ("slurmctld", "slurmd", "srun", "sbatch", "squeue", "munged")
PATH = f"{os.environ['PATH']}:/usr/sbin:/sbin"

CONF = """
ClusterName=lab
SlurmctldHost=h0({first})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=1
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmdSpoolDir={folder}/spool-%n
TmpFS={folder}/tmp-%n
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ReturnToService=2
KillWait={kill_wait_s}
SlurmdTimeout=30
SlurmctldTimeout=30
InactiveLimit=0
MinJobAge=300
JobRequeue=1
PropagateResourceLimits=NONE
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmdParameters=config_overrides
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=60 State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime={grace_s}
PartitionName=urgent Nodes=ALL MaxTime=60 State=UP PriorityTier=10 PreemptMode=OFF
"""


def missing() -> str:
    """Why there can be no Slurm here; "" if there can."""
    absent = [name for name in NEEDED if not shutil.which(name, path=PATH)]
    return missing_for_hosts() or (f"a Slurm needs {', '.join(absent)}" if absent else "")


@dataclass
class Slurm:
    """The Slurm of a cluster; commands run on h0."""

    cluster: Machines
    folder: Path
    daemons: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def environment(self) -> dict[str, str]:
        return {"SLURM_CONF": str(self.folder / "slurm.conf"), "PATH": PATH}

    def begin(self, name: str, *words: str, host: str) -> None:
        """Start a daemon on a host."""
        if name in self.daemons:  # that of a host which has crashed
            self.daemons[name].kill()
            self.daemons[name].wait(20)
        with (self.folder / f"{name}.out").open("ab") as output:
            self.daemons[name] = subprocess.Popen(
                [*self.cluster.on(host), *words],
                env={**os.environ, **self.environment},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def join(self, host: str) -> None:
        """Start slurmd on a host, and wait until it takes jobs."""
        (self.folder / f"tmp-{host}").mkdir(exist_ok=True)
        self.begin(f"slurmd-{host}", "slurmd", "-D", "-N", host, host=host)
        until(
            lambda: self.said("sinfo", "-h", "-N", "-n", host, "-p", "main", "-o", "%T").strip() == "idle", limit_s=60
        )

    def call(
        self, *words: str, environment: Mapping[str, str] = os.environ, host: str = "h0", limit_s: float = 60.0
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on a host to its end."""
        return subprocess.run(
            [*self.cluster.on(host), *words],
            env={**environment, **self.environment, "TMPDIR": self.cluster.temporary[host][-1]},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=limit_s,
        )

    def said(self, *words: str) -> str:
        """What a command of Slurm prints."""
        return self.call(*words).stdout

    def state(self, job: str) -> str:
        """The state of a job, such as RUNNING."""
        return self.said("squeue", "-h", "-j", job, "--states=all", "-o", "%T").strip()

    def close(self) -> None:
        for process in self.daemons.values():
            process.kill()
            process.wait(20)


@contextlib.contextmanager
def slurm(cluster: Machines, *, cpus: int = 4, grace_s: int = 30, kill_wait_s: int = 30) -> Iterator[Slurm]:
    """Slurm on all hosts of a cluster, each with so many CPUs.

    grace_s: time of a preempted job until it is killed. kill_wait_s: time between SIGTERM and SIGKILL.
    """
    folder = cluster.folder / "slurm"
    for name in ("", "state", "munge"):
        (folder / name).mkdir()
    key = folder / "munge" / "key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o600)
    hosts = [f"h{number}" for number in range(cluster.number)]
    nodes = [
        f"NodeName={host} NodeAddr={NETWORK}.{10 + number} NodeHostname={host} CPUs={cpus} RealMemory=4000"
        for number, host in enumerate(hosts)
    ]
    values = {"folder": folder, "first": f"{NETWORK}.10", "grace_s": grace_s, "kill_wait_s": kill_wait_s}
    (folder / "slurm.conf").write_text(CONF.format(nodes="\n".join(nodes), **values))
    found = Slurm(cluster, folder)
    munge = ["munged", "--foreground", "--force", f"--socket={folder}/munge/socket", f"--key-file={key}"]
    munge += [f"--{name}-file={folder}/munge/{name}" for name in ("pid", "log", "seed")]
    try:
        found.begin("munged", *munge, host="h0")
        until((folder / "munge" / "socket").exists, limit_s=20)
        found.begin("slurmctld", "slurmctld", "-D", "-i", host="h0")
        for host in hosts:
            found.join(host)
        yield found
    finally:
        found.close()
