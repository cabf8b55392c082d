"""`import onward`: what it loads, how settings are given, that a module's weights come back into the file."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch

import onward
from onward.flows.examples import MODELS, Example, find_config
from onward.flows.examples.folders import CONFIGS, FOLDERS
from onward.trainer.config.run_config import RunConfig
from onward.trainer.extras import how_to_install
from tests.support import fixed_batches
from tests.support.graphs import tiny_conv_net, tiny_mlp


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a directory the home and the working directory."""
    monkeypatch.setenv("ONWARD_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "home"


@pytest.fixture
def model(home: Path) -> Path:
    onnx.save_model(tiny_conv_net(num_classes=4), "model.onnx")
    return Path("model.onnx")


SETTINGS: dict[str, Any] = {
    "model": {"path": "model.onnx"},
    "data": {"source": "data.npz"},
    "train": {"num_steps": 4, "global_batch_size": 8},
}
TOML = """
[model]
path = "model.onnx"
[data]
source = "data.npz"
[train]
num_steps = 4
global_batch_size = 8
"""


def in_a_new_process(program: str) -> str:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_onward_loads_no_library_that_takes_long() -> None:
    """Under 0.1 s here: it loads nothing but the standard library."""
    loaded = in_a_new_process("import sys, onward; print(*{name.partition('.')[0] for name in sys.modules})").split()
    assert not set(loaded) & {"torch", "prefect", "mlflow", "pydantic", "numpy", "onnx", "typer", "pandas", "mpi4py"}


def test_every_public_name_has_a_meaning_and_is_there() -> None:
    for name in onward.__all__:
        assert name == "__version__" or getattr(onward, name).__doc__
    assert onward.__version__ == "0.1.0"
    assert issubclass(onward.ConfigError, onward.OnwardError)


# -- settings


@pytest.mark.parametrize(
    ("overrides", "sections"),
    [
        ({"train.num_steps": 10}, {}),
        (["train.num_steps=10"], {}),
        ({"train": {"num_steps": 10}}, {}),
        ({}, {"train": {"num_steps": 10}}),
        ({}, {"train.num_steps": 10}),
        ({"train.num_steps": 7}, {"train": {"num_steps": 10}}),
    ],
    ids=str,
)
def test_each_way_to_override_changes_the_settings_it_names_and_no_others(
    overrides: Any, sections: dict[str, Any], home: Path
) -> None:
    Path("config.toml").write_text(TOML)
    config = onward.config("config.toml", overrides, **sections)
    assert (config.train.num_steps, config.train.global_batch_size) == (10, 8)


def test_a_file_a_mapping_and_a_run_config_give_the_same_configuration(home: Path) -> None:
    Path("config.toml").write_text(TOML)
    from_file = onward.config("config.toml")
    assert isinstance(from_file, RunConfig)
    assert onward.config(SETTINGS, name="config") == from_file
    assert onward.config(from_file) == from_file
    assert onward.config(Path("config.toml")) == from_file
    assert SETTINGS["model"] == {"path": "model.onnx"}, "the caller's mapping is not changed"


def test_paths_may_be_path_objects_and_are_relative_to_the_working_directory(home: Path) -> None:
    config = onward.config({**SETTINGS, "model": {"path": Path("m.onnx")}}, {"data.source": Path("d.csv")})
    assert config.model.path == Path.cwd() / "m.onnx"
    assert config.data.source == str(Path.cwd() / "d.csv")


def test_parallel_may_be_auto(home: Path) -> None:
    config = onward.config({**SETTINGS, "parallel": {"data": 2}}, parallel="auto", launch={"num_ranks": 2})
    assert (config.parallel.sizes, config.launch.num_ranks) == ("auto", 2)


def test_everything_wrong_is_raised_at_once(home: Path) -> None:
    with pytest.raises(onward.ConfigError) as refused:
        onward.config(SETTINGS, {"train.num_setps": 1}, lunch={"num_ranks": 2}, parallel={"data": 0})
    found = "\n".join(refused.value.problems)
    assert "unknown key train.num_setps; did you mean train.num_steps?" in found
    assert len(refused.value.problems) == 3, found


def test_a_run_is_refused_before_anything_is_started(home: Path) -> None:
    with pytest.raises(onward.ConfigError, match=r"there is no file .*model\.onnx"):
        onward.run(SETTINGS)
    assert not home.exists()


# -- examples


@pytest.mark.parametrize("name", MODELS)
def test_an_example_is_found_by_name_and_its_model_is_written_when_it_is_checked(name: str, home: Path) -> None:
    config = onward.config(name)
    assert config.name == name
    assert config.model.path == home / "models" / f"{name}.onnx"
    assert not home.exists(), "printing a configuration writes nothing"
    from onward.flows.api import checked_config

    assert checked_config(name, **{"train.global_batch_size": 16}).train.global_batch_size == 16
    onnx.checker.check_model(str(config.model.path))


def test_an_example_with_a_model_of_the_users_own_writes_none(home: Path) -> None:
    from onward.flows.api import checked_config

    onnx.save_model(tiny_conv_net(num_classes=10), "model.onnx")
    assert checked_config("squeezenet-digits", {"model.path": "model.onnx", "data.image_size": 8}).model.path.is_file()
    assert not home.exists()


def test_every_example_has_a_model_and_every_model_an_example() -> None:
    assert {path.stem for path in CONFIGS.glob("*.toml")} == set(MODELS) | set(FOLDERS)


@pytest.mark.parametrize("name", MODELS)
def test_the_makefile_and_the_example_write_the_same_model(name: str, tmp_path: Path) -> None:
    """Where there is a checkout: the command in the Makefile and the examples' table are two places for one model."""
    makefile = Path(__file__).parents[2] / "Makefile"
    rule = makefile.read_text().partition(f"models/{name}.onnx: |")[2].splitlines()[1]
    words = rule.replace("$@", str(tmp_path / "made.onnx")).split()[1:]
    subprocess.run([sys.executable, "-m", "onward.flows.cli", *words], check=True, capture_output=True)
    example = Example(name, tmp_path / "example.onnx")
    example.write_model()
    assert example.model.read_bytes() == (tmp_path / "made.onnx").read_bytes()


def test_a_file_is_preferred_to_an_example_and_an_unknown_name_lists_the_examples(home: Path) -> None:
    Path("squeezenet-digits").write_text(TOML)
    assert find_config("squeezenet-digits") == Path("squeezenet-digits")
    with pytest.raises(onward.ConfigError, match=r"no config file digits; .* example: gpt2-stdlib, squeezenet-digits"):
        onward.config("digits")


# -- where a run may be started


def test_a_run_from_another_thread_is_refused_with_what_to_do(home: Path, model: Path) -> None:
    images = np.zeros((20, 3, 8, 8), np.float32)
    np.savez("data.npz", image=images, label=np.arange(20) % 4)
    raised: list[BaseException] = []

    def work() -> None:
        try:
            onward.run(SETTINGS)
        except onward.OnwardError as error:
            raised.append(error)

    thread = threading.Thread(target=work, name="worker-7")
    thread.start()
    thread.join()
    (error,) = raised
    assert isinstance(error, onward.RuntimeUnavailable)
    assert "must be started from the main thread, not from 'worker-7'" in str(error)
    assert not home.exists()


WITHOUT_FLOW = """
import importlib.util, sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("prefect", "mlflow", "sqlalchemy", "fastapi", "tensorboard"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
real = importlib.util.find_spec
absent = ("prefect", "mlflow", "sqlalchemy")
importlib.util.find_spec = lambda name, *rest: None if name in absent else real(name, *rest)
"""
"""Makes a process find none of the packages of the extra `flow`."""


@pytest.mark.slow
def test_without_prefect_and_mlflow_the_trainer_works_and_a_run_says_what_to_install(home: Path, model: Path) -> None:
    program = (
        WITHOUT_FLOW
        + f"""
import onward, onward.trainer.__main__, onward.trainer.loop
print(onward.doctor("{model}").importable, onward.to_module("{model}").input_names)
print(onward.config("squeezenet-digits").name, onward.runs())
try:
    onward.run("squeezenet-digits")
except onward.RuntimeUnavailable as error:
    print(error)
sys.argv = ["onward", "up"]
from onward.flows.cli import main
main()
"""
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == onward.RuntimeUnavailable.exit_code, done.stderr
    shown = done.stdout.splitlines()
    assert shown[:2] == ["True ('image',)", "squeezenet-digits []"]
    what_to_do = f"needs prefect, mlflow, sqlalchemy, not installed here: {how_to_install('flow')}"
    assert f"onward.run {what_to_do}" in shown[2]
    assert f"onward up {what_to_do}" in done.stderr


# -- modules


def test_a_module_is_trained_and_its_weights_come_back_into_the_file(model: Path) -> None:
    module = onward.to_module(model, freeze=["*bias*"])
    assert any(parameter.requires_grad for parameter in module.parameters())
    optimizer = torch.optim.SGD([each for each in module.parameters() if each.requires_grad], lr=0.1)
    images = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    torch.nn.functional.cross_entropy(module(images), torch.arange(4)).backward()
    optimizer.step()
    (written,) = onward.write(module, model, Path("out") / "trained.onnx")
    assert written == Path("out/trained.onnx")

    changed = onward.diff(model, written)
    assert changed.tensors
    assert (changed.model, changed.interface, changed.nodes) == ((), (), ())
    assert not [change.name for change in changed.tensors if "bias" in change.name]
    again = onward.to_module(written).eval()
    assert torch.equal(again(images), module.eval()(images))


def test_a_module_of_a_file_that_mixes_its_fixed_batch_takes_no_other(tmp_path: Path) -> None:
    onnx.save(fixed_batches.exported("over-the-batch-4", "legacy"), tmp_path / "model.onnx")
    module = onward.to_module(tmp_path / "model.onnx")
    assert module(fixed_batches.rows("over-the-batch-4", 4)).shape == (4, 4)
    with pytest.raises(ValueError, match="fits batches of 4, but 'x' has 5 rows"):
        module(fixed_batches.rows("over-the-batch-4", 5))


def test_a_module_that_was_not_trained_comes_back_as_the_same_bytes(model: Path) -> None:
    (written,) = onward.write(onward.to_module(model), model, "same.onnx")
    assert written.read_bytes() == model.read_bytes()
    assert onward.diff(model, written).same_bytes


def test_the_original_is_not_written_over_and_another_file_is(model: Path) -> None:
    original = model.read_bytes()
    module = onward.to_module(model)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(1.0)
    with pytest.raises(onward.ConfigError, match="write to another file"):
        onward.write(module, model, model)
    assert model.read_bytes() == original
    for _ in range(2):
        onward.write(module, model, "trained.onnx")
    assert onward.diff(model, "trained.onnx").tensors


def test_a_pattern_that_matches_nothing_and_a_foreign_module_are_refused(model: Path) -> None:
    with pytest.raises(onward.ConfigError, match="no weight matches 'absent'"):
        onward.to_module(model, train=["absent"])
    with pytest.raises(TypeError, match="not Linear; unwrap it first"):
        onward.write(torch.nn.Linear(2, 2), model, "out.onnx")  # type: ignore[arg-type]
    with pytest.raises(onward.ConfigError, match="cannot read the model"):
        onward.to_module("absent.onnx")


def test_a_file_that_begins_with_strings_is_trained_and_written_from_python(tmp_path: Path) -> None:
    source = Path(__file__).resolve().parents[1] / "support" / "foreign" / "text-sentences.onnx"
    module = onward.to_module(source)
    assert module.input_names == ("ids",)
    ids, text = torch.tensor([[2, 8, 0], [5, 9, 12]]), np.array(["good film", "bad plot the"], object)
    torch.nn.functional.cross_entropy(module(ids), torch.tensor([1, 0])).backward()
    torch.optim.SGD(module.parameters(), lr=1.0).step()
    onward.write(module, source, tmp_path / "trained.onnx")
    before, after = (
        onnxruntime.InferenceSession(str(path)).run(None, {"text": text})[0]
        for path in (source, tmp_path / "trained.onnx")
    )
    assert after == pytest.approx(module(ids).detach().numpy(), abs=1e-6)
    assert after != pytest.approx(before, abs=1e-3)


def test_a_configuration_without_a_name_has_that_of_its_model(home: Path, model: Path) -> None:
    np.savez("data.npz", images=np.zeros((40, 3, 8, 8), np.float32), label=np.zeros(40, np.int64))
    names = {"penguins.onnx": "penguins", "my model (2).onnx": "my-model-2", "models:/digits@champion": "digits"}
    for path, name in names.items():
        assert onward.config(SETTINGS | {"model": {"path": path}}).name == name
    assert onward.config(SETTINGS | {"name": "own"}).name == "own"


def test_a_bad_row_far_behind_the_first_ones_is_named_before_anything_is_started(home: Path) -> None:
    onnx.save_model(tiny_mlp(), "model.onnx")
    lines = [f"{n},{n},{n},{n},{n}" for n in range(2000)]
    lines[1900] = "1,2,three,4,5"
    Path("data.csv").write_text("\n".join(["a,b,c,d,label", *lines]) + "\n")
    data = {"source": "data.csv", "inputs": {"features": ["a", "b", "c", "d"]}}
    given = SETTINGS | {"model": {"path": "model.onnx", "loss": "mse"}, "data": data}
    with pytest.raises(onward.DataError) as refused:
        onward.run(given)
    assert refused.value.problems[0].endswith("line 1902: c is 'three', not a number"), refused.value.problems
    assert not (home / "runs").exists()
