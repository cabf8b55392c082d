"""Every rule is broken once, and its message has the numbers; all problems are reported together; overrides are
TOML."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from onward.trainer.config import rules
from onward.trainer.config.loading import build_config, layered, load_config, settings_of
from onward.trainer.config.run_config import RunConfig
from onward.trainer.config.sections.training import TrainConfig
from onward.trainer.errors import ConfigError

GOOD: dict[str, dict[str, Any]] = {"model": {"path": "m.onnx"}, "data": {"source": "digits"}, "train": {"num_steps": 5}}
IN_FOUR = {"num_steps": 1, "gradient_accumulation_steps": 4}

BROKEN: dict[str, tuple[dict[str, Any], list[str]]] = {
    "world size": (
        {"parallel": {"data": 4}, "launch": {"num_ranks": 3}},
        ["data 4 x tensor 1 x pipeline 1", "is 3"],
    ),
    "packed classes": (
        {"data": {"source": "a.csv", "text": {"tokenizer": "t.json", "packing": "joined"}}},
        ["data.text.packing 'joined' is for the tasks causal, masked, masked_words, not classification"],
    ),
    "masked classes": (
        {"data": {"source": "a.csv", "text": {"tokenizer": "t.json", "mask_probability": 0.5}}},
        ["data.text.mask_probability 0.5 is for the tasks masked, masked_words, not classification"],
    ),
    "bytes of masked tokens": (
        {
            "metrics": ["bits_per_byte"],
            "data": {"source": "a.txt", "text": {"tokenizer": "tokenizer.json", "task": "masked"}},
        },
        ["a masked model predicts some tokens from those around them", "use perplexity", "bytes_per_target"],
    ),
    "bytes of classes": (
        {"metrics": ["bits_per_byte"], "data": {"source": "a.csv", "text": {"tokenizer": "tokenizer.json"}}},
        ["bits_per_byte", "the targets of data.text.task 'classification' are no text"],
    ),
    "windows of a causal model": (
        {"data": {"source": "a.txt", "text": {"tokenizer": "t.json", "task": "causal", "stride": 4}}},
        ["data.text.stride: the windows of a causal model follow each other"],
    ),
    "windows of joined texts": (
        {"data": {"source": "a.txt", "text": {"tokenizer": "t", "task": "masked", "packing": "joined", "stride": 0}}},
        ["data.text.stride divides texts, which data.text.packing 'joined' joins"],
    ),
    "windows of pairs": (
        {"data": {"source": "a.csv", "text": {"tokenizer": "t.json", "columns": ["a", "b"], "stride": 4}}},
        ["data.text.stride: each window of one text of a pair"],
    ),
    "padded windows": (
        {
            "data": {
                "source": "a",
                "text": {"tokenizer": "t", "task": "causal", "packing": "joined", "pad_side": "left"},
            }
        },
        ["data.text.pad_side 'left': windows of data.text.packing 'joined' are not padded so"],
    ),
    "ranks for auto": ({"parallel": "auto"}, ["parallel = 'auto'", "launch.num_ranks is 0; set launch.num_ranks"]),
    "a loss set twice": (
        {"model": {"path": "m.onnx", "loss": "mse"}, "loss": [{"name": "l1", "output": "z"}]},
        ["loss.name is 'l1', but its short form model.loss is 'mse'; set one of the two"],
    ),
    "labels of a loss set twice": (
        {"data": {"source": "digits", "label": "a"}, "loss": [{"label": "a"}, {"label": "b"}]},
        ["loss.1.label is 'b', but its short form data.label is 'a'; set one of the two"],
    ),
    "outputs of other losses": (
        {"model": {"path": "m.onnx", "output": ["y", "z"]}, "loss": [{}, {}, {}]},
        ["model.output names 2 tensors, but there are 3 [[loss]]; name one for each"],
    ),
    "two outputs of a loss of one": (
        {"loss": {"output": ["y", "z"]}},
        ["loss.output: cross_entropy reads 1 outputs of the graph, not 2; name them"],
    ),
    "a setting of another loss": (
        {"loss": {"name": "mse", "label_smoothing": 0.1}},
        ["loss.label_smoothing 0.1 is for cross_entropy, not for mse"],
    ),
    "a count of an ONNX loss": (
        {"loss": {"file": "a.onnx", "count": "known"}},
        ["loss.count names a function of a Python file, but loss.file is an ONNX file; remove it"],
    ),
    "a count that is no name": (
        {"loss": {"file": "a.py:f", "count": "a.py:known"}},
        ["loss.count 'a.py:known' is not the name of a function of loss.file"],
    ),
    "a loss of a file without one": ({"loss": {"name": "file"}}, ["loss.name 'file' needs loss.file"]),
    "contrast over micro-batches": (
        {"loss": {"name": "info_nce", "output": ["y", "z"]}, "train": IN_FOUR | {"global_batch_size": 8}},
        ["loss.name 'info_nce' compares all samples of a step", "train.gradient_accumulation_steps is 4"],
    ),
    "files of a loss without an ONNX form": (
        {"loss": [{"name": "giou"}, {"name": "ctc", "output": "z"}], "export": {"variants": ["training"]}},
        ["export.variants 'training' has no ONNX form of loss.1.name 'ctc': ONNX has no operator for it"],
    ),
    "files of a loss in Python": (
        {"loss": {"file": "my_loss.py:f"}, "export": {"variants": ["training"]}},
        [
            "export.variants 'training' has no ONNX form of loss.file",
            "my_loss.py:f': it is Python",
        ],
    ),
    "losses and Adasum": (
        {"parallel": {"reduction": "adasum"}, "loss": [{}, {"output": "z"}]},
        ["weighs hosts by the targets of one loss, but there are 2 [[loss]]"],
    ),
    "a loss by level and Adasum": (
        {
            "parallel": {"reduction": "adasum"},
            "loss": {"name": "yolov5", "output": ["y", "z"], "strides": [8, 16], "anchors": [[[4, 4]], [[8, 8]]]},
        },
        ["weighs hosts by the targets of one loss, but 'yolov5' counts images and the matches of each level"],
    ),
    "stages without a loop": (
        {
            "parallel": {"pipeline": 2, "stages_per_rank": 3},
            "train": {"num_steps": 1, "gradient_accumulation_steps": 8},
        },
        ["parallel.stages_per_rank 3", "'interleaved' or 'zero_bubble', not '1f1b'"],
    ),
    "stages of one rank": (
        {"parallel": {"schedule": "interleaved", "stages_per_rank": 2}},
        ["parallel.stages_per_rank 2", "parallel.pipeline above 1"],
    ),
    "cuts": (
        {"parallel": {"pipeline": 4, "cuts": ["a", ["b", "c"]]}, "train": IN_FOUR},
        ["parallel.cuts has 2 entries, but 4 stages have 3 cuts"],
    ),
    "cuts of no pipeline": ({"parallel": {"cuts": ["a"]}}, ["parallel.cuts has 1 entries, but 1 stages have 0 cuts"]),
    "idle stages": (
        {"parallel": {"pipeline": 3}, "train": {"num_steps": 1, "gradient_accumulation_steps": 2}},
        ["a pipeline of 3 ranks", "at least 3 micro-batches", "gradient_accumulation_steps is 2; 12 is a good value"],
    ),
    "broken rounds": (
        {
            "parallel": {"pipeline": 3, "stages_per_rank": 2, "schedule": "interleaved"},
            "train": {"num_steps": 1, "gradient_accumulation_steps": 7, "global_batch_size": 14},
        },
        [
            "'interleaved'",
            "cannot run 7 micro-batches in equal rounds on 3 ranks",
            "gradient_accumulation_steps to a multiple of 3",
        ],
    ),
    "ZeRO and Adasum": (
        {"parallel": {"data": 2, "zero": 1, "reduction": "adasum"}},
        ["parallel.reduction 'adasum' needs parallel.zero 0, not 1"],
    ),
    "ZeRO and MPI": (
        {"parallel": {"data": 2, "zero": 2, "transport": "mpi"}},
        ["parallel.transport 'mpi' needs parallel.zero 0, not 2"],
    ),
    "ZeRO and compression": (
        {"parallel": {"data": 2, "zero": 3, "compression": "bf16"}},
        ["parallel.compression 'bf16' needs parallel.zero 0, not 3"],
    ),
    "ranks that share no GPU": (
        {"launch": {"device": "cpu", "ranks_per_gpu": 2}},
        ["launch.ranks_per_gpu 2 is for GPUs; launch.device is 'cpu'"],
    ),
    "groups of nothing": ({"parallel": {"data": 4, "shard": 2}}, ["parallel.shard 2 needs parallel.zero 1, 2 or 3"]),
    "groups that are not whole": (
        {"parallel": {"data": 4, "zero": 3, "shard": 3}},
        ["parallel.shard 3 does not divide parallel.data 4"],
    ),
    "MPI between GPUs": (
        {"parallel": {"transport": "mpi"}, "launch": {"device": "cuda"}},
        ["parallel.transport 'mpi'", "on GPUs use 'torch'"],
    ),
    "ZeRO and compiled, apart": (
        {"parallel": {"schedule": "zero_bubble", "zero": 2}, "graph": {"compile": True}},
        ["'zero_bubble'", "cannot be combined with parallel.zero 2 and graph.compile", "'1f1b'"],
    ),
    "CUDA graphs on a CPU": (
        {"graph": {"compile": "reduce-overhead"}, "launch": {"device": "cpu"}},
        ["'reduce-overhead' captures CUDA graphs and cannot be combined with launch.device 'cpu'; use 'default'"],
    ),
    "repeated blocks and ZeRO": (
        {"graph": {"compile": "repeated"}, "parallel": {"data": 2, "zero": 1}},
        ["graph.compile 'repeated' cannot be combined with parallel.zero 1; use true"],
    ),
    "nothing recomputed": (
        {"recompute": {"units": ["h*", "x"]}},
        ["recompute.units ['h*', 'x'] needs recompute.mode 'whole' or 'selective'"],
    ),
    "units that are compressed": (
        {"recompute": {"mode": "compressed", "units": ["x"]}},
        ["recompute.units ['x'] needs recompute.mode 'whole' or 'selective'"],
    ),
    "compressed and compiled": (
        {"recompute": {"mode": "compressed"}, "graph": {"compile": True}},
        ["recompute.mode 'compressed' cannot be combined with graph.compile, which chooses itself what is kept for"],
    ),
    "moments of SGD": (
        {"optimizer": {"name": "sgd", "moments": "bf16"}},
        ["optimizer.moments 'bf16' is for adam, adamw, lamb, nadam, radam, rmsprop and lion, not for sgd"],
    ),
    "accumulation": (
        {"train": {"num_steps": 1, "global_batch_size": 30, "gradient_accumulation_steps": 4}, "parallel": {"data": 2}},
        ["30", "2 replicas x 4 micro-batches = 8", "24 and 32"],
    ),
    "one profiled step": (
        {"monitor": {"profile_steps": [3]}},
        ["monitor.profile_steps", "such as [20, 24]", "not [3]"],
    ),
    "profiled steps backwards": (
        {"monitor": {"profile_steps": [4, 3]}},
        ["monitor.profile_steps", "the first step 4 is after the last one, 3"],
    ),
    "too many profiled steps": (
        {"train": {"num_steps": 500}, "monitor": {"profile_steps": [10, 60]}},
        ["monitor.profile_steps", "51 steps are more than 50: all their events are kept in memory"],
    ),
    "a profiled step before the first": (
        {"monitor": {"profile_steps": [-1, 3]}},
        ["monitor.profile_steps", "greater than 0"],
    ),
    "profiled steps beyond the end": (
        {"monitor": {"profile_steps": [4, 6]}},
        ["monitor.profile_steps [4, 6] goes beyond the last step of the run: train.num_steps is 5"],
    ),
    "no length": ({"train": {}}, ["num_steps is 0", "num_epochs is 0"]),
    "two lengths": ({"train": {"num_steps": 5, "num_epochs": 2}}, ["num_steps is 5", "num_epochs is 2"]),
    "scale without fp16": ({"precision": {"loss_scale": 8}}, ["loss_scale 8", "fp32"]),
    "scale above its cap": (
        {"precision": {"compute": "fp16", "loss_scale": ("dynamic", 2.0**25)}},
        ["precision.loss_scale.1: Input should be less than or equal to 16777216, not 33554432.0"],
    ),
    "ratios crossed": (
        {"optimizer": {"trust_ratio": [3, 2]}},
        ["optimizer.trust_ratio: the first of [3.0, 2.0] is the least"],
    ),
    "nesterov alone": ({"optimizer": {"name": "sgd", "nesterov": True}}, ["momentum"]),
    "momentum for Adam": ({"optimizer": {"momentum": 0.9}}, ["momentum 0.9", "adamw"]),
    "betas of SGD by pattern": (
        {"optimizer": {"name": "sgd", "weights": [{"pattern": "head.*", "beta": 0.9}]}},
        ["optimizer.weights: beta 0.9 of pattern 'head.*' is for adam, adamw, lamb,", "not for sgd"],
    ),
    "momentum of LAMB by pattern": (
        {"optimizer": {"name": "lamb", "weights": [{"pattern": "*", "momentum": 0.9, "trust_ratio": [0, 2]}]}},
        ["optimizer.weights: momentum 0.9 of pattern '*' is for sgd and muon, not for lamb"],
    ),
    "ratios of Adam by pattern": (
        {"optimizer": {"weights": [{"pattern": "*", "trust_ratio": [0, 2]}]}},
        ["optimizer.weights: trust_ratio (0.0, 2.0) of pattern '*' is for lamb, not for adamw"],
    ),
    "bias correction of Lion": (
        {"optimizer": {"name": "lion", "bias_correction": False}},
        ["optimizer.bias_correction False is for adam, adamw, lamb and muon, not for lion"],
    ),
    "Muon without Muon": (
        {"optimizer": {"muon": {"adamw_learning_rate": 0.1}}},
        ["optimizer.muon is for muon, not for adamw"],
    ),
    "a rule by pattern of AdamW": (
        {"optimizer": {"weights": [{"pattern": "*", "rule": "muon"}]}},
        ["optimizer.weights: rule 'muon' of pattern '*' is for muon, not for adamw"],
    ),
    "moments of Adafactor": (
        {"optimizer": {"name": "adafactor", "moments": "bf16"}},
        ["optimizer.moments 'bf16' is for adam,", "not for adafactor"],
    ),
    "training files of Lion": (
        {"optimizer": {"name": "lion"}, "export": {"variants": ["training"]}},
        ["no ONNX form of optimizer.name 'lion', only of adam, adamw, lamb, sgd; leave the variant out"],
    ),
    "decay mode for LAMB": ({"optimizer": {"name": "lamb", "weight_decay_mode": "huggingface"}}, ["lamb"]),
    "floor of a compatible mode": ({"schedule": {"mode": "cosine_compatible", "floor": 0.1}}, ["floor 0.1 is not for"]),
    "warm-up of nothing": ({"schedule": {"warmup_ratio": 0.1}}, ["warmup_ratio 0.1", "constant"]),
    "nothing to train": ({"model": {"path": "m", "train": []}}, ["model.train"]),
    "unknown key": ({"train": {"num_steps": 1, "num_step": 5}}, ["train.num_step", "did you mean train.num_steps"]),
    "unknown section": ({"optimiser": {}}, ["optimiser", "did you mean optimizer"]),
    "not a number": ({"optimizer": {"learning_rate": "fast"}}, ["optimizer.learning_rate", "'fast'"]),
    "head": ({"model": {"path": "m", "head": "fc.weight"}}, ["model.head 'fc.weight'", "model.num_classes is 0"]),
    "one class": ({"model": {"path": "m", "num_classes": 1}}, ["model.num_classes 1", "always 0"]),
    "start": ({"model": {"path": "m", "start": ["x", "y", "x"]}}, ["model.start names x more than once"]),
    "no adapters": ({"lora": {"rank": 4}}, ["lora.rank has no effect without lora.weights"]),
    "adapters": ({"model": {"path": "m", "train": ["h*"]}, "lora": {"weights": ["*"]}}, ["['h*']", "lora.also_train"]),
    "dropout": ({"graph": {"dropout": 0.1, "fuse": False}}, ["graph.dropout 0.1", "graph.fuse = true"]),
    "not a table": ({"train": 5}, ["[train]"]),
    "not automatic": ({"parallel": "fast"}, ["[parallel] must be a table, not 'fast'"]),
    "missing": ({"data": {}}, ["data.source is missing"]),
    "infinite": ({"optimizer": {"epsilon": float("inf")}}, ["optimizer.epsilon", "finite"]),
}


@pytest.mark.parametrize("broken", BROKEN)
def test_a_contradiction_is_reported_with_its_numbers(broken: str) -> None:
    change, expected = BROKEN[broken]
    with pytest.raises(ConfigError) as raised:
        build_config(GOOD | change)
    (problem,) = raised.value.problems
    for words in expected:
        assert words in problem


def test_all_problems_are_reported_together() -> None:
    every: dict[str, Any] = GOOD | {
        "parallel": {"data": 2},
        "launch": {"num_ranks": 3},
        "optimizer": {"learning_rate": -1, "momentom": 2},
        "schedule": {"warmup_ratio": 0.5},
        "oops": {},
    }
    with pytest.raises(ConfigError) as raised:
        build_config(every)
    assert len(raised.value.problems) == 5


def test_all_problems_of_a_layout_are_reported_together() -> None:
    layout = {"data": 6, "pipeline": 3, "stages_per_rank": 2, "cuts": ["a"], "zero": 3, "shard": 4, "transport": "mpi"}
    change = {
        "parallel": layout | {"reduction": "adasum", "compression": "fp16"},
        "launch": {"num_ranks": 16, "device": "cuda"},
        "recompute": {"units": ["a"]},
        "optimizer": {"name": "sgd", "moments": "bf16"},
    }
    with pytest.raises(ConfigError) as raised:
        build_config(GOOD | change)
    expected = "\n".join(raised.value.problems)
    assert len(raised.value.problems) == 12
    for words in (
        "data 6 x tensor 1 x pipeline 3 needs 18 ranks, but launch.num_ranks is 16",
        "32 does not divide over 6 replicas",
        "not '1f1b'",
        "1 entries, but 6 stages have 5",
        "at least 3 micro-batches",
        "'adasum' needs",
        "'mpi' needs",
        "'fp16' needs",
        "parallel.shard 4 does not divide parallel.data 6",
        "on GPUs use 'torch'",
        "recompute.units ['a']",
        "optimizer.moments 'bf16'",
    ):
        assert words in expected


CONSISTENT: dict[str, dict[str, Any]] = {
    "a pipeline": {
        "parallel": {"pipeline": 4, "cuts": ["a", "b", ["c", "d"]]},
        "train": IN_FOUR,
    },
    "looped stages": {
        "parallel": {"pipeline": 2, "stages_per_rank": 2, "schedule": "interleaved", "cuts": ["a", "b", "c"]},
        "train": IN_FOUR,
    },
    "one round that is not full": {
        "parallel": {"pipeline": 3, "stages_per_rank": 2, "schedule": "zero_bubble"},
        "train": IN_FOUR,
    },
    "groups of shards": {"parallel": {"data": 4, "zero": 3, "shard": 2}},
    "rounded activations": {"recompute": {"mode": "compressed_bf16"}},
    "Adasum over MPI": {"parallel": {"data": 2, "reduction": "adasum", "transport": "mpi", "compression": "fp16"}},
    "small moments": {"optimizer": {"name": "lamb", "moments": "bf16"}, "recompute": {"mode": "whole", "units": ["a"]}},
}


@pytest.mark.parametrize("consistent", CONSISTENT)
def test_consistent_settings_are_accepted(consistent: str) -> None:
    build_config(GOOD | CONSISTENT[consistent])


def test_auto_is_short_for_sizes_auto(tmp_path: Path) -> None:
    short = build_config(GOOD | {"parallel": "auto", "launch": {"num_ranks": 6}})
    assert short == build_config(GOOD | {"parallel": {"sizes": "auto"}, "launch": {"num_ranks": 6}})
    assert short.parallel.sizes == "auto"
    file = tmp_path / "a.toml"
    file.write_text('[model]\npath = "m"\n[data]\nsource = "d"\n[train]\nnum_steps = 5\n[parallel]\ndata = 2\n')
    assert load_config(file, ["parallel=auto", "launch.num_ranks=6"]).parallel == short.parallel


def test_a_config_built_from_sections_follows_the_same_rules() -> None:
    good = build_config(GOOD)
    with pytest.raises(ValidationError, match="needs 1 ranks"):
        RunConfig.model_validate(dict(good) | {"launch": {"num_ranks": 2}})


def test_overrides_are_toml_and_stronger_than_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "configs" / "a.toml"
    file.parent.mkdir()
    file.write_text('[model]\npath = "../m.onnx"\n[data]\nsource = "d.csv"\n[train]\nnum_steps = 5\n')
    monkeypatch.chdir(tmp_path)
    lines = ["optimizer.learning_rate=3e-4", "model.freeze=['a*']", "model.loss=mse", "data.evaluation_source=e.csv"]
    config = load_config(file, lines)
    assert config.name == "a"
    assert config.optimizer.learning_rate == 3e-4
    assert config.model.freeze == ("a*",)
    assert config.model.loss == "mse"
    assert config.model.path.resolve() == tmp_path / "m.onnx", "a path in the file is relative to the file"
    assert config.data.evaluation_source == str(tmp_path / "e.csv"), "one on the command line, to where that was typed"


@pytest.mark.parametrize("file", ["s3://bucket/loss.onnx", ""])
def test_a_loss_of_a_url_and_none_are_no_paths_of_the_directory(file: str) -> None:
    settings, _ = settings_of(GOOD, [f"loss.file={file!r}"])
    assert settings["loss"] == {"file": file}


@pytest.mark.parametrize(("line", "expected"), [("train.num_steps", "section.key=value"), ("name.x=1", "not a table")])
def test_an_override_that_is_not_an_assignment_is_refused(tmp_path: Path, line: str, expected: str) -> None:
    (tmp_path / "a.toml").write_text('name = "n"\n[model]\npath = "m"\n[data]\nsource = "d"\n[train]\nnum_steps = 5\n')
    with pytest.raises(ConfigError, match=expected):
        load_config(tmp_path / "a.toml", [line])


@pytest.mark.parametrize(("content", "expected"), [(b"[model\n", "not TOML"), (b"\xff", "not TOML")])
def test_a_file_that_is_not_a_config_is_refused(tmp_path: Path, content: bytes, expected: str) -> None:
    (tmp_path / "a.toml").write_bytes(content)
    with pytest.raises(ConfigError, match=expected):
        load_config(tmp_path / "a.toml")
    with pytest.raises(ConfigError, match="no config file"):
        load_config(tmp_path / "b.toml")


@pytest.mark.parametrize(
    ("train", "rows", "steps", "samples"),
    [
        ({"num_steps": 7, "global_batch_size": 4}, 10, 7, 28),
        ({"num_epochs": 2, "global_batch_size": 4}, 10, 5, 20),
        ({"num_epochs": 1, "global_batch_size": 4}, 10, 3, 10),
        ({"num_epochs": 0.5, "global_batch_size": 4}, 10, 2, 5),
    ],
)
def test_an_epoch_is_every_sample_once_and_the_last_step_may_be_smaller(
    train: dict[str, Any], rows: int, steps: int, samples: int
) -> None:
    config = build_config(GOOD | {"train": train})
    assert (config.train.steps_of_run(rows), config.train.samples_of_run(rows)) == (steps, samples)


def test_a_config_written_as_json_is_read_back_equal() -> None:
    config = build_config(GOOD)
    assert RunConfig.model_validate_json(config.model_dump_json()) == config


def test_the_rules_are_checked_once_per_build(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def counted(train: TrainConfig) -> list[str]:
        calls.append(train.num_steps)
        return []

    monkeypatch.setattr(rules, "CROSS_SECTION_RULES", (counted,))
    build_config(GOOD)
    assert calls == [5]
    for invalid in ({"name": "not a name"}, {"optimizer": {"learning_rate": -1}}):
        calls.clear()
        with pytest.raises(ConfigError):
            build_config(GOOD | invalid)
        assert calls == [5], "a problem elsewhere does not hide the rules' problems"


def test_the_short_form_and_the_section_of_a_loss_are_one() -> None:
    short = {"model": {"path": "m.onnx", "loss": "mse", "output": "y"}, "data": {"source": "digits", "label": "a"}}
    table = {"model": {"path": "m.onnx"}, "loss": {"name": "mse", "output": "y", "label": "a"}}
    one, other = build_config(GOOD | short), build_config(GOOD | table)
    assert one.losses == other.losses
    assert (one.losses[0].name, one.losses[0].output, one.losses[0].columns) == ("mse", "y", ("a",))
    assert (other.model.loss, other.model.output) == ("mse", "y"), "surgery reads them there"
    assert RunConfig.model_validate_json(other.model_dump_json()) == other


def test_several_losses_are_filled_in_and_overridden_one_by_one() -> None:
    given = GOOD | {"loss": [{"output": "y"}, {"output": "z", "name": "l1", "label": ["b", "c"]}]}
    config = load_config(given, ["loss.1.weight=0.5", "model.ignore_index=-1"])
    assert [(each.name, each.weight, each.ignored, each.columns) for each in config.losses] == [
        ("cross_entropy", 1.0, -1, ("label",)),
        ("l1", 0.5, -1, ("b", "c")),
    ]
    assert config.model.output == ("y", "z")
    assert RunConfig.model_validate_json(config.model_dump_json()) == config
    assert load_config(config, ["loss.1.weight=0.5"]) == config
    assert load_config(GOOD, ["loss.name=mse"]).losses[0].name == "mse"
    with pytest.raises(ConfigError, match=r"loss.weight: there are 2 \[\[loss\]\]; name one, such as loss.0.w"):
        load_config(given, ["loss.weight=0.5"])
    with pytest.raises(ConfigError, match=r"loss.1.weight: Input should be greater than 0") as refusal:
        load_config(given, ["loss.1.weight=-1", "loss.0.wieght=1"])
    assert "unknown key loss.0.wieght; did you mean loss.0.weight?" in refusal.value.problems


def test_a_password_in_a_setting_is_refused_and_not_repeated() -> None:
    raw = {"model": {"path": "m.onnx"}, "data": {"source": "digits"}, "train": {"num_steps": 1}}
    for uri in ("postgresql://me:s3cret@db/x", "postgresql://me:s3/cret@db/x", "postgresql://db/x?password=s3cret"):
        with pytest.raises(ConfigError, match="set MLFLOW_TRACKING_URI") as caught:
            build_config({**raw, "monitor": {"tracking_uri": uri}})
        assert "s3cret" not in str(caught.value)


OPEN = """
[model]
path = "m.onnx"
# the loss: "mse" or
# "l1"
loss = "?"  # either
[data]
source = "digits"
# "a" or "b"
inputs = { "x.1" = "?", y = "c" }
[[loss]]
output = "one"
label = "?"
[[loss]]
# "d" or "e"
'label' = '?'
[train]
num_steps = 1
freeze = ["?"]
"""


def test_every_open_question_is_refused_at_once_with_its_line_and_the_comment_above_it(tmp_path: Path) -> None:
    path = tmp_path / "open.toml"
    path.write_text(OPEN)
    with pytest.raises(ConfigError) as refused:
        load_config(path)
    assert refused.value.problems == (
        f'{path}, line 6: model.loss is open ("?"); decide: the loss: "mse" or "l1"',
        f'{path}, line 10: data.inputs.x.1 is open ("?"); decide: "a" or "b"',
        f'{path}, line 13: loss.0.label is open ("?"); give it a value',
        f'{path}, line 16: loss.1.label is open ("?"); decide: "d" or "e"',
    ), "and nothing else, such as the unknown key"
    with pytest.raises(ConfigError, match=r"^line 10|line 10: data.inputs"):
        load_config(path, ["model.loss=mse", "loss.0.label=k", "loss.1.label=l"])


def test_questions_may_come_from_python_and_the_command_line_and_a_list_may_hold_the_pattern() -> None:
    asked = {**GOOD, "data": {"source": "digits", "label": "?"}}
    with pytest.raises(ConfigError, match=r'data.label is open \("\?"\); give it a value'):
        load_config(asked)
    with pytest.raises(ConfigError, match=r"model.loss is open"):
        load_config(GOOD, ['model.loss="?"'])
    assert load_config(GOOD, ['model.freeze=["?"]']).model.freeze == ("?",)


# -- limits of overrides


@pytest.mark.parametrize(
    "override",
    [
        "a." * 5000 + "b=1",
        "train.num_steps={" + "a." * 5000 + "b=1}",
        "train.num_steps=" + "[" * 5000 + "]" * 5000,
        "train.num_steps=" + "{a=" * 40 + "1" + "}" * 40,
        ("train", {"num_steps": [[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]}),
    ],
    ids=lambda override: str(override)[:20],
)
def test_an_override_is_as_deep_as_a_file_at_most(override: str | tuple[str, Any]) -> None:
    with pytest.raises(ConfigError) as refused:
        load_config(GOOD, [override])
    (problem,) = refused.value.problems
    assert "tables or lists inside each other in a configuration" in problem
    assert "the limit of 32" in problem
    assert len(problem) < 500


@pytest.mark.parametrize(
    "override", ["a" * 100_000, f"model.path={'a' * 100_000}", f"name={'a' * 100_000}", "x" * 2**23]
)
def test_a_long_word_is_shortened_in_the_message(override: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load_config(GOOD, [override])
    assert all(len(problem) < 1000 for problem in refused.value.problems)


def test_an_override_takes_the_place_of_what_was_in_a_table_before() -> None:
    found = layered(GOOD | {"data": {"source": "digits", "image": {"size": 8}}}, ["data.image={color='grey'}"])
    assert found.settings["data"]["image"] == {"color": "grey"}
    assert {key: where for key, where in found.origins.items() if key.startswith("data.image")} == {
        "data.image": "override"
    }


def test_every_number_of_a_configuration_has_a_least_and_a_greatest_value() -> None:
    def open_ends(schema: Any, where: str) -> list[str]:
        if isinstance(schema, list):
            return [each for item in schema for each in open_ends(item, where)]
        if not isinstance(schema, dict):
            return []
        ends = {"maximum", "exclusiveMaximum"} & schema.keys(), {"minimum", "exclusiveMinimum"} & schema.keys()
        found = [where] if schema.get("type") == "integer" and "enum" not in schema and not all(ends) else []
        return found + [each for key, item in schema.items() for each in open_ends(item, f"{where}.{key}")]

    found = open_ends(RunConfig.model_json_schema(), "")
    signed = ("ignore_index", "class_axis", "mask_values")
    assert [each for each in found if not any(name in each for name in signed)] == []


@pytest.mark.parametrize(
    ("file", "model", "named", "registered"),
    [
        ("config", "nets/yolo.onnx", "", "yolo"),
        ("config", "nets/plates/model.onnx", "", "plates"),
        ("plates", "nets/yolo.onnx", "", "plates"),
        # what a run has exported is trained on: not each one is a model called export
        ("config", "runs/0de1/export/model.onnx", "", "config"),
        ("config", "nets/yolo.onnx", "mine", "mine"),
    ],
)
def test_config_toml_is_not_the_name_of_every_registered_model(
    file: str, model: str, named: str, registered: str
) -> None:
    settings = {**GOOD, "name": file, "model": {"path": model}, "export": {"register_as": named}}
    assert build_config(settings).registered_name == registered
