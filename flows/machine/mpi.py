"""Whether mpirun starts ranks that find each other: first MPI alone, then what each rank of a run does before training.

Call from the main thread: mpirun is told to end with the thread that has started it.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from onward.flows.machine.machine_findings import Finding
from onward.infra.job.hosts import read_hostfile
from onward.infra.job.launcher import LaunchError
from onward.infra.job.mpirun import Mpirun
from onward.tasks.launching.jobs import job_of
from onward.trainer.config.loading import build_config
from onward.trainer.config.sections.ranks import LaunchConfig
from onward.trainer.distributed.mpi_report import MpiReport
from onward.trainer.errors import OnwardError
from onward.trainer.extras import how_to_install
from onward.trainer.run.directory import RunDir, onward_home
from onward.trainer.run.machine.this_machine import most_gpus
from onward.trainer.run.records import Networks, RankReport, read_record, write_record

VERSION_S = 10.0
MPI_S = 30.0
RANKS_S = 120.0
TAIL_LINES = 6
MOST_GPUS = 8
"""Ranks of the check on one machine at most."""


def mpi(hostfile: str = "", networks: tuple[str, ...] = ()) -> Iterator[Finding]:
    """Start two ranks (with a hostfile one on each host) by MPI alone, and then ranks that connect through torch.

    networks: by which the hosts of the hostfile reach each other.
    """
    try:
        program = Mpirun().program()
    except LaunchError as error:
        yield Finding.problem("MPI", str(error), how_to_install("mpi"))
        return
    version = _version(program)
    # a single rank sends no message
    ranks = max(2, len(read_hostfile(Path(hostfile)))) if hostfile else 2
    # the directory of a job must exist on all hosts
    place = onward_home() if hostfile else Path(tempfile.gettempdir())
    try:
        place.mkdir(parents=True, exist_ok=True)
        folder = tempfile.TemporaryDirectory(dir=place, prefix=".doctor-mpi-", ignore_cleanup_errors=True)
    except OSError as error:
        what = f"the ranks were not started: no directory can be made in {place}: {error.strerror}"
        yield Finding.problem("MPI", what, "set ONWARD_HOME and TMPDIR to directories of yours")
        return
    with folder as name:
        write_record(RunDir(Path(name)).networks, Networks(networks=networks))
        found = list(_alone(Path(name), program, version, hostfile, ranks))
        yield from found
        # torch would fail at the same place, and with a message that explains less
        if not any(each.level == "problem" for each in found):
            yield from _with_torch(Path(name), hostfile, ranks)


def _version(program: Path) -> str:
    """Return what `mpirun --version` says, such as "Open MPI 5.0.11"; "" if it does not end."""
    try:
        said = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=VERSION_S).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return re.sub(r"^mpirun \((.*?)\)", r"\1", (said.splitlines() or [""])[0])


def _alone(folder: Path, program: Path, version: str, hostfile: str, ranks: int) -> Iterator[Finding]:
    ended = _job(folder, ("onward.trainer.distributed.mpi_report", str(folder)), ranks, MPI_S, hostfile)
    reports = [read_record(path, MpiReport) for path in sorted(folder.glob("mpi-*.json"))]
    if ended or not reports:
        fix = f"run `{program} -n {ranks} hostname`; if that fails, repair MPI, else reinstall mpi4py for this MPI"
        what = f"{program} ({version or 'unknown version'}) did not start {ranks} ranks: {ended or 'no rank reported'}"
        yield Finding.problem("MPI", what, fix)
        return
    library = reports[0].library
    hosts = sorted({each.host for each in reports})
    # mpi4py with the library of another MPI starts each process as a world of its own
    if any(each.size != ranks for each in reports):
        what = f"{program} is {version}, but mpi4py {reports[0].mpi4py} has loaded {library}: {ranks} processes each "
        what += f"see a world of {reports[0].size}"
        fix = "put the mpirun of that library first in PATH, or let MPI4PY_LIBMPI name the libmpi.so of this mpirun"
        yield Finding.problem("MPI", what, fix)
        return
    expected = ranks * (ranks + 1) // 2
    if wrong := [each for each in reports if each.total != expected]:
        what = f"MPI's all-reduce of {ranks} ranks gave {wrong[0].total} in place of {expected}"
        yield Finding.problem("MPI", what, "repair MPI: a training would be wrong")
        return
    where = f"on {', '.join(hosts)}" if hostfile else "on this machine"
    what = f"{program} ({version}) starts {ranks} ranks {where}; mpi4py {reports[0].mpi4py} with {library}"
    if re.findall(r"\d+", version)[:2] != re.findall(r"\d+", library)[:2]:
        fix = "let MPI4PY_LIBMPI name the libmpi.so of this mpirun"
        yield Finding.note("MPI", f"{what}: other versions", fix)
    elif not version.startswith("Open MPI 5"):
        fix = "Onward is tested with Open MPI 5; stopping and error messages of another MPI may differ"
        yield Finding.note("MPI", what, fix)
    else:
        yield Finding.ok("MPI", what)


def _with_torch(folder: Path, hostfile: str, ranks: int) -> Iterator[Finding]:
    """Run the preflight of a run: connect through torch, one all-reduce on the devices of the ranks."""
    gpus, _ = most_gpus()
    if gpus and not hostfile:
        ranks = min(gpus, MOST_GPUS)
    run = RunDir(folder)
    settings = {
        # the preflight opens neither model nor data
        "model": {"path": folder / "none.onnx"},
        "data": {"source": "digits"},
        "train": {"num_steps": 1, "global_batch_size": ranks},
        "parallel": {"data": ranks},
        "launch": {"hostfile": hostfile, "device": "auto", "heartbeat_timeout_s": RANKS_S * 3 / 5},
    }
    write_record(run.config, build_config(settings))
    ended = _job(folder, ("onward.trainer", "preflight", str(folder)), ranks, RANKS_S, hostfile)
    try:
        first = run.first_error(0)
        reports = [read_record(path, RankReport) for path in sorted((folder / "preflight").glob("rank-*.json"))]
    except OnwardError as error:
        first = None
        reports = []
        ended = str(error)
    # the first rank with an error explains the others, which lost it
    if first or ended or len(reports) != ranks:
        said = f"rank {first.rank} on {first.host}: {first.cause}" if first else ended
        what = f"MPI works, but {ranks} rank{'s' * (ranks > 1)} did not connect through torch: "
        what += said or f"only {len(reports)} reported"
        yield Finding.problem("ranks", what, "correct what is named; a run would fail, too")
        return
    if wrong := [each for each in reports if each.all_reduce != each.all_reduce_expected]:
        what = f"an all-reduce on {wrong[0].device} by {wrong[0].backend} gave {wrong[0].all_reduce:g} in place of "
        what += f"{wrong[0].all_reduce_expected:g}"
        yield Finding.problem("ranks", what, "replace the device: a training would be wrong")
        return
    devices = ", ".join(sorted({f"{each.device} ({each.gpu})" if each.gpu else each.device for each in reports}))
    versions = reports[0].versions
    shown = ", ".join(f"{name} {version}" for name, version in versions.items() if name not in ("MPI", "mpi4py"))
    what = f"{ranks} rank{'s' * (ranks > 1)} connected by {reports[0].backend} on {devices}; {shown}"
    yield Finding.ok("ranks", what)
    differing = []
    for name, version in versions.items():
        if any(report.versions.get(name) != version for report in reports):
            differing.append(name)
    if differing:
        listed = "; ".join(f"{each.host}: {each.versions.get(differing[0])}" for each in reports)
        what = f"the hosts have other versions of {', '.join(differing)}: {listed}"
        yield Finding.problem("ranks", what, "install the same versions on all hosts")


def _job(folder: Path, module: Sequence[str], ranks: int, limit_s: float, hostfile: str) -> str:
    """Run a module on ranks; return how they ended if they did not end well, with the last lines of their output."""
    log = folder / "ranks.log"
    # both checks write to the same log
    log.unlink(missing_ok=True)
    job = job_of(
        LaunchConfig(launcher="mpirun", hostfile=hostfile, start_timeout_s=limit_s),
        module,
        num_ranks=ranks,
        run_dir=folder,
        log=log,
    )
    try:
        outcome = job.run()
    except (LaunchError, OSError) as error:
        return str(error)
    if outcome.reason == "exited" and outcome.returncode == 0:
        return ""
    how = f"not within {limit_s:g} s" if outcome.reason != "exited" else f"mpirun ended with {outcome.returncode}"
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()][-TAIL_LINES:]
    return "\n  | ".join([f"{how}. Its last lines:", *lines]) if lines else how
