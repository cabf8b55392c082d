"""Files with bases, profiles and overrides: later layers win, and each value says where it came from."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from onward.flows.configuration import config, origins
from onward.flows.shown.terminal_tables import changed_lines, config_lines
from onward.trainer.config.flat_settings import changed_settings, flat_settings, origins_of
from onward.trainer.config.layers import read_layers
from onward.trainer.config.loading import build_config, load_config
from onward.trainer.errors import ConfigError
from onward.trainer.run.directory import RunDir
from onward.trainer.run.recorded.setting_sources import Origins, record_origins
from onward.trainer.run.records import read_record

COMMON = """
[model]
path = "models/m.onnx"
[data]
source = "digits"
inputs = { a = "x" }
[train]
num_epochs = 3
[optimizer]
name = "sgd"
learning_rate = 1e-3
no_decay = ["*bias*"]
[profiles.long.train]
num_epochs = 90
[profiles.fast.train]
num_epochs = 1
"""
RUN = """
base = "shared/common.toml"
[data]
inputs = { b = "y" }
[optimizer]
learning_rate = 1e-2
no_decay = ["*norm*"]
[profiles.long]
optimizer.momentum = 0.9
"""
GPU = """
base = "shared/common.toml"
[launch]
device = "cpu"
[optimizer]
layer_decay = 0.75
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with run.toml and gpu.toml over shared/common.toml; the working directory."""
    (tmp_path / "shared").mkdir()
    for name, text in (("shared/common.toml", COMMON), ("run.toml", RUN), ("gpu.toml", GPU)):
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_file_lies_over_its_base_tables_merged_and_lists_replaced(folder: Path) -> None:
    found = load_config(Path("run.toml"))
    assert (found.name, found.train.num_epochs, found.optimizer.name) == ("run", 3, "sgd")
    assert found.optimizer.learning_rate == 1e-2
    assert found.optimizer.no_decay == ("*norm*",)
    assert found.data.inputs == {"a": "x", "b": "y"}
    assert found.model.path == folder / "shared" / "models" / "m.onnx", "relative to the file that names it"


def test_a_profile_wins_over_the_files_and_an_override_over_both(folder: Path) -> None:
    found = load_config(Path("run.toml"), ["optimizer.momentum=0.5"], profile="long")
    assert (found.train.num_epochs, found.optimizer.momentum) == (90, 0.5)
    assert load_config(Path("run.toml"), profile="fast").train.num_epochs == 1
    with pytest.raises(ConfigError, match="unknown profile lang; did you mean long"):
        load_config(Path("run.toml"), profile="lang")
    with pytest.raises(ConfigError, match=r"unknown profile x; there is long, fast$"):
        load_config(Path("run.toml"), profile="x")


def test_of_several_files_later_ones_win_and_a_base_of_both_counts_once(folder: Path) -> None:
    found = config(["run.toml", "gpu.toml"], {"train.seed": 4}, optimizer={"weight_decay": 0.1})
    optimizer = found.optimizer
    # 1e-3 of common.toml does not come back with the second file
    assert (optimizer.learning_rate, optimizer.layer_decay, optimizer.weight_decay) == (1e-2, 0.75, 0.1)
    assert (found.launch.device, found.train.seed, found.name) == ("cpu", 4, "run")
    given: list[Any] = ["run.toml", {"optimizer": {"learning_rate": 0.5}}]
    assert config(given).optimizer.learning_rate == 0.5


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ('base = "run.toml"', "a file is its own base: run.toml -> run.toml; remove one `base`"),
        ('base = "gpu.toml"', "a file is its own base: run.toml -> gpu.toml -> run.toml"),
        ('base = "absent.toml"', "no config file absent.toml"),
        ('base = "~nobody-of-this-name/a.toml"', "no config file ~nobody-of-this-name/a.toml"),
        ("base = 3", "base names a file, or a list of files, not 3"),
        ("profiles = 3", r"\[profiles\] has a table for each profile"),
        ('[profiles.a]\nbase = "x"', "run.toml: profiles.a: a profile has settings only, no base"),
    ],
)
def test_wrong_layers_are_refused(folder: Path, text: str, sentence: str) -> None:
    (folder / "run.toml").write_text(text)
    if "gpu" in text:
        (folder / "gpu.toml").write_text('base = ["shared/common.toml", "run.toml"]')
    with pytest.raises(ConfigError, match=sentence):
        load_config(Path("run.toml"))


def test_several_levels_and_several_bases(folder: Path) -> None:
    (folder / "top.toml").write_text('base = ["run.toml", "gpu.toml"]\ntrain.num_epochs = 7\n')
    found = load_config(Path("top.toml"))
    assert (found.train.num_epochs, found.optimizer.learning_rate, found.optimizer.layer_decay) == (7, 1e-2, 0.75)


def test_the_word_auto_and_the_table_of_a_layout_meet(folder: Path) -> None:
    (folder / "auto.toml").write_text('parallel = "auto"\nlaunch.num_ranks = 2\n')
    (folder / "sizes.toml").write_text("[parallel]\nmemory_gib = 2\n")
    (folder / "given.toml").write_text("[parallel]\ndata = 4\ntensor = 2\n")
    paths = [Path("run.toml"), Path("given.toml"), Path("auto.toml"), Path("sizes.toml")]
    assert read_layers(paths).settings["parallel"] == {"sizes": "auto", "memory_gib": 2}
    assert read_layers(paths[:2]).settings["parallel"] == {"data": 4, "tensor": 2}


def test_every_value_says_where_it_came_from(folder: Path) -> None:
    found = origins(["run.toml", "gpu.toml"], ["train.seed=4"], profile="long")
    assert found["optimizer.name"] == "shared/common.toml [optimizer]"
    assert found["optimizer.learning_rate"] == "run.toml [optimizer]"
    assert found["optimizer.layer_decay"] == "gpu.toml [optimizer]"
    assert found["optimizer.momentum"] == "run.toml [profiles.long.optimizer]"
    assert found["train.num_epochs"] == "shared/common.toml [profiles.long.train]"
    assert found["data.inputs"] == "shared/common.toml [data.inputs] and run.toml [data.inputs]"
    assert (found["train.seed"], found["train.shuffle"], found["name"]) == ("override", "default", "name of the file")
    assert found.keys() == flat_settings(config("run.toml", profile="long")).keys()
    muon = origins("run.toml", ["optimizer.name=muon"])
    assert muon["optimizer.momentum"] == "follows from other settings"


def test_the_printed_configuration_has_origins_as_comments_and_loads_again(folder: Path) -> None:
    resolved = config(["run.toml", "gpu.toml"], ["train.seed=4"], profile="long")
    known = origins(["run.toml", "gpu.toml"], ["train.seed=4"], profile="long")
    text = "\n".join(config_lines(resolved, known))
    assert "seed = 4  # override" in text
    assert "learning_rate = 0.01  # run.toml [optimizer]" in text
    assert "shuffle = true  # default" in text
    assert build_config(tomllib.loads(text)) == resolved
    changed = list(changed_lines(changed_settings(resolved), known))
    assert any(line.startswith("train.seed = 4 ") and line.endswith("# override") for line in changed)
    assert not [line for line in changed if line.startswith("train.shuffle")]
    assert build_config(tomllib.loads("\n".join(changed))) == resolved
    assert changed_settings(resolved)["train.num_epochs"] == 90.0


def test_a_changed_loss_of_several_loads_again_too(folder: Path) -> None:
    losses = [{"name": "mse", "output": "y"}, {"name": "l1", "output": "z", "weight": 0.5}]
    resolved = config("gpu.toml", loss=losses)
    changed = changed_settings(resolved)
    assert (changed["loss.1.weight"], changed["loss.0.name"]) == (0.5, "mse")
    assert origins("gpu.toml", loss=losses)["loss.1.weight"] == "override"


def test_the_run_directory_has_the_origins(folder: Path) -> None:
    given = read_layers(Path("run.toml"))
    config = load_config(Path("run.toml"))
    record_origins(RunDir(folder / "run"), origins_of(config, given.origins), flat_settings(config))
    found = read_record(RunDir(folder / "run").origins, Origins).settings
    assert found["optimizer.learning_rate"] == "run.toml [optimizer]"
    assert "train.seed" not in found


def test_an_open_question_is_found_in_the_file_that_asks_it(folder: Path) -> None:
    (folder / "shared" / "common.toml").write_text(COMMON.replace("num_epochs = 3", '# 3 or 4\nnum_epochs = "?"'))
    with pytest.raises(ConfigError, match=r"shared/common.toml, line 9: train.num_epochs is open .*; decide: 3 or 4"):
        load_config(Path("run.toml"))
    assert load_config(Path("run.toml"), profile="long").train.num_epochs == 90
