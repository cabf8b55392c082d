"""Send to the store of a run what its flow has written at its end, such as the exported file."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

from onward.flows.running.flow_guard import SIGNALLED
from onward.tasks.storing.run_sender import send_rest
from onward.tasks.storing.signs_of_life import signs_of_life
from onward.trainer.run.directory import RunDir
from onward.trainer.run.remote.stored_run import record_in

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
