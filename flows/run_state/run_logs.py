"""Print the logs of a run: those of its flow, of its newest attempt, or of one rank of it; follow them to its end.

onward logs RUN              flow.log, then train.log of the newest attempt
onward logs RUN --rank 1     what rank 1 printed, its traceback and its stack
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from onward.flows.run_state.runs import find_run, is_running, reference_to
from onward.trainer.errors import ConfigError, say
from onward.trainer.run.directory import RunDir, read_config
from onward.trainer.run.outcomes.ending_kinds import SIGNED

TICK_S = 0.3


def show_logs(text: str, *, rank: int | None = None, follow: bool = False) -> None:
    """Print the logs of the run that `text` names; with `follow` also what is added, until the run ends.

    Raises ConfigError for a rank that the run does not have, and when there is no log yet and none is followed.
    """
    run = find_run(text)
    if rank is not None and run.config.exists() and not 0 <= rank < (size := read_config(run).world_size):
        raise ConfigError(f"{reference_to(run)} has the ranks 0 to {size - 1}, and no rank {rank}")
    shown = _Shown(rank)
    while True:
        goes_on = follow and is_running(run)  # read first: the last pass prints all that was written before the end
        for path in files(run, rank):
            shown.print_new(path)
        if not goes_on:
            break
        time.sleep(TICK_S)
    if not shown.printed:
        what = "" if rank is None else f" of rank {rank}"
        say(f"{reference_to(run)} has no log{what} yet: {run.root}")


def files(run: RunDir, rank: int | None) -> Sequence[Path]:
    """Return the files that may have something to show, in their order."""
    attempt = run.current_attempt
    if rank is None:
        # before the first attempt the preflight is the only job that was started
        ranks = [run.log(attempt)] if attempt else [run.root / "preflight" / "preflight.log"]
        return [run.root / "flow.log", *ranks, *([run.stacks(attempt)] if attempt else [])]
    return [run.log(attempt), run.traceback(attempt, rank), run.stack(attempt, rank)] if attempt else []


class _Shown:
    """Which part of each file was printed."""

    def __init__(self, rank: int | None) -> None:
        self.printed = False
        self._rank = rank
        self._offsets: dict[Path, int] = {}
        self._writers: dict[Path, int | None] = {}
        self._last: Path | None = None

    def print_new(self, path: Path) -> None:
        """Print the complete lines that a file has more than before, under a heading with its name."""
        lines = list(self._new_lines(path))
        if lines and path != self._last:
            print(f"{chr(10) if self.printed else ''}==> {path} <==")
            self._last = path
        for line in lines:
            print(line)
        self.printed |= bool(lines)
        sys.stdout.flush()

    def _new_lines(self, path: Path) -> Iterator[str]:
        try:
            with path.open("rb") as file:
                file.seek(self._offsets.get(path, 0))
                text = file.read()
        except OSError:
            return
        # the last line may be half-written; the next call begins with it
        whole = text[: text.rfind(b"\n") + 1]
        self._offsets[path] = self._offsets.get(path, 0) + len(whole)
        for line in whole.decode(errors="replace").splitlines():
            # a traceback has many lines, of which only the first is signed
            if signed := SIGNED.match(line):
                self._writers[path] = int(signed[1] or signed[2])
            # the other files are of one rank alone
            if self._rank is None or path.name != "train.log" or self._writers.get(path) == self._rank:
                yield line
