"""What all tests share: child processes can import `tests`, and servers are started by one worker at a time."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
if "PYTEST_XDIST_WORKER" in os.environ:  # two workers with two threads each on two cores spend their time waiting
    os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))


@pytest.fixture(scope="module")
def only_servers() -> Iterator[None]:
    """Wait until no other pytest-xdist worker runs a module with servers: two servers prefer the same port."""
    session = os.environ.get("PYTEST_XDIST_TESTRUNUID", "alone")
    path = Path(tempfile.gettempdir()) / f"onward-servers-{session}.lock"
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start rehearsals, plans, exports and the ranks of `train` as forks of one process that has imported torch.

    Each import takes four seconds. The tests in tests/flows start these processes as users do.
    """
    from onward.infra.job import forks
    from tests.support import rank_server

    monkeypatch.setattr(forks, "python", lambda: list(rank_server.command()))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the tests with servers first: they run one after the other, so the other worker should not wait for them."""
    items.sort(key=lambda item: "only_servers" not in getattr(item, "fixturenames", ()))
