"""Make parts of shards for another process: reads a PartStep from each line of stdin, and prints a Reply for each.

    python -m onward.trainer.data.storage.part_program FOLDER

part_processes.py starts it, and sends the steps; it ends with stdin.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from onward.trainer.data.storage.part_processes import READY, Reply
from onward.trainer.data.storage.written_parts import PartStep, open_maker


def main(folder: Path) -> None:
    """Answer until stdin ends."""
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    # what a library prints is no reply
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    maker = open_maker(folder)
    replies.write(READY)
    replies.flush()
    for line in sys.stdin.buffer:
        step = PartStep.model_validate_json(line)
        try:
            reply = Reply(result=maker.make(step))
        # the other process raises it again, as if it had met the full disk itself
        except OSError as error:
            what = error.strerror or str(error)
            reply = Reply(os_error=(error.errno or 0, what, str(error.filename or "")))
        replies.write(reply.model_dump_json().encode() + b"\n")
        replies.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
