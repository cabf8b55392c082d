"""Several machines on this one: a host is a set of kernel namespaces with a network card, a host name and an sshd.

    namespace "switch":  br0 ---+--- port0     +--- port1     +--- ...
                                    |              |
    namespaces of h0:             eth0 .10       eth0 .11        network, PIDs, mounts and the host's name

Files are shared, as on a cluster with one file system, but for a directory of temporary files: mpirun's daemons name
theirs by the process id, of which each host has its own. A crashed host is first cut off from the network, so that the
others hear nothing more from it, as of a machine without power.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.support.ranks import ROOT
from tests.support.workshop import until

NEEDED = ("ip", "nsenter", "unshare", "sshd", "ssh", "ssh-keygen")
NETWORK = "10.77.31"

BOOT = """
hostname {name}
mount --make-rprivate /
mount --bind {folder}/hosts /etc/hosts
# each start of a host has an id of its own
cat /proc/sys/kernel/random/uuid > {folder}/{name}.boot
mount --bind {folder}/{name}.boot /proc/sys/kernel/random/boot_id
[ -f /root/.bashrc ] && mount --bind /dev/null /root/.bashrc
mkdir -p /run/sshd
ip link set lo up
# the first process of a PID namespace has to reap the others
while :; do sleep 3600 & wait -n; done
"""
SSHD = """
Port 22
ListenAddress {address}
HostKey {folder}/hostkey
AuthorizedKeysFile {folder}/key.pub
StrictModes no
PidFile none
PermitRootLogin prohibit-password
UsePAM no
MaxStartups 100
UseDNS no
SetEnv TMPDIR={temporary}
"""
SSH = """#!/bin/sh
exec ssh -i {folder}/key -o IdentitiesOnly=yes -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null \\
    -o LogLevel=ERROR "$@"
"""


def missing(*more: str) -> str:
    """Why there can be no machines here, or no programs that a test needs on them; "" if there can."""
    absent = [name for name in (*NEEDED, *more) if not shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin:/sbin")]
    if absent:
        return f"hosts of their own need {', '.join(absent)}"
    allowed = subprocess.run(["unshare", "--net", "--uts", "--pid", "--fork", "--mount", "true"], capture_output=True)
    return "hosts of their own need root: they are namespaces" if os.geteuid() or allowed.returncode else ""


@dataclass
class Machines:
    """Hosts h0, h1, ... of one network; commands run on h0."""

    folder: Path
    number: int
    switch: subprocess.Popen[bytes]
    hosts: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    temporary: dict[str, list[str]] = field(default_factory=dict)
    """Host -> its directories of temporary files; it has a new one after each start."""
    commands: dict[str, list[subprocess.Popen[bytes]]] = field(default_factory=dict)
    """Host -> what was started on it."""

    @property
    def agent(self) -> str:
        """The ssh of these hosts, with its key."""
        return str(self.folder / "ssh")

    def hostfile(self, slots: int) -> Path:
        path = self.folder / "hostfile"
        path.write_text("".join(f"h{number} slots={slots}\n" for number in range(self.number)))
        return path

    def boot(self, number: int) -> None:
        """Start a host, and wait until it can be reached over ssh."""
        name, address = f"h{number}", f"{NETWORK}.{10 + number}"
        temporary = tempfile.mkdtemp(prefix=f"{name}-")
        self.temporary[name] = [*self.temporary.get(name, []), temporary]
        values = {"name": name, "folder": self.folder, "address": address, "temporary": temporary}
        (self.folder / f"{name}.sh").write_text(BOOT.format(**values))
        (self.folder / f"{name}.sshd").write_text(SSHD.format(**values))
        spaces = ("--net", "--uts", "--pid", "--fork", "--kill-child", "--mount", "--mount-proc")
        with (self.folder / f"{name}.out").open("ab") as output:
            self.hosts[name] = subprocess.Popen(
                ["unshare", *spaces, "bash", str(self.folder / f"{name}.sh")],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        first = until(lambda: self._first(name), limit_s=20)
        port = f"port{number}"
        with contextlib.suppress(subprocess.CalledProcessError):  # there is none but after a crash
            _ip(self.switch.pid, "link", "del", port)
        _ip(self.switch.pid, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", str(first))
        _ip(self.switch.pid, "link", "set", port, "master", "br0", "up")
        _ip(first, "addr", "add", f"{address}/24", "dev", "eth0")
        _ip(first, "link", "set", "eth0", "up")
        # after a crash h0 has the address of the network card that was there before
        subprocess.run([*self.on("h0"), "ip", "neigh", "flush", "all"], check=True)
        self.serve_ssh(name)

    def serve_ssh(self, name: str) -> None:
        """Start the sshd of a host, and wait until it can be reached."""
        sshd = ["/usr/sbin/sshd", "-f", str(self.folder / f"{name}.sshd"), "-E", str(self.folder / f"{name}.log")]
        until(lambda: subprocess.run([*self.on(name), *sshd]).returncode == 0, limit_s=20)
        until(lambda: subprocess.run([*self.on("h0"), self.agent, name, "true"]).returncode == 0, limit_s=20)

    def _first(self, name: str) -> int:
        """The first process of a host, as this machine numbers it; 0 before it has mounted its own /proc."""
        with contextlib.suppress(psutil.Error, IndexError):
            child = psutil.Process(self.hosts[name].pid).children()[0]
            return int(child.pid) if "bash" in child.name() else 0
        return 0

    def on(self, name: str) -> list[str]:
        """The words that run a command on a host."""
        spaces = ("--net", "--uts", "--pid", "--mount")
        return ["nsenter", "-t", str(self._first(name)), *spaces, f"--wd={Path.cwd()}", "--"]

    def do(self, name: str, *words: str) -> None:
        """Run a command on a host."""
        subprocess.run([*self.on(name), *words], check=True, capture_output=True)

    def start(
        self, words: Sequence[str], environment: Mapping[str, str], log: Path, *, host: str = "h0"
    ) -> subprocess.Popen[bytes]:
        """Start a command on a host."""
        with log.open("wb") as output:
            command = subprocess.Popen(
                [*self.on(host), *words],
                env={**environment, "PRTE_MCA_plm_ssh_agent": self.agent, "TMPDIR": self.temporary[host][-1]},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        self.commands.setdefault(host, []).append(command)
        return command

    def crash(self, name: str) -> None:
        """Cut a host off from the network, then kill all of its processes."""
        _ip(self.switch.pid, "link", "set", f"port{name[1:]}", "nomaster")
        first = self._first(name)
        psutil.Process(first).kill()
        self.hosts[name].wait(20)

    def cut(self, name: str) -> None:
        """Pull the network cable of a host."""
        _ip(self.switch.pid, "link", "set", f"port{name[1:]}", "nomaster")

    def heal(self, name: str) -> None:
        """Put it back."""
        _ip(self.switch.pid, "link", "set", f"port{name[1:]}", "master", "br0")

    @contextlib.contextmanager
    def slow_link(self, name: str, *, megabits_per_s: float, delay_s: float) -> Iterator[None]:
        """Inside, all that a host sends and receives takes `delay_s` longer and goes at a limited rate, each way."""
        port, own, peer = f"port{name[1:]}", f"slow{name[1:]}", f"peer{name[1:]}"
        _ip(self.switch.pid, "link", "add", own, "type", "veth", "peer", "name", peer)
        for link in (own, peer):
            _ip(self.switch.pid, "link", "set", link, "up")
        _ip(self.switch.pid, "link", "set", peer, "master", "br0")
        program = [sys.executable, "-m", "tests.support.slow_link", port, own, str(megabits_per_s), str(delay_s)]
        inside = ["nsenter", "-t", str(self.switch.pid), "--net"]
        relay = subprocess.Popen([*inside, *program], cwd=ROOT, stdout=subprocess.PIPE)
        assert relay.stdout
        try:
            assert relay.stdout.readline() == b"ready\n"
            self.cut(name)
            yield
        finally:
            relay.kill()
            relay.communicate()
            _ip(self.switch.pid, "link", "del", own)
            self.heal(name)

    def reset(self, name: str) -> None:
        """Kill all processes of a host at once: its kernel closes their connections, as at a restart."""
        for process in self.processes(name):
            with contextlib.suppress(psutil.Error):
                process.kill()

    def freeze(self, name: str) -> None:
        """Stop all processes of a host; its kernel goes on, and answers for the connections that they have."""
        for process in self.processes(name):
            process.suspend()

    def thaw(self, name: str) -> None:
        for process in self.processes(name):
            process.resume()
        # nsenter stops together with the command that it waits for
        for command in self.commands.get(name, []):
            if command.poll() is None:
                command.send_signal(signal.SIGCONT)

    def processes(self, name: str) -> list[psutil.Process]:
        """All processes of a host but its first, which stands for its kernel."""
        first = self._first(name)
        space = Path(f"/proc/{first}/ns/pid").readlink()
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(OSError, psutil.Error):
                if process.pid != first and Path(f"/proc/{process.pid}/ns/pid").readlink() == space:
                    found.append(process)
        return found

    def close(self) -> None:
        for process in (*self.hosts.values(), self.switch):
            with contextlib.suppress(psutil.Error):
                for child in psutil.Process(process.pid).children():
                    child.kill()
            process.kill()
            process.wait(20)
        for folder in itertools.chain(*self.temporary.values()):
            shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def machines(folder: Path, number: int) -> Iterator[Machines]:
    """Hosts that see each other and the files of this machine."""
    folder.mkdir()
    for name in ("key", "hostkey"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True)
    addresses = "".join(f"{NETWORK}.{10 + each} h{each}\n" for each in range(number))
    (folder / "hosts").write_text(f"127.0.0.1 localhost\n{addresses}")
    (folder / "ssh").write_text(SSH.format(folder=folder))
    (folder / "ssh").chmod(0o755)
    switch = subprocess.Popen(["unshare", "--net", "sleep", "infinity"])
    found = Machines(folder, number, switch)
    try:
        own = Path("/proc/self/ns/net").readlink()
        until(lambda: Path(f"/proc/{switch.pid}/ns/net").readlink() != own, limit_s=20)
        _ip(switch.pid, "link", "add", "br0", "type", "bridge")
        _ip(switch.pid, "link", "set", "br0", "up")
        for each in range(number):
            found.boot(each)
        yield found
    finally:
        found.close()


def _ip(process: int, *words: str) -> None:
    subprocess.run(["nsenter", "-t", str(process), "--net", "ip", *words], check=True, capture_output=True)
