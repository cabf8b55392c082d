"""Show in the store of a run that its flow lives, and send the rest at the end, such as the exported file."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterator

from onward.flows.running.flow_guard import SIGNALLED
from onward.tasks.storing.run_sender import send_rest
from onward.trainer.run.directory import RunDir
from onward.trainer.run.records import read_record
from onward.trainer.run.remote.stored_run import ALIVE_PERIOD_S, Sending, StoredRun, record_in

log = logging.getLogger(__name__)


@contextlib.contextmanager
def stored(run: RunDir) -> Iterator[None]:
    """Show in the store of a run that its flow lives, which is the block; send behind it what is not there yet."""
    try:
        with signs_of_life(run):
            yield
    finally:
        # the run has ended already: neither an error nor a second Ctrl-C may change how
        try:
            if record_in(run).exists():
                send_rest(run, log)
        except (Exception, *SIGNALLED) as error:
            log.warning("not everything is in the store: %s: %s; `onward resume` sends it", type(error).__name__, error)


@contextlib.contextmanager
def signs_of_life(run: RunDir) -> Iterator[None]:
    """Let the store show that the flow of a run lives, as long as the block does, also before and behind the training.

    A machine that wants to go on with the run waits for that, and takes the run if there is none.
    """
    ends = threading.Event()

    def give() -> None:
        count = time.time_ns()  # that no former flow of the run has written
        pause_s = 0.0
        while not ends.wait(pause_s):
            pause_s = 2.0  # most runs have no store, and this costs them next to nothing
            if not record_in(run).exists():
                continue
            # also after an error: a store that is away is reported by whoever sends, and whatever else happens, a
            # flow without signs of life would lose its run to another machine
            pause_s = ALIVE_PERIOD_S
            with contextlib.suppress(Exception):
                sending = read_record(record_in(run), Sending)
                StoredRun(sending.url).give_sign_of_life(sending.number, count)
                count += 1

    threading.Thread(target=give, name="signs of life", daemon=True).start()
    try:
        yield
    finally:
        ends.set()
