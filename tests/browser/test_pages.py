"""What users see in a real browser after real runs: Prefect's and MLflow's pages, and the report of a run.

make screenshots      installs Chromium, runs this, and writes the pictures of the documentation to docs/screens
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from onward.infra.mlflow.tracking import table_of
from onward.infra.servers.login import login
from onward.trainer.run.directory import RunDir
from onward.trainer.run.records import RunIdentity, read_record
from tests.support.browser import browser, driver, shot, shows
from tests.support.workshop import Workshop, api, signed_in, until

pytestmark = [pytest.mark.mpi, pytest.mark.slow, pytest.mark.timeout(3600), pytest.mark.usefixtures("only_servers")]

CONFIG = """
name = "shapes"
{config}
[export]
register_as = "shapes"
[[metrics]]
name = "accuracy"
[[metrics]]
name = "f1"
"""
TASKS = ("configure", "init runtime", "shard-data", "train", "monitor", "checkpoint", "export")
MOST_LINES = 45
"""Lines of a run's parameters that fit a screen of 1200 x 800 pixels with the head of the page."""


@dataclass(frozen=True)
class Shop:
    """Servers after a run of a deployment and one from the command line."""

    workshop: Workshop
    prefect: str
    mlflow: str
    deployment: str
    run: RunDir
    """That of the deployment."""

    @property
    def identity(self) -> RunIdentity:
        return read_record(self.run.identity, RunIdentity)


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shop]:
    workshop = Workshop.made(tmp_path_factory.mktemp("shop"))
    path = workshop.root / "config.toml"
    text = path.read_text().replace(
        "num_steps = 600\nevaluation_period = 300", "num_steps = 300\nevaluation_period = 50"
    )
    path.write_text(CONFIG.format(config=text.replace("[monitor]\nreport = false\n", "")))
    links = workshop.onward("up")
    try:
        server = signed_in(links["prefect"], workshop.home)
        made = workshop.onward("deploy", str(path), "--name", "nightly", "--cron", "0 2 * * *")
        begun = workshop.onward("deployments", "run", "nightly")["run"]
        until(lambda: api(server, f"/flow_runs/{begun}")["state"]["type"] in ("COMPLETED", "FAILED"), limit_s=1500)
        assert api(server, f"/flow_runs/{begun}")["state"]["type"] == "COMPLETED"
        workshop.onward("run", str(path), "optimizer.learning_rate=3e-3", "monitor.report=true", limit_s=1500)
        yield Shop(
            workshop,
            links["prefect"].removesuffix("/v2/runs"),
            links["mlflow"].partition("/#")[0],
            made["deployment_id"],
            RunDir(workshop.home / "runs" / begun),
        )
    finally:
        workshop.onward("down")
        workshop.close()


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with driver() as found:
        yield found


@pytest.fixture(scope="module")
def page(chromium: Any, shop: Shop, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A page that is signed in to Prefect as its users do it: with the line of the login as the password."""
    line = login(shop.workshop.home)
    with browser(chromium, tmp_path_factory.mktemp("profile"), login=line) as page:
        page.goto(f"{shop.prefect}/v2/runs")
        page.locator("input[type=password]").fill(line)
        page.keyboard.press("Enter")
        shows(page, "Flow Runs")
        yield page


def opened(page: Any, address: str, *texts: str) -> Any:
    """The page at an address, once it shows each text."""
    page.goto(address)
    shows(page, *texts)
    return page


def opened_in_mlflow(page: Any, shop: Shop, path: str, *texts: str) -> Any:
    """A page of MLflow without the panel at its right side."""
    opened(page, f"{shop.mlflow}/#{path}?workflowType=machine_learning", *texts)
    for close in page.get_by_role("button", name="Close").all():
        close.click()
    return page


def test_prefect_lists_the_runs(page: Any, shop: Shop, tmp_path: Path) -> None:
    opened(page, f"{shop.prefect}/v2/runs", "2 Flow runs", "shapes-1", "shapes-2", "Completed", "7 Task runs")
    shot(page, "prefect-runs", tmp_path)


def test_prefect_shows_the_timeline_of_a_run_and_its_tasks(page: Any, shop: Shop, tmp_path: Path) -> None:
    url = f"{shop.prefect}/v2/runs/flow-run/{shop.run.root.name}"
    opened(page, f"{url}?tab=TaskRuns", "shapes-1", "Completed", "7 Task runs", "nightly", "Task Runs")
    page.get_by_role("tab", name="Task Runs").click()
    shows(page, *TASKS)
    page.get_by_role("tab", name="Details").click()
    shows(page, "Flow Run ID", "Created", "Tags")
    page.locator("canvas").first.wait_for()
    page.wait_for_function("document.querySelector('canvas').getBoundingClientRect().height > 200")
    bars = 0
    for _ in range(60):  # the bars are painted, not elements
        page.wait_for_timeout(500)
        red, green, blue = np.moveaxis(np.asarray(Image.open(shot(page, "prefect-run", tmp_path)).convert("RGB")), 2, 0)
        bars = int(((green > 120) & (red < 90) & (blue < 130)).sum())
        if bars > 3000:
            break
    assert bars > 3000, "the timeline shows bars of completed tasks"


def test_prefect_shows_the_parameters_of_a_run_on_one_screen(page: Any, shop: Shop) -> None:
    shown = api(signed_in(shop.prefect, shop.workshop.home), f"/flow_runs/{shop.run.root.name}")["parameters"]
    assert len(json.dumps(shown, indent=2).splitlines()) <= MOST_LINES, shown
    opened(
        page, f"{shop.prefect}/v2/runs/flow-run/{shop.run.root.name}?tab=Parameters", "model.onnx", "global_batch_size"
    )


def test_prefect_shows_the_artifacts_of_a_run(page: Any, shop: Shop, tmp_path: Path) -> None:
    url = f"{shop.prefect}/v2/runs/flow-run/{shop.run.root.name}?tab=Artifacts"
    opened(page, url, "mlflow", "attempts", "promotion", "report", "result", "loss", "classes", "step 300/300")
    page.get_by_text("version 1 of shapes").first.scroll_into_view_if_needed()
    shot(page, "prefect-artifacts", tmp_path)
    asked = {"artifacts": {"flow_run_id": {"any_": [shop.run.root.name]}, "key": {"any_": ["result"]}}}
    (result,) = api(signed_in(shop.prefect, shop.workshop.home), "/artifacts/filter", asked)
    texts = ("accuracy", "before", "after", "minutes of training")
    opened(page, f"{shop.prefect}/v2/artifacts/artifact/{result['id']}", *texts)


def test_prefect_shows_the_deployment_its_schedule_and_how_to_use_it(page: Any, shop: Shop, tmp_path: Path) -> None:
    url = f"{shop.prefect}/v2/deployments/deployment/{shop.deployment}"
    opened(page, url, "nightly", "Next Run", "At 02:00 AM", "shapes-1", "Concurrency Limit", "Run")
    shot(page, "prefect-deployment", tmp_path)
    page.get_by_role("tab", name="Description").click()
    shows(page, "Trains", "Retry", "Cancel", "Suspend", "continues")


def test_prefects_form_begins_with_the_common_settings_and_says_what_is_wrong_beside_the_setting(
    page: Any, shop: Shop, tmp_path: Path
) -> None:
    url = f"{shop.prefect}/v2/deployments/deployment/{shop.deployment}/run"
    opened(page, url, "Parameters", "The ONNX file to train, which of its weights, and the loss.", "Submit")
    labels = [label.inner_text().removesuffix(" (Optional)") for label in page.locator("label").all()]
    sections = ["model", "data", "train", "optimizer", "parallel", "name"]
    places = [labels.index(section) for section in sections]
    assert places == sorted(places)
    first = ["Path", "Loss"], ["Source", "Label"], ["Global Batch Size", "Num Steps", "Num Epochs"]
    for place, expected in zip(places, (*first, ["Name", "Learning Rate"], ["Data"]), strict=False):
        assert labels[place + 1 : place + 1 + len(expected)] == expected
    closed = labels[labels.index("lora") : labels.index("lora") + 5]
    assert closed == ["lora", "average", "teacher", "quantize", "graph"], "sections with their defaults are closed"
    assert "Field" not in labels, "every setting has its name"
    height = page.evaluate("Math.max(...[...document.querySelectorAll('*')].map(each => each.scrollHeight))")
    assert height < 8000, "pixels, with two open metrics; with every setting of the open sections it was over 20,000"

    wrong = page.get_by_label("Learning Rate (Optional)").first
    wrong.fill("-1")
    page.get_by_role("button", name="Submit").click()
    shows(page, "-1 is less than or equal to the minimum of 0")
    assert page.url.endswith("/run"), "no run is created"
    page.get_by_text("-1 is less than or equal to the minimum of 0").first.scroll_into_view_if_needed()
    page.evaluate("document.activeElement.blur()")
    shot(page, "prefect-form", tmp_path)


def test_mlflow_shows_the_table_of_runs(page: Any, shop: Shop, tmp_path: Path) -> None:
    address = table_of(f"{shop.mlflow}/#/experiments/1/runs/{shop.identity.mlflow_run_id}")  # as `onward ui` prints it
    opened(page, address, "onward", "shapes-1", "shapes-2", "2 matching runs", "Training", "evaluation/loss")
    for close in page.get_by_role("button", name="Close").all():
        close.click()
    heads = {head.inner_text() for head in page.get_by_role("columnheader").all()}
    assert {"evaluation/accuracy", "evaluation/loss"} <= heads
    shot(page, "mlflow-runs", tmp_path)


def test_mlflow_shows_a_run_its_result_and_its_metrics(page: Any, shop: Shop, tmp_path: Path) -> None:
    path = f"/experiments/1/runs/{shop.identity.mlflow_run_id}"
    texts = ("accuracy 0.", "This run in Prefect", "evaluation/accuracy", "train/loss", "perf/samples_per_s")
    opened_in_mlflow(page, shop, path, "shapes-1", "Overview", *texts, "optimizer.learning_rate", "onward.result")
    shot(page, "mlflow-run", tmp_path)
    opened_in_mlflow(page, shop, f"{path}/model-metrics", "evaluation", "accuracy", "f1", "loss", "Step")
    page.locator(".js-plotly-plot .scatterlayer .trace").first.wait_for()
    shot(page, "mlflow-charts", tmp_path)


def test_mlflow_shows_each_checkpoint_and_the_exported_file_as_models(page: Any, shop: Shop, tmp_path: Path) -> None:
    steps = [f"step-{step:09d}" for step in (50, 300)]
    opened_in_mlflow(page, shop, "/experiments/1/models", "Model name", *steps, "shapes-1", "Ready")
    shot(page, "mlflow-models", tmp_path)


def test_mlflow_shows_the_registered_version_its_alias_and_where_it_comes_from(
    page: Any, shop: Shop, tmp_path: Path
) -> None:
    texts = ("Version 2", "@ champion", "Trained from", "This run in Prefect", "onward.promotion", "evaluation/f1")
    opened_in_mlflow(page, shop, "/models/shapes/versions/2", "shapes", "shapes-2", *texts)
    shot(page, "mlflow-version", tmp_path)


@pytest.mark.parametrize(("name", "width", "height"), [("report-phone", 375, 812), ("report", 1200, 800)])
def test_the_report_fits_a_phone_and_a_desk_and_asks_no_server(
    name: str, width: int, height: int, chromium: Any, shop: Shop, tmp_path: Path
) -> None:
    report = shop.run.root / "report.html"
    with browser(chromium, tmp_path / "profile", width=width, height=height) as page:
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        texts = ("The run is done, and its trained file passed all checks.", "accuracy", "shapes", "before", "after")
        opened(page, report.as_uri(), *texts)
        assert page.evaluate("document.documentElement.scrollWidth") <= width, "nothing is to be scrolled sideways"
        size_px = page.evaluate("parseFloat(getComputedStyle(document.body).fontSize)")
        assert size_px >= 14, "text that can be read without zooming"
        headings = [each.inner_text() for each in page.locator("h2").all()]
        assert [each for each in headings if each.lower().startswith("curves")], headings
        assert page.locator("img, svg").count() >= 2, "the curves"
        shot(page, name, tmp_path)
        assert {each.partition(":")[0] for each in asked} <= {"file", "data", "blob"}, asked


def test_each_picture_of_the_documentation_is_small_and_shown_on_a_page() -> None:
    docs = Path(__file__).resolve().parents[2] / "docs"
    pages = "\n".join(path.read_text() for path in itertools.chain(docs.glob("*.md"), docs.glob("*/*.md")))
    pictures = sorted((docs / "screens").glob("*.webp"))
    assert len(pictures) >= 12
    for picture in pictures:
        assert picture.stat().st_size < 80_000, picture.name
        assert f"screens/{picture.name}" in pages, f"no page shows {picture.name}"
