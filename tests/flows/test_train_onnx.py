"""Whole runs through the command line, and what is left after a process of them was killed."""

from __future__ import annotations

import contextlib
import datetime
import inspect
import json
import re
import signal
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args, get_type_hints

import onnx
import psutil
import pytest

from onward.flows.shown.terminal_tables import meanings
from onward.flows.train_onnx import MISSED_AFTER, is_missed, train_onnx
from onward.infra.mlflow.tracking import Tracker
from onward.trainer.config.loading import build_config
from onward.trainer.config.run_config import RunConfig
from onward.trainer.config.section import table_type
from onward.trainer.run.directory import RunDir
from onward.trainer.run.history import RunHistory
from onward.trainer.run.outcomes.attempt_endings import endings
from onward.trainer.run.recorded.preprocessing_record import Preprocessing
from onward.trainer.run.records import ExportedModel, RunIdentity, read_record
from onward.trainer.run.timing.phases import phases
from onward.trainer.run.timing.time_account import time_account
from tests.support.report_runs import Page
from tests.support.terminals import Terminal
from tests.support.workshop import Workshop, finished, ranks_of, reached, repeated, until

pytestmark = pytest.mark.usefixtures("only_servers")


def whole(test: Callable[..., None]) -> Callable[..., None]:
    """Mark a test of whole runs, each of which takes tens of seconds."""
    for mark in (pytest.mark.mpi, pytest.mark.timeout(900)):
        test = mark(test)
    return test


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workshop]:
    workshop = Workshop.made(tmp_path_factory.mktemp("workshop"))
    yield workshop
    workshop.close()


@pytest.fixture(scope="module")
def terminal() -> Terminal:
    """The terminal that the run `undisturbed` was started in."""
    return Terminal(80)


@pytest.fixture(scope="module")
def undisturbed(workshop: Workshop, terminal: Terminal) -> dict[str, Any]:
    """The result of a run that is not interrupted."""
    config = str(workshop.root / "config.toml")
    process = workshop.start("run", config, "monitor.report=true", stderr=terminal.stream)
    try:
        return finished(process)
    except AssertionError as error:
        raise AssertionError(terminal.screen) from error
    finally:
        terminal.close()


def check_report(workshop: Workshop, run: RunDir, *texts: str) -> Page:
    """The report of a run: its account adds up, MLflow has the file, and Prefect shows the summary and its place."""
    found = time_account(run, RunHistory.of(run.events))
    assert found is not None
    assert sum(found.parts.values()) == pytest.approx(found.wall_s, rel=0.01)
    page = Page(run.report.read_text())
    assert all(text in page.text for text in texts)
    identity = read_record(run.identity, RunIdentity)
    client = Tracker(identity.tracking_uri)._client
    assert "report.html" in [each.path for each in client.list_artifacts(identity.mlflow_run_id)]
    shown = workshop.prefect_artifact("report", run)
    assert texts[0] in shown
    assert f"`{run.report}`" in shown
    return page


def gone(workshop: Workshop) -> bool:
    return not workshop.processes()


@whole
def test_a_run_writes_the_same_graph_with_better_weights(workshop: Workshop, undisturbed: dict[str, Any]) -> None:
    given, trained = onnx.load_model(workshop.root / "model.onnx"), onnx.load_model(undisturbed["model"])
    assert [node.op_type for node in trained.graph.node] == [node.op_type for node in given.graph.node]
    assert trained.graph.input == given.graph.input
    assert trained.graph.output == given.graph.output
    assert undisturbed["after"]["evaluation/accuracy"] > undisturbed["before"]["evaluation/accuracy"]
    assert undisturbed["parity"] < 1e-3
    assert (undisturbed["state"], undisturbed["attempts"]) == ("exported", 1)
    assert "4 rows (training), 4 and 2 rows (evaluation); 6 of 6 weights with a gradient" in undisturbed["rehearsal"]
    log = (Path(undisturbed["directory"]) / "flow.log").read_text()
    assert undisturbed["rehearsal"] in log
    assert "WARNING onward.tasks.configure: folded_batch_norm: 2 convolutions have a bias" in log
    (run,) = workshop.mlflow_runs(RunDir(Path(undisturbed["directory"])))
    assert run.info.status == "FINISHED"
    assert 0 < run.data.metrics["perf/data_wait"] < 1
    assert 0 < undisturbed["values"]["train/data_wait"] < 1
    check_report(
        workshop,
        RunDir(Path(undisturbed["directory"])),
        "The run is done, and its trained file passed all checks.",
        "a derivative of the loss by",  # the guard
    )
    recipe = read_record(Path(undisturbed["model"]).with_name("preprocessing.json"), Preprocessing)
    assert (recipe.model, recipe.sha256) == (Path(undisturbed["model"]).name, undisturbed["sha256"])
    card = Path(undisturbed["model"]).with_name("README.md").read_text()
    for name, value in undisturbed["after"].items():
        before = undisturbed["before"][name]
        assert f"| `{name.removeprefix('evaluation/')}` | {before:.4g} | {value:.4g} |" in card
    assert f"| SHA-256 | `{undisturbed['sha256']}` |" in card
    exported = read_record(RunDir(Path(undisturbed["directory"])).exported, ExportedModel)
    assert (exported.card, exported.sha256) == (
        Path(undisturbed["model"]).with_name("README.md"),
        undisturbed["sha256"],
    )
    assert f"exported at step {exported.step}." in card
    until(lambda: gone(workshop), limit_s=15)


@whole
def test_a_run_shows_its_phases_and_its_training_in_a_terminal_and_leaves_no_line_twice(
    terminal: Terminal, undisturbed: dict[str, Any]
) -> None:
    # `undisturbed` is what stood on stdout, one JSON object, while stderr had the view
    assert undisturbed["state"] == "exported"
    written = re.sub(r"\x1b\[[0-9;]*m", "", terminal.text)  # without its colours
    for shown in (
        *("onward  start: settings and servers", "config-1  preflight"),
        *("train: the ranks load the model", "config-1  export: the file is written", "config-1  report"),
        *("evaluation", "loss ", "learning rate 0.001", "samples/s", "of the time", "node ", "checkpoint", " left"),
    ):
        assert shown in written, shown
    # where the rehearsal beside the start of the servers was done, the phase is over before the view is drawn again
    assert "config-1  configure: rehearsal" in written or re.search(r"configure \d:\d\d", written)
    recorded = [each.kind for each in phases(RunDir(Path(undisturbed["directory"])))]
    assert recorded[:4] == ["start", "configure", "preflight", "data"]
    left = re.sub(r"(?m)^(.{80})\n", r"\1", terminal.screen)  # a path that is longer than a row is one line
    assert repeated(left) == []
    assert "attempt 1 ended at step 600: the run is done" in left
    assert not re.search("━|samples/s|checkpoint  step", left)  # the view is gone
    assert "step 0:" not in left


@whole
def test_the_logs_of_a_run_have_no_line_twice(undisturbed: dict[str, Any]) -> None:
    run = RunDir(Path(undisturbed["directory"]))
    flow, ranks = (run.root / "flow.log").read_text(), run.log(1).read_text()
    assert "INFO onward.tasks.checkpoint: step 600: step-000000600 is complete" in flow
    assert "step 600: saved step-000000600" in ranks
    assert "begins at step 0 of 600; it is a new run" in ranks
    assert repeated(flow + ranks) == []  # as `onward logs` prints them


@whole
def test_a_run_has_one_name_in_prefect_mlflow_and_commands_and_a_resume_of_it_starts_nothing(
    workshop: Workshop, undisturbed: dict[str, Any]
) -> None:
    run = RunDir(Path(undisturbed["directory"]))
    assert undisturbed["name"] == "config-1"
    (mlflow_run,) = workshop.mlflow_runs(run)
    assert mlflow_run.info.run_name == "config-1"
    with contextlib.closing(sqlite3.connect(workshop.home / "prefect" / "prefect.db")) as shown:
        names = "select flow_run.name from flow_run join flow on flow.id = flow_id where flow.name = 'train-onnx'"
        before = shown.execute(names).fetchall()
    assert ("config-1",) in before
    process = workshop.start("resume", "config-1")
    out, said = process.communicate(timeout=120)
    assert process.returncode == 0
    assert json.loads(out)["sha256"] == undisturbed["sha256"]
    assert said.startswith("onward: config-1 is finished, and nothing was started. To train further, start a new run")
    with contextlib.closing(sqlite3.connect(workshop.home / "prefect" / "prefect.db")) as shown:
        assert shown.execute(names).fetchall() == before
    assert workshop.onward("status", run.root.name[-8:])["name"] == "config-1"


@whole
@pytest.mark.slow  # the next test kills a rank every time
@pytest.mark.parametrize("victim", ["rank", "mpirun"])
def test_after_a_killed_rank_or_mpirun_the_retry_writes_the_same_bytes_as_an_undisturbed_run(
    victim: str, workshop: Workshop, undisturbed: dict[str, Any]
) -> None:
    process = workshop.start("run", str(workshop.root / "config.toml"))
    run = workshop.new_run()
    until(lambda: reached(run, 100), limit_s=300)
    rank = ranks_of(run)[1]
    launcher = rank.parent()
    assert launcher is not None
    assert launcher.parent() == psutil.Process(process.pid)
    (rank if victim == "rank" else launcher).kill()
    facts = finished(process)
    assert facts["attempts"] == 2
    assert facts["sha256"] == undisturbed["sha256"]
    assert len(workshop.mlflow_runs(run)) == 1
    until(lambda: gone(workshop), limit_s=15)


@whole
@pytest.mark.slow
def test_after_a_killed_rank_the_flow_tries_again_and_after_a_killed_flow_resume_writes_the_same_bytes(
    workshop: Workshop, undisturbed: dict[str, Any]
) -> None:
    process = workshop.start("run", str(workshop.root / "config.toml"), "monitor.report=true")
    run = workshop.new_run()
    until(lambda: reached(run, 100), limit_s=300)
    ranks_of(run)[1].kill()
    until(lambda: run.current_attempt == 2 and reached(run, 200, attempt=2), limit_s=300)
    process.kill()  # of which no process is left
    _, said = process.communicate()
    assert repeated(said) == []
    # without a terminal there are lines when something is new, at most every 10 s; which ones depends on the machine
    assert re.search(r"^onward: (start|configure|preflight|data|train|attempt \d|step \d+/\d+)", said, re.M)
    assert re.search(r"^attempt 2: 2 ranks, log: ", said, re.M)
    assert "\x1b" not in said
    until(lambda: gone(workshop), limit_s=15)
    assert workshop.onward("status", run.root.name)["state"] in ("stopped", "interrupted")
    facts = workshop.onward("resume", run.root.name[:8])
    assert Path(facts["directory"]) == run.root
    assert facts["attempts"] == 3
    assert facts["sha256"] == undisturbed["sha256"]
    first, second, third = (each.kind for each in endings(run))
    assert (first, third) == ("rank_lost", "done")
    assert second in ("preempted", "rank_lost")  # whether the ranks of the killed flow could still save
    assert facts["ending"].startswith("done: attempt 3 ended at step ")
    (mlflow_run,) = workshop.mlflow_runs(run)
    assert mlflow_run.info.status == "FINISHED"
    assert mlflow_run.data.tags["onward.ending.kind"] == "done"
    until(lambda: gone(workshop), limit_s=15)
    assert workshop.prefect_states()[run.root.name] == "CRASHED"
    page = check_report(workshop, run, "The run is done, and its trained file passed all checks.")
    assert "attempts" in page.sections
    account = time_account(run, RunHistory.of(run.events))
    assert account is not None
    assert min(account.parts["lost work"], account.parts["recovery"], account.idle_s) > 0


@whole
@pytest.mark.slow
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_run_saves_a_checkpoint_prints_the_resume_command_and_resumes(
    number: signal.Signals, status: int, workshop: Workshop, undisturbed: dict[str, Any]
) -> None:
    process = workshop.start("run", str(workshop.root / "config.toml"), "monitor.report=true")
    run = workshop.new_run()
    until(lambda: reached(run, 100), limit_s=300)
    process.send_signal(number)
    _, error = process.communicate(timeout=120)
    assert process.returncode == status, error[-3000:]
    described = workshop.onward("status", run.root.name)
    assert described["state"] == "stopped"
    assert run.checkpoint(described["step"]).is_dir()
    assert f"to continue from step {described['step']}: onward resume {described['name']}" in error
    assert workshop.prefect_states()[run.root.name] == "CANCELLED"
    assert [each.info.status for each in workshop.mlflow_runs(run)] == ["KILLED"]
    check_report(workshop, run, "The run was stopped before its end.")
    assert workshop.onward("resume", "last")["sha256"] == undisturbed["sha256"]


def test_the_flows_parameters_are_the_fields_of_the_configuration_and_resume() -> None:
    parameters = inspect.signature(train_onnx.fn).parameters
    assert set(parameters) == {*RunConfig.model_fields, "resume"}
    types = get_type_hints(train_onnx.fn)
    for name, field in RunConfig.model_fields.items():
        closed = parameters[name].default is None  # a section that the form shows closed (flows/form.py)
        assert types[name] == (field.annotation | None if closed else field.annotation)  # type: ignore[operator]
        if name in ("model", "data", "train"):  # without a default, so that Prefect's form asks for them
            assert parameters[name].default is inspect.Parameter.empty
        elif not closed:
            assert parameters[name].default == field.get_default()
    assert parameters["resume"].default == ""


def test_the_parameters_of_a_deployed_run_are_few_and_give_the_whole_configuration_back() -> None:
    sections = {"model": {"path": "/m.onnx"}, "data": {"source": "digits"}, "train": {"num_steps": 20}}
    config = build_config(
        {"name": "a", **sections, "optimizer": {"learning_rate": 0.01, "weights": [{"pattern": "*"}]}}
    )
    parameters = config.model_dump(mode="json", exclude_defaults=True)
    assert len(json.dumps(parameters, indent=1).splitlines()) < 30
    assert build_config(parameters) == config


def test_prefects_form_describes_every_section_and_every_setting() -> None:
    schema = train_onnx.parameters.model_dump()
    assert set(schema["properties"]) == {*RunConfig.model_fields, "resume"}
    assert schema["properties"]["name"]["description"] == RunConfig.model_fields["name"].description
    assert schema["properties"]["resume"]["description"]
    for key, meaning in meanings().items():
        section, *tables, name = key.split(".")
        annotation = RunConfig.model_fields[section].annotation
        model = table_type(annotation) or get_args(annotation)[0]  # of several, such as [[loss]]
        shown = schema["properties"][section]
        shown = shown["anyOf"][0] if "anyOf" in shown else shown
        assert shown.get("items", shown)["$ref"] == f"#/definitions/{model.__name__}"
        for table in tables:  # such as [data.image]
            model = table_type(model.model_fields[table].annotation)
            assert model is not None
        definition = schema["definitions"][model.__name__]
        assert definition["description"] == inspect.getdoc(model)
        assert " ".join(definition["properties"][name]["description"].split()) == meaning


@pytest.mark.parametrize(
    ("late", "tags", "began", "expected"),
    [
        (2 * MISSED_AFTER, ["auto-scheduled"], False, True),
        (MISSED_AFTER / 2, ["auto-scheduled"], False, False),
        (2 * MISSED_AFTER, [], False, False),
        (2 * MISSED_AFTER, ["auto-scheduled"], True, False),  # a retry, perhaps of a run that configure refused
    ],
)
def test_only_a_scheduled_run_that_is_over_an_hour_late_and_has_not_begun_is_missed(
    late: datetime.timedelta,
    tags: list[str],
    began: bool,
    expected: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ONWARD_HOME", str(tmp_path))
    monkeypatch.setenv("PREFECT__FLOW_RUN_ID", "the-run")
    if began:
        (tmp_path / "runs" / "the-run").mkdir(parents=True)
    assert is_missed(datetime.datetime.now(datetime.UTC) - late, tags=tags) is expected
