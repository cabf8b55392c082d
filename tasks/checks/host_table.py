"""Ask every host of the hostfile before anything is started on it: one table, and all problems at once, by host.

    reachable by ssh, and at another port, in both directions       the same Python, torch, MPI and Onward
    the directory that all share, and the files of the settings     the time

The networks that ssh used are passed on to MPI (infra/job/mpirun.py): left to itself, it also tries those that no other
host reaches, such as the one of docker0.
"""

from __future__ import annotations

import contextlib
import secrets
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from onward.infra.job.hosts import BUT, Answer, ask_programs, read_hostfile
from onward.infra.job.launcher import LaunchError
from onward.infra.job.mpirun import Mpirun
from onward.tasks.launching.jobs import launcher_of
from onward.trainer.config.named_files import named_files
from onward.trainer.config.rules import Sections
from onward.trainer.config.sections.ranks import LaunchConfig
from onward.trainer.config.sections.results import CheckpointConfig
from onward.trainer.config.urls import url_of
from onward.trainer.run.home import nearest_existing, onward_home
from onward.trainer.run.machine.host_report import LAUNCHER, LINE, SOURCE, HostQuestion, HostReport, network_of
from onward.trainer.run.records import Record

PROGRAM = (sys.executable, "-m", "onward.trainer.run.machine.host_report")
MOST_SKEW_S = 2.0
READ_BY_RANKS = ("model.path", "teacher.path", "loss.file", "model.converters")
"""Settings whose files the ranks open."""


class HostRow(Record):
    """What is known of one host."""

    host: str
    """As the hostfile names it."""
    problems: tuple[str, ...]
    """Sentences with what to do."""
    report: HostReport | None
    """None if it did not answer."""
    skew_s: float = 0.0
    """How much its clock is ahead of the one here."""

    def __str__(self) -> str:
        """Return the row in words."""
        if self.report is None:
            return f"{self.host}: no answer"
        where = f" at {self.report.address}" if self.report.address else ", this host"
        where += ", with a home of its own" if self.report.has_own_home else ""
        versions = ", ".join(f"{name} {version}" for name, version in self.report.versions.items())
        return f"{self.host}{where}: {versions}; clock {self.skew_s:+.1f} s"


class HostTable(Record):
    """What the hosts of a job are and have."""

    rows: tuple[HostRow, ...]

    @property
    def networks(self) -> tuple[str, ...]:
        """The networks that ssh used, such as "10.0.0.0/24"; () where one of them is not known, or for one host."""
        networks = []
        for report in self._reports().values():
            # ssh does not ask this host itself
            if report.address:
                networks += [report.network, network_of(report.head)]
        return tuple(sorted(set(networks))) if all(networks) else ()

    @property
    def own_homes(self) -> tuple[str, ...]:
        """The hosts with a home of their own."""
        return tuple(host for host, report in self._reports().items() if report.has_own_home)

    def _reports(self) -> dict[str, HostReport]:
        return {row.host: row.report for row in self.rows if row.report}

    @property
    def problems(self) -> tuple[str, ...]:
        """What would end a job, a sentence each."""
        found = [problem for row in self.rows for problem in row.problems]
        return (*found, *_different_versions(self._reports()))

    def unready(self) -> dict[str, str]:
        """Return the hosts that cannot be used now, with the reason; those with other versions than this one, too.

        Without a row of this host the first one counts.
        """
        found = {}
        for row in self.rows:
            why = "; ".join(problem.removeprefix(f"{row.host} ") for problem in row.problems)
            if why:
                found[row.host] = f"{BUT}{why}"
        reports = {host: report for host, report in self._reports().items() if host not in found}
        # this host is not asked over ssh, so it has no address
        right = min(reports, key=lambda host: bool(reports[host].address), default="")
        for host, report in reports.items():
            if differing := list(_different_versions({right: reports[right], host: report})):
                found[host] = f"{BUT}{'; '.join(differing)}"
        return found

    @property
    def warnings(self) -> tuple[str, ...]:
        """What is unusual, a sentence each."""
        return tuple(
            f"the clock of {row.host} differs by {row.skew_s:+.1f} s; synchronise it (chrony, systemd-timesyncd): "
            "times of events, durations and schedules come from it"
            for row in self.rows
            if abs(row.skew_s) > MOST_SKEW_S
        )


def ask_hosts(
    launch: LaunchConfig,
    folder: Path,
    files: Mapping[str, str],
    *,
    hosts: Sequence[str] | None = None,
    has_store: bool = False,
) -> HostTable:
    """Ask hosts. folder: what all hosts have to share; a file is in it meanwhile. hosts: None = those of the hostfile.

    files: setting -> the file that it names, which all hosts have to see. has_store: whether hosts may have a home of
    their own, because the run has a store.
    """
    hosts = list(read_hostfile(Path(launch.hostfile))) if hosts is None else hosts
    # a host that has another directory under the same path does not have this text in it
    nonce = secrets.token_hex(8)
    written = folder / f".hosts-{nonce}"
    with contextlib.ExitStack() as stack:
        name = ""
        # that the directory cannot be written is said by whoever writes to it next
        with contextlib.suppress(OSError):
            written.write_text(nonce)
            name = written.name
            stack.callback(written.unlink, missing_ok=True)
        launcher, daemon = _programs(launch)
        question = HostQuestion(
            folder=str(folder),
            nonce=nonce,
            name=name,
            files=dict(files),
            launcher=launcher,
            daemon=daemon,
            has_store=has_store,
        )
        answers = ask_programs(hosts, PROGRAM, question.model_dump_json(), LINE)
    return HostTable(rows=tuple(_row(host, answer) for host, answer in answers.items()))


def host_problems(sections: Sections) -> tuple[str, ...]:
    """Return what would end a run on the hosts of its hostfile, before it has a directory."""
    launch = sections.get("launch")
    # an unreadable hostfile is reported elsewhere
    with contextlib.suppress(OSError, UnicodeDecodeError):
        if isinstance(launch, LaunchConfig) and launch.hostfile and not url_of(launch.hostfile):
            # before the first run there is no home yet, and its nearest parent stands for it
            folder = nearest_existing(onward_home())
            checkpoint = sections.get("checkpoint")
            has_store = isinstance(checkpoint, CheckpointConfig) and bool(checkpoint.store)
            return ask_hosts(launch, folder, files_of_ranks(sections), has_store=has_store).problems
    return ()


def files_of_ranks(sections: object) -> dict[str, str]:
    """Return the files that settings name and ranks open, by their settings. sections: as of `named_files`."""
    found = {}
    for setting, file in named_files(sections):
        if setting in READ_BY_RANKS and not url_of(file.location):
            found[setting] = file.location
    return found


def _programs(launch: LaunchConfig) -> tuple[str, str]:
    """Return mpirun and the daemon that it starts on each host; "" for other launchers, and for an MPI without it."""
    launcher = launcher_of(launch)
    if not isinstance(launcher, Mpirun):
        return "", ""
    try:
        program = launcher.program()
    except LaunchError:
        return "", ""
    daemon = program.with_name("prted")
    return str(program), str(daemon) if daemon.exists() else ""


def _row(host: str, answer: Answer) -> HostRow:
    if answer.problem:
        fix = f"make `ssh {host} true` work here without a password"
        what = f"{host} does not answer: {answer.problem}; {fix}"
        if answer.has_no_program:
            what = f"{host} cannot run Onward ({answer.problem}); make the same environment there, at {sys.prefix}"
        return HostRow(host=host, problems=(what,), report=None)
    report = HostReport.model_validate_json(answer.report)
    problems = [f"{host} {problem}" for problem in report.problems]
    fix = "MPI and the ranks use any port: open the firewall for TCP between all hosts"
    if answer.to_host:
        place = f"{report.address}:{report.port}"
        problems.append(f"{host} answers ssh, and does not answer at {place} ({answer.to_host}); {fix}")
    if answer.to_head:
        problems.append(f"{host} does not reach this host at {report.head} ({answer.to_head}); {fix}")
    return HostRow(host=host, problems=tuple(problems), report=report, skew_s=report.clock - answer.arrived_at)


def _different_versions(reports: Mapping[str, HostReport]) -> Iterator[str]:
    for name in dict.fromkeys(name for report in reports.values() for name in report.versions):
        hosts: dict[str, list[str]] = {}
        for host, report in reports.items():
            # that its daemon is missing is said already
            if name in report.versions or name != LAUNCHER:
                hosts.setdefault(report.versions.get(name, "none"), []).append(host)
        if len(hosts) > 1:
            found = "; ".join(f"{version} on {', '.join(names)}" for version, names in hosts.items())
            fix = "update all hosts to one version" if name == SOURCE else "install the same one on all hosts"
            yield f"the hosts have different versions of {name}: {found}; {fix}"
