"""Find the rank that the others waited for, from the stacks that the ranks of a job wrote when it was ended.

Every rank writes the Python stacks of its threads when it gets SIGTERM, in a signal handler in C: also inside a C call
that holds the GIL, and after SIGSTOP, because mpirun sends SIGCONT first. One that hangs in the kernel writes none.

    rank 0    sum_over_world (norms.py:57): dist.all_reduce(totals)      waits for the others
    rank 1    read_rows (my_loss.py:12): while not done: pass            computes: this one is named
    rank 2    sum_over_world (norms.py:57): dist.all_reduce(totals)      waits for the others
"""

from __future__ import annotations

import linecache
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

NUM_LINES = 3
"""Innermost lines of a rank's stack that a message shows."""

_THREAD = re.compile(r"^(?:Current thread|Thread) 0x[0-9a-f]+.*\(most recent call first\):$")
_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+|\?\?\?) in (?P<name>.*)$')
_LIBRARY = re.compile(r"/(?:site-packages|dist-packages|lib/python3[^/]*)/(?!.*/?onward/)")
# a call on the line at which a rank's own code waits, in C code that has no Python frames
_WAITING = re.compile(
    r"\b(?:wait|wait_\w+|all_reduce\w*|all_gather\w*|all_to_all\w*|reduce_scatter\w*|broadcast|barrier|reduce|gather|"
    r"scatter|send|recv|isend|irecv|sum_over_world|gather_bytes|init_process_group|Bcast|Allgather|Allreduce|tolist)"
    r"(?:\.default)?\("
)
_DISTRIBUTED = "/torch/distributed/"
# functions of the standard library in which a thread waits for another thread, for work or for a signal
_IDLE = {
    *("wait", "_wait_for_tstate_lock", "join", "result", "get", "_worker", "select", "acquire", "accept", "poll"),
    "sigwait",  # for a request to stop (trainer/distributed/failures.py)
}


@dataclass(frozen=True)
class Frame:
    """One line of a stack."""

    file: str
    line: int
    name: str
    """Of the function."""

    @property
    def text(self) -> str:
        """The line of source, if the file can be read here."""
        return linecache.getline(self.file, self.line).strip()

    @property
    def is_library(self) -> bool:
        """Whether it is in an installed package or the standard library."""
        return _LIBRARY.search(self.file) is not None

    def __str__(self) -> str:
        short = "/".join(self.file.split("/")[-2:])
        return f"{self.name} ({short}:{self.line})"


@dataclass(frozen=True)
class RankStack:
    """The stacks of one rank's threads, innermost frame first; the main thread's first of all."""

    threads: tuple[tuple[Frame, ...], ...]

    @property
    def state(self) -> Literal["unknown", "waits", "computes", "thread"]:
        """`unknown`: it wrote no stack. `waits`: for other ranks. `thread`: for a thread of its own, which does not."""
        if not self.threads:
            return "unknown"
        # the main thread decides first, because the training loop runs in it
        if waits_for_ranks(self.threads[0]):
            return "waits"
        if not is_idle(self.threads[0]):
            return "computes"
        working = self._working
        return "waits" if working and waits_for_ranks(working) else "thread"

    @property
    def _working(self) -> tuple[Frame, ...]:
        """The stack of the first other thread that does something."""
        return next((frames for frames in self.threads[1:] if not is_idle(frames)), ())

    @property
    def place(self) -> str:
        """The innermost lines of the thread on which the rank's progress depends."""
        frames = self._working if self.state == "thread" and self._working else self.threads[0]
        # of libraries only what is innermost: the user looks for a line of their own, or of Onward
        own = [*frames[:1], *(frame for frame in frames[1:] if not frame.is_library)]
        prefix = "waits for a thread of its own, which is in " if self.state == "thread" else "is in "
        source = next((f": `{frame.text}`" for frame in own[:1] if frame.text), "")
        calls = "".join(f", called by {frame}" for frame in own[1:NUM_LINES])
        return f"{prefix}{own[0]}{source}{calls}"


def waits_for_ranks(frames: tuple[Frame, ...]) -> bool:
    """Return whether a thread waits for other ranks: in torch.distributed, or at a line that calls a collective."""
    for frame in frames:
        if _DISTRIBUTED in frame.file:
            return True
        # the innermost line of own code: libraries between it and the wait have no names that say more
        if not frame.is_library:
            return _WAITING.search(frame.text) is not None
    return False


def is_idle(frames: tuple[Frame, ...]) -> bool:
    """Return whether a thread waits for another thread, or for work."""
    return bool(frames) and frames[0].is_library and frames[0].name in _IDLE


def parse_stacks(text: str) -> RankStack:
    """Return the stacks of the last time that faulthandler wrote the threads of a process into `text`."""
    dumps: list[list[tuple[Frame, ...]]] = [[]]
    for block in _blocks(text):
        dumps[-1].append(block)
        # the main thread is the oldest, and faulthandler writes the newest one first
        if block and block[-1].name != "_bootstrap":
            dumps.append([])
    # the last dump that is not empty: one that was cut off may follow
    found = next((threads for threads in reversed(dumps) if threads), [])
    return RankStack(tuple(reversed(found)))


def parse_exception(text: str) -> RankStack:
    """Return the stack of the exception that ended a rank, as Python prints it: the outermost frame first."""
    # of a chain of exceptions the first is where it began
    first = text.split("\n\nDuring handling of", 1)[0].split("\n\nThe above exception", 1)[0]
    found = re.findall(r'^  File "(.*)", line (\d+), in (.*)$', first, re.MULTILINE)
    frames = tuple(Frame(file, int(line), name) for file, line, name in reversed(found))
    return RankStack((frames,) if frames else ())


def _blocks(text: str) -> list[tuple[Frame, ...]]:
    blocks: list[list[Frame]] = []
    for line in text.splitlines():
        if _THREAD.match(line):
            blocks.append([])
        elif (found := _FRAME.match(line)) and blocks:
            number = int(found["line"]) if found["line"].isdigit() else 0
            blocks[-1].append(Frame(found["file"], number, found["name"]))
    return [tuple(block) for block in blocks if block]


@dataclass(frozen=True)
class Hang:
    """Which rank a job waited for."""

    rank: int
    sentence: str


def explain_hang(stacks: Mapping[int, RankStack], *, stopped: Mapping[int, str]) -> Hang:
    """Return the rank that does not wait in a collective, which is the likely cause, and a sentence about it.

    stacks: of every rank. stopped: what the launcher saw of ranks that a signal had stopped.
    """
    in_collectives = [rank for rank, stack in stacks.items() if stack.state == "waits"]
    waiting = [rank for rank in in_collectives if rank not in stopped]
    others = f"; {_ranks(waiting)} for it" if waiting else ""
    # a stopped rank is the cause for certain, so the first one is named at once
    for rank, why in stopped.items():
        stack = stacks.get(rank, RankStack(()))
        return Hang(rank, f"{why}{f'; it {stack.place}' if stack.threads else ''}{others}")
    # a rank that computes is more likely the cause than one without a stack; ties go to the lowest rank
    order = {"computes": 0, "thread": 1, "unknown": 2}
    suspects = sorted((r for r, s in stacks.items() if s.state in order), key=lambda r: (order[stacks[r].state], r))
    if not suspects:
        first = min(stacks)
        places = "; ".join(f"rank {rank} {stack.place}" for rank, stack in list(stacks.items())[:4])
        return Hang(
            first,
            "every rank waits for the others: a rank was stopped meanwhile, the network between them is broken, or "
            f"they are in different collectives: {places}",
        )
    culprit = suspects[0]
    if stacks[culprit].state == "unknown":
        return Hang(
            culprit,
            "it wrote no stack, so its host does not answer, or it is in a call of the kernel that does not return"
            f"{others}",
        )
    also = f"; rank {', '.join(map(str, suspects[1:4]))} does not wait for others either" if suspects[1:] else ""
    return Hang(culprit, f"it {stacks[culprit].place}{others}{also}")


def _ranks(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]} waits"
    return f"{len(ranks)} ranks ({', '.join(map(str, ranks[:4]))}{', ...' * (len(ranks) > 4)}) wait"
