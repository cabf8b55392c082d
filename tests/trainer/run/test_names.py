"""Names of runs: given once, also to runs that begin at the same time, and kept."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from onward.trainer.errors import RuntimeUnavailable
from onward.trainer.run.directory import RunDir
from onward.trainer.run.names import name_of, short_id, take_name
from onward.trainer.run.records import RunIdentity, write_record

MANY = """
import sys
from onward.trainer.run.names import take_name
sys.stdin.readline()
print(*(take_name("mlp", f"{sys.argv[1]}-{number}") for number in range(20)))
"""


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ONWARD_HOME", str(tmp_path))
    return tmp_path


def existing(home: Path, run_id: str, name: str) -> RunDir:
    run = RunDir(home / "runs" / run_id)
    write_record(run.identity, RunIdentity(run_id=run_id, name=name, created_at="2026", model_sha256=""))
    return run


def test_a_run_takes_the_next_number_of_its_configuration_and_keeps_it() -> None:
    assert [take_name("mlp", "a"), take_name("mlp", "b"), take_name("cnn", "c")] == ["mlp-1", "mlp-2", "cnn-1"]
    assert take_name("mlp", "a") == "mlp-1", "a retry"
    assert take_name("mlp-1", "d") == "mlp-1-1"


def test_a_name_that_another_run_has_is_left_out() -> None:
    assert take_name("mlp-2-1", "trial 1", wanted="mlp-2-1") == "mlp-2-1"
    assert take_name("mlp-2", "d") == "mlp-2-2"
    assert take_name("mlp-2-1", "of another sweep", wanted="mlp-2-1") == "mlp-2-1-1"


def test_processes_that_take_names_at_once_get_different_ones() -> None:
    """Each begins when all have been started, so that they run at the same time."""
    takers = [
        subprocess.Popen(
            [sys.executable, "-c", MANY, str(number)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for number in range(3)
    ]
    for taker in takers:
        assert taker.stdin
        taker.stdin.write("go\n")
        taker.stdin.flush()
    names = [name for taker in takers for name in taker.communicate(timeout=60)[0].split()]
    assert sorted(names) == sorted(f"mlp-{number}" for number in range(1, 61))


def test_runs_of_an_earlier_version_are_counted_and_a_lost_database_gives_no_name_twice(home: Path) -> None:
    for number in range(6):
        existing(home, f"old-{number}", "mlp")
    assert take_name("mlp", "a") == "mlp-7"
    existing(home, "a", "mlp-7")
    (home / "names.db").unlink()
    assert take_name("mlp", "b") == "mlp-8"


def test_a_run_that_has_begun_keeps_its_name_without_the_database(home: Path) -> None:
    run = existing(home, "old", "mlp")
    assert name_of(run, "mlp") == "mlp"
    assert not (home / "names.db").exists()


def test_a_damaged_database_is_named(home: Path) -> None:
    (home / "names.db").write_bytes(b"no database" * 100)
    with pytest.raises(
        RuntimeUnavailable, match=r"names\.db, which has the names of all runs, cannot be used: .*delete it"
    ):
        take_name("mlp", "a")


def test_a_short_id_is_the_end_because_scheduled_runs_share_their_beginning() -> None:
    assert short_id("019f1ba2-0001-7000-8000-00000002beef") == "0002beef"
