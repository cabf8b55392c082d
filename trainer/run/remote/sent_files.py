"""What of a run directory goes to a store beside the checkpoints: its records, its event log, and the exported file.

    config.json, identity.json, attempts/001/result.json ...    as they are
    events.jsonl                                                in segments of complete lines; the last one grows
    export/                                                     once its model.json says that it is complete
    shards/manifest.json                                        not the shards, which are made again from the data

What other machines make again is left out: logs, caches, views of the event log, how much of it MLflow has.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from onward.trainer.run.directory import RunDir
from onward.trainer.run.remote.stored_run import StoredFile

RECORDS = (
    *("config.json", "accepted.json", "origins.json", "adjusted.json", "code.json", "remote.json", "rehearsal.json"),
    *("identity.json", "trial.json", "runtime.json", "resolved.json", "attempt", "train.json", "metrics.json"),
    *("packages.txt", "phases.jsonl", "ending.json", "report.html", "shards/manifest.json"),
)
PATTERNS = ("attempts/*/*.json", "errors/*.json", "quantized/*", "classes/*")
SEGMENT_BYTES = 4 << 20
EVENTS = "events.jsonl"


def sent_files(run: RunDir) -> Iterator[tuple[str, Path]]:
    """Yield (name in the run directory, file) of what is sent as it is."""
    paths = [run.root / name for name in RECORDS]
    paths += [path for pattern in PATTERNS for path in sorted(run.root.glob(pattern))]
    if run.exported.exists():
        paths += [path for path in sorted(run.export.rglob("*")) if path.suffix != ".log"]
    for path in paths:
        # a name that begins with a dot is that of a file which is being written
        if path.is_file() and not path.name.startswith("."):
            yield path.relative_to(run.root).as_posix(), path


def segments(run: RunDir, sent: Mapping[str, StoredFile]) -> Iterator[tuple[str, bytes]]:
    """Yield (name, content) of each segment of the event log that is new or longer than it was sent.

    sent: name -> the file, of the segments in the store.
    """
    ends = {start_of(name): start_of(name) + file.bytes for name, file in sent.items()}
    size = run.events.stat().st_size if run.events.exists() else 0
    # the last one is sent again with what was appended, until it is large
    start = max(ends, default=0)
    end = ends.get(start, 0)
    if end == size:
        return
    if end > size:  # the log is shorter than what was sent: it is another one
        start = 0
    elif end - start >= SEGMENT_BYTES:
        start = end
    with run.events.open("rb") as log:
        while True:
            log.seek(start)
            # up to the end of a line, since a segment has whole lines
            content = log.read(SEGMENT_BYTES) + log.readline()
            # what a killed or a writing process has left of a line is sent when it is complete
            complete = content[: content.rfind(b"\n") + 1]
            if not complete:
                return
            yield f"{EVENTS}/{start:012d}", complete
            start += len(complete)
            # what is appended meanwhile belongs to the same segment
            if len(content) < SEGMENT_BYTES:
                return


def start_of(name: str) -> int:
    """Return the position in the event log of a segment's first byte."""
    return int(name.rpartition("/")[2])
