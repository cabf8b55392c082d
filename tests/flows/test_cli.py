"""The command line: help texts, output as tables and JSON, names of runs, errors."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import numpy as np
import onnx
import pytest
from typer.core import TyperGroup as Group
from typer.main import get_command
from typer.testing import CliRunner

from onward.flows import cli
from onward.flows.examples.folders import FOLDERS
from onward.flows.planning.whole_run import RunPlan
from onward.flows.run_state import run_index
from onward.flows.run_state.costs import bits_per_byte
from onward.flows.run_state.run_status import describe, held_out_text
from onward.flows.run_state.runs import all_runs, command_to_continue, find_run, locked
from onward.flows.running.local_run import prefect_server
from onward.flows.shown.terminal_tables import config_lines, meanings, outcome, table
from onward.infra.servers import services
from onward.tasks.checks.rehearsing import Preparation
from onward.trainer import errors as errors_module
from onward.trainer.config.loading import build_config, load_config
from onward.trainer.config.losses import LossConfig
from onward.trainer.config.run_config import RunConfig
from onward.trainer.config.section import Section, table_type
from onward.trainer.config.sections.metrics import MetricConfig
from onward.trainer.errors import ConfigError, OnwardError, RuntimeUnavailable
from onward.trainer.events import EventWriter, Started
from onward.trainer.run.directory import RunDir
from onward.trainer.run.machine import this_machine
from onward.trainer.run.outcomes.ending_kinds import EXIT_STATUSES
from onward.trainer.run.records import AttemptResult, RankError, RunIdentity, TrainResult, write_record
from tests.support.graphs import tiny_transformer
from tests.support.shards import make_shards

CONFIGS = sorted((Path(cli.__file__).parent / "configs").glob("*.toml"))


def onward(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Run a command in this process; return its output."""
    with pytest.raises(SystemExit) as end:
        cli.app(list(words))
    assert not end.value.code
    return capsys.readouterr().out


def make_run(
    home: Path, run_id: str, name: str, created_at: str = "2026-01-01T00:00:00+00:00", *, config_name: str = ""
) -> RunDir:
    run = RunDir(home / "runs" / run_id)
    config = build_config(
        {"name": name, "model": {"path": "m.onnx"}, "data": {"source": "d"}, "train": {"num_steps": 9}}
    )
    write_record(run.config, config)
    identity = RunIdentity(run_id=run_id, name=name, created_at=created_at, model_sha256="0", config_name=config_name)
    write_record(run.identity, identity)
    return run


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ONWARD_HOME", str(tmp_path))
    return tmp_path


def test_help_loads_no_slow_module() -> None:
    """Importing any of these packages would make the help take more than half a second."""
    shown = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "onward.flows.cli", "--help"],
        check=True,
        capture_output=True,
        text=True,
    )
    loaded = {line.rpartition("|")[2].strip().partition(".")[0] for line in shown.stderr.splitlines()}
    assert "typer" in loaded
    assert not loaded & {"torch", "onnx", "onnx2torch", "prefect", "mlflow", "pandas", "numpy", "pydantic", "mpi4py"}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_printed_configuration_loads_to_the_same_configuration(path: Path, tmp_path: Path) -> None:
    config = load_config(path, ["optimizer.weights=[{pattern='*bias*', weight_decay=0}]", "data.inputs={a=['b','c']}"])
    (tmp_path / "again.toml").write_text("\n".join(config_lines(config)))
    assert load_config(tmp_path / "again.toml") == config


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_an_example_configuration_begins_with_its_command(path: Path) -> None:
    opening, name = path.read_text().split("\n\n[")[0], path.stem
    with_files = f"onward example {name}\n#   onward run {name}/{path.name}"
    assert (with_files if name in FOLDERS else f"onward run flows/configs/{path.name}") in opening


def settings_of(section: type[Section], name: str) -> Iterator[str]:
    """The settings of a table, and of the tables in it, such as [data.image]."""
    for key, field in section.model_fields.items():
        yield f"{name}.{key}"
        if table := table_type(field.annotation):
            yield from settings_of(table, f"{name}.{key}")


def test_every_setting_has_a_meaning(capsys: pytest.CaptureFixture[str]) -> None:
    printed = json.loads(onward(capsys, "config", str(CONFIGS[0]), "--json"))
    sections = {name: table_type(RunConfig.model_fields[name].annotation) for name in printed["config"]}
    sections |= {"loss": LossConfig, "metrics": MetricConfig}
    settings = {key for name, section in sections.items() if section for key in settings_of(section, name)}
    assert settings == set(meanings()) == set(printed["meanings"])
    assert all(printed["meanings"].values())


def test_a_reference_model_is_written_and_described(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "new" / "gpt2.onnx"
    sizes = ["--vocab-size", "16", "--sequence-length", "8", "--num-layers", "1", "--num-heads", "1", "--width", "8"]
    facts = json.loads(onward(capsys, "reference", "gpt2", *sizes, "-o", str(target), "--json"))
    assert facts["inputs"] == ["input_ids"]
    assert facts["bytes"] == target.stat().st_size


def test_a_run_is_found_by_id_name_directory_and_last(home: Path) -> None:
    older = make_run(home, "aaaa-1", "digits")
    newer = make_run(home, "aabb-2", "digits", "2026-01-02T00:00:00+00:00")
    for text, expected in [("aaaa", older), ("aabb-2", newer), ("digits", newer), ("last", newer)]:
        assert find_run(text) == expected
    assert find_run(str(older.root)) == older


def test_an_ambiguous_or_unknown_run_is_refused_with_the_newest_runs(home: Path) -> None:
    with pytest.raises(ConfigError, match="there are no runs under"):
        find_run("last")
    make_run(home, "aaaa-1", "digits")
    make_run(home, "aabb-2", "text")
    with pytest.raises(ConfigError, match=r"'aa' may be digits \(aaaa-1\), text \(aabb-2\): .*2 ids begin or end"):
        find_run("aa")
    with pytest.raises(ConfigError, match=r"no run has the name or id 'zz'; the newest runs are digits \(aa"):
        find_run("zz")


def test_a_run_is_found_by_its_own_name_and_by_its_configurations_which_says_which_it_took(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = make_run(home, "019f1ba2-0001-7000-8000-00000001face", "mlp-1", config_name="mlp")
    second = make_run(home, "019f1ba2-0001-7000-8000-00000002beef", "mlp-2", "2026-01-02", config_name="mlp")
    other = make_run(home, "019f1ba2-0001-7000-8000-00000003cafe", "mlp-1-1", "2026-01-03", config_name="mlp-1")
    assert [find_run(text) for text in ("mlp-2", "mlp-1-1", "0002beef", "1face")] == [second, other, second, first]
    assert capsys.readouterr().err == ""
    assert find_run("mlp") == second
    assert capsys.readouterr().err == "onward: mlp: mlp-2 (0002beef), the newest of 2 of that name\n"
    assert find_run("mlp-1") == first, "a run's own name means that run"
    assert "mlp-1 (0001face); it is also a configuration's name, of mlp-1-1 (0003cafe)" in capsys.readouterr().err
    with pytest.raises(
        ConfigError, match=r"'019f1ba2-0001' may be mlp-1-1 .*, mlp-2 .*, mlp-1 .*: give a name, or more"
    ):
        find_run("019f1ba2-0001")  # Prefect's scheduled runs begin with their time
    with pytest.raises(ConfigError, match="no run has the name or id ''"):
        find_run("")
    make_run(home, "019f1ba2-0001-7000-8000-00000004face", "face-1", config_name="face")
    with pytest.raises(ConfigError, match=r"'face' may be .*face-1 .*: .*2 ids .*a configuration with 1 runs"):
        find_run("face")


def test_a_command_that_a_message_names_has_the_runs_name_unless_others_may_have_it(home: Path) -> None:
    assert command_to_continue(make_run(home, "aaaa-1", "mlp-3", config_name="mlp")) == "onward resume mlp-3"
    assert command_to_continue(make_run(home, "aaaa-2", "mlp")) == "onward resume aaaa-2"


def test_the_state_of_a_run_is_read_from_its_files_alone(home: Path) -> None:
    run = make_run(home, "aaaa-1", "digits")
    assert describe(run).state == "interrupted"
    attempt = run.begin_attempt()
    events = EventWriter(run.events, attempt=attempt, rank=0)
    events.emit(Started(step=0, num_steps=9))
    events.scalars(3, loss=0.5)
    events.close()
    error = RankError(attempt=1, rank=1, host="h", step=3, cause="ValueError: bad", traceback="", at_ms=1)
    write_record(run.rank_error(attempt, 1), error)
    described = describe(run)
    assert (described.state, described.step, described.num_steps) == ("failed", 3, 9)
    assert described.values == {"train/loss": 0.5}
    assert described.error == "rank 1 on h, step 3: ValueError: bad"
    stopped = AttemptResult(attempt=1, status="stopped", step=3, samples_seen=1, metrics={}, elapsed_s=1.0)
    write_record(run.result(attempt), stopped)
    record = TrainResult(status="stopped", attempts=1, step=3, samples_seen=1, metrics={}, elapsed_s=1.0)
    write_record(run.train, record)
    assert describe(run).state == "stopped"
    run.begin_attempt()  # resumed, and killed before its first record
    assert describe(run).state == "interrupted", "the record of an earlier attempt says nothing about this one"
    run.fence.write_text(str(attempt))


def test_one_flow_at_a_time_locks_a_run_and_the_run_is_running_meanwhile(home: Path) -> None:
    run = make_run(home, "aaaa-1", "digits")
    with locked(run):
        assert describe(run).state == "running"
        with pytest.raises(ConfigError, match="another flow"), locked(run, timeout_s=0.0):
            pass
    assert describe(run).state == "interrupted"
    with locked(run, timeout_s=0.0):
        pass


def test_runs_lists_the_newest_first(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(home, "aaaa-1", "digits")
    make_run(home, "bbbb-2", "text", "2026-01-02T00:00:00+00:00")
    assert [run["name"] for run in json.loads(onward(capsys, "runs", "--json"))["runs"]] == ["text", "digits"]
    assert onward(capsys, "runs").splitlines()[1].startswith("text ")
    assert len(all_runs()) == 2


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("identity.json", "{"),
        ("identity.json", "\udcff"),
        ("attempt", "many"),
        ("export/model.json", "[]"),
        ("errors/001-rank-00000.json", "{}"),
        ("rehearsal.json", ""),
    ],
)
def test_a_damaged_run_is_named_and_hides_no_other_run(
    home: Path, capsys: pytest.CaptureFixture[str], file: str, content: str
) -> None:
    make_run(home, "aaaa-1", "digits")
    damaged = make_run(home, "bbbb-2", "text", "2026-01-02T00:00:00+00:00")
    damaged.begin_attempt()
    path = damaged.root / file
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content.encode(errors="surrogateescape"))
    cli.app(["runs", "--json"], standalone_mode=False)
    shown = capsys.readouterr()
    found = {run["run_id"]: run for run in json.loads(shown.out)["runs"]}
    assert found["aaaa-1"]["state"] == "interrupted"
    assert found["bbbb-2"]["state"] == "damaged"
    assert str(path) in found["bbbb-2"]["error"]
    cli.app(["runs"], standalone_mode=False)
    assert str(path) in capsys.readouterr().err
    assert describe(find_run("aaaa")).name == "digits"
    with pytest.raises(OnwardError, match=file):
        describe(find_run("bbbb"))


def test_a_table_shortens_no_cell(capsys: pytest.CaptureFixture[str]) -> None:
    table([("a", "x" * 300), ("long name", "y")])
    assert capsys.readouterr().out == "a          " + "x" * 300 + "\nlong name  y\n"


def test_the_table_of_a_run_shows_before_and_after() -> None:
    facts = {
        "before": {"evaluation/accuracy": 0.1},
        "after": {"evaluation/accuracy": 0.98},
        "test": {"test/accuracy": 0.97},
        "bits_per_byte": {},
        "worst_classes": ["shirt: F1 0.5", "coat: F1 0.6"],
        **dict.fromkeys(("exported", "ended_early", "to_go_on", "data", "report", "promotion"), ""),
        "parity": 1e-6,
        "rounding": 0.0,
        "model": "/m.onnx",
        "directory": "/run",
        "mlflow_run_id": "abc",
        "registered": "digits version 1",
        "prefect_url": "http://p",
        "step": 5,
        "elapsed_s": 2.0,
        "attempts": 1,
        "throughput": "640 samples/s",
    }
    rows = dict(outcome(facts))
    assert (rows["worst classes"], rows[""]) == ("shirt: F1 0.5", "coat: F1 0.6")
    assert rows["throughput"] == "640 samples/s"
    assert "throughput" not in dict(outcome({**facts, "throughput": ""})), "of a run of an earlier version"
    assert rows["accuracy"] == "0.1000 -> 0.9800"
    assert rows["test accuracy"] == "0.9700"
    assert rows["MLflow"] == "run abc, digits version 1"
    assert rows["to look at it"] == "onward ui"


def test_a_uniform_prediction_needs_8_bits_per_byte_and_compressors_need_less_for_repeated_text() -> None:
    bits = bits_per_byte(math.log(256), b"abcd" * 1000)
    assert bits["model"] == pytest.approx(8.0)
    assert bits["xz -9"] < bits["model"]
    assert bits["gzip -9"] < 1.0


def test_the_compressors_get_the_bytes_that_the_evaluation_predicts(home: Path) -> None:
    text = home / "text"
    text.mkdir()
    for number in range(4):
        (text / f"{number}.py").write_bytes(bytes([65 + number]) * 100)
    data = {"source": str(text), "evaluation_fraction": 0.25, "sequence_length": 10}
    run = RunDir(home / "runs" / "aaaa-1")
    config = build_config({"model": {"path": "m.onnx"}, "data": data, "train": {"num_steps": 9}})
    write_record(run.config, config)
    directory, _, _ = make_shards(config.data, None, home / "cache")
    run.shards.symlink_to(directory)
    held_out = held_out_text(run)  # of one file, less the first byte, which nothing precedes
    assert len(held_out) == 100
    assert held_out[:99] == held_out[:1] * 99
    assert held_out[99:] == b"\0"


def test_config_prints_toml(capsys: pytest.CaptureFixture[str]) -> None:
    printed = tomllib.loads(onward(capsys, "config", str(CONFIGS[0]), "train.num_steps=7", "train.num_epochs=0"))
    assert printed["train"]["num_steps"] == 7
    assert set(printed) == set(RunConfig.model_fields)


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A configuration file of a tiny GPT-2 with tied input and output embedding."""
    text = np.random.default_rng(0).integers(0, 32, (40, 9))
    np.savez(tmp_path / "data.npz", input_ids=text[:, :-1], label=text[:, 1:])
    onnx.save(tiny_transformer(), tmp_path / "model.onnx")
    (tmp_path / "small.toml").write_text(
        "[model]\npath = 'model.onnx'\n[data]\nsource = 'data.npz'\n"
        "[train]\nglobal_batch_size = 8\ngradient_accumulation_steps = 2\nnum_steps = 1\n"
    )
    return tmp_path / "small.toml"


@pytest.mark.usefixtures("forked")
def test_plan_shows_stages_memory_and_messages(capsys: pytest.CaptureFixture[str], small: Path) -> None:
    layout = ("parallel.data=2", "parallel.tensor=2", "parallel.pipeline=2")
    shown = onward(capsys, "plan", str(small), *layout)
    assert "data 2 x tensor 2 x pipeline 2 = 8" in shown
    assert "1f1b, bubble 33.3%" in shown
    for title in (
        "stages",
        "memory of one rank",
        "sent and received",
        "sharded over tensor-parallel ranks",
        "replicated on every tensor-parallel rank",
        "steps and time of the training",
        "disk, at most at a time",
        "settings that differ from the defaults",
    ):
        assert f"\n{title}" in shown
    found = json.loads(onward(capsys, "plan", str(small), *layout, "--json"))
    assert found["num_ranks"] == 8
    assert RunPlan.model_validate({key: value for key, value in found.items() if key != "num_ranks"}).num_ranks == 8


@pytest.mark.slow  # how it weighs them: tests/trainer/parallel/planning/test_planner.py
def test_plan_with_auto_compares_all_layouts(capsys: pytest.CaptureFixture[str], small: Path) -> None:
    shown = onward(capsys, "plan", str(small), "parallel='auto'", "launch.num_ranks=4", "parallel.memory_gib=0.5")
    assert "of 0.5 GiB" in shown
    assert shown.count("\n  - data ") == 5
    with pytest.raises(ConfigError, match="no division of 4 ranks fits"):
        Preparation(
            load_config(small, ["parallel.sizes=auto", "launch.num_ranks=4", "parallel.memory_gib=1e-5"])
        ).plan()


def test_down_says_when_nothing_runs(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(home.parent))  # elsewhere other tests may have killed something
    assert json.loads(onward(capsys, "down", "--json")) == {"stopped": [], "left": [], "removed": []}


def test_deploying_without_a_server_says_how_to_start_one(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(services, "configured_prefect", lambda: "")
    for started in ({}, {"prefect": "http://127.0.0.1:4200"}):  # nothing, or a server without a worker
        monkeypatch.setattr(services, "running", lambda home, started=started: started)
        with pytest.raises(RuntimeUnavailable, match="start both with `onward up`"), prefect_server(start=False):
            pass


def ending(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *words: str) -> tuple[int, str]:
    """Run a command that fails, in this process; return its exit status and its stderr."""
    monkeypatch.setattr(sys, "argv", ["onward", *words])
    with pytest.raises(SystemExit) as end:
        cli.main()
    return int(end.value.code or 0), capsys.readouterr().err


def test_up_with_a_configured_server_says_how_to_start_a_worker_for_it(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(services, "configured_prefect", lambda: "http://elsewhere/api")
    status, said = ending(capsys, monkeypatch, "up")
    assert status == 3
    assert "http://elsewhere/api is configured" in said
    assert "`python -m onward.flows.deploying.worker`" in said


def test_a_run_of_another_home_is_refused_with_the_home_to_set(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(home / "other", "aaaa-1", "digits")
    status, said = ending(capsys, monkeypatch, "resume", str(run.root))
    assert (status, said.count("\n")) == (2, 3)
    assert f"set ONWARD_HOME={home.resolve() / 'other'}" in said


def test_a_path_that_cannot_be_written_is_reported_in_one_line(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (home / "file").touch()
    target = home / "file" / "x.onnx"
    status, said = ending(capsys, monkeypatch, "reference", "squeezenet", "--image-size", "17", "-o", str(target))
    assert (status, said.count("\n")) == (3, 3)
    assert f"cannot use {home / 'file'}: " in said


def test_an_unforeseen_error_is_one_line_with_the_file_of_its_traceback(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> list[Any]:
        raise TypeError("a list is not a number")

    monkeypatch.setattr(run_index, "listed_runs", fail)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    status, said = ending(capsys, monkeypatch, "runs")
    assert (status, said.count("\n")) == (1, 3)
    found = re.search(
        r"^  - unexpected TypeError: a list is not a number; the traceback is in (\S+)\. This .*$", said, re.M
    )
    assert found
    report = Path(found[1]).read_text()
    assert report.startswith("onward runs\nTraceback (most recent call last):")
    assert 'raise TypeError("a list is not a number")' in report
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "absent"))
    status, said = ending(capsys, monkeypatch, "runs")
    assert status == 1
    assert said.startswith("Traceback")
    assert "a list is not a number; the traceback is above" in said


def test_a_full_disk_is_reported_in_one_line(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for file, place in (("/home/me/big", "/home/me/big"), (None, str(home))):

        def fail(file: str | None = file) -> list[Any]:
            raise OSError(errno.ENOSPC, "No space left on device", file)

        monkeypatch.setattr(run_index, "listed_runs", fail)
        status, said = ending(capsys, monkeypatch, "runs")
        assert status == 3
        heading, problem, to_do = said.splitlines()
        assert heading == "onward runs: the machine cannot run it: MPI, servers, devices, memory or disk"
        assert problem.startswith(f"  - No space left on device: the disk of {place} has ")
        assert problem.endswith(
            " bytes free; make room (`onward gc` lists what may go), then `onward resume`, or the command again"
        )
        assert to_do.startswith("To do: correct what is listed, such as a full disk")


def walk(group: Group) -> Iterator[tuple[str, Any]]:
    """Every command below a group, with its name."""
    for name, command in group.commands.items():
        if isinstance(command, Group):
            yield from walk(command)
        else:
            yield name, command


def test_every_help_text_is_a_sentence_with_an_example_and_its_exit_statuses() -> None:
    root = get_command(cli.app)
    assert isinstance(root, Group)
    for name, command in walk(root):
        summary, ending = (command.help or "").split("\n")[0], command.epilog or ""
        assert re.fullmatch(r"[A-Z][a-z]+ .{10,90}\.", summary), summary
        assert re.search(rf"^  onward ((reference|deployments) )?{name}\b", ending, re.M), "an example line"
        assert "\nExit status:\n    0  done" in ending
        assert [option.name for option in command.params if not getattr(option, "help", None)] == []


def test_the_help_lists_the_exit_status_of_every_error() -> None:
    errors = [kind for kind in vars(errors_module).values() if isinstance(kind, type)]
    raised = {kind.exit_code for kind in errors if issubclass(kind, errors_module.OnwardError)}
    assert raised <= set(EXIT_STATUSES)
    # 1 is a bug: no command ends with it on purpose but `onward diff`
    ends = [end for command, end in cli.COMMANDS["Train"] if command in (cli.training.run, cli.training.resume)]
    assert len(ends) == 2
    for end in ends:
        assert raised - {1} <= {int(line.split()[0]) for line in end.partition("Exit status:")[2].strip().splitlines()}


def test_the_command_line_accepts_the_variants_of_the_configuration() -> None:
    from typing import get_args

    from onward.flows.commands.models import VariantKind
    from onward.trainer.config.sections.results import ExportConfig

    (kinds, _) = get_args(ExportConfig.model_fields["variants"].annotation)
    assert tuple(VariantKind) == get_args(kinds)


def test_every_number_of_an_option_has_a_least_and_a_greatest_value() -> None:
    def open_ends(command: Any, words: tuple[str, ...]) -> list[str]:
        found = [
            f"{' '.join(words)} {option.name}"
            for option in command.params
            if {int, float} & {option.type_descriptor.annotation, *get_args(option.type_descriptor.annotation)}
            and None in (option.min, option.max)
        ]
        inner = getattr(command, "commands", {})
        return found + [each for name, other in inner.items() for each in open_ends(other, (*words, name))]

    assert open_ends(get_command(cli.app), ()) == []


@pytest.mark.parametrize(
    "words",
    [
        ("squeezenet", "--num-classes", "99999999999999"),
        ("squeezenet", "--num-classes", "10000000"),
        ("squeezenet", "--dropout", "nan"),
        ("gpt2", "--width", "65536", "--num-heads", "16"),
        ("gpt2", "--vocab-size", "9" * 5000),
    ],
)
def test_a_reference_model_larger_than_the_memory_is_refused_before_it_is_taken(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(this_machine, "free_host_memory", lambda: 16 << 30)
    result = CliRunner().invoke(cli.app, ["reference", *words, "-o", str(tmp_path / "model.onnx")])
    assert isinstance(result.exception, ConfigError) or result.exit_code == 2
    assert not (tmp_path / "model.onnx").exists()


@pytest.mark.slow
def test_a_command_without_enough_memory_says_so_and_writes_nothing(tmp_path: Path) -> None:
    limited = f"ulimit -v {900 << 10}; exec {sys.executable} -m onward.flows.cli reference gpt2 -o model.onnx"
    one_thread = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(["bash", "-c", limited], cwd=tmp_path, env=one_thread, capture_output=True, text=True)
    assert ended.returncode == 3, ended.stderr
    assert re.search(r"this command needs more memory than it can get; [\d,]+ MiB are free", ended.stderr)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("words", [("config", "a" * 5000), ("run", "a" * 5000), ("doctor", "a" * 5000)])
def test_a_word_that_is_too_long_for_a_path_is_a_wrong_command_line(
    words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["onward", *words])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    assert len(capsys.readouterr().err) < 1000
