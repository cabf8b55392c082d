"""Explain what pydantic refuses: where it is, what was expected, and which setting or choice was probably meant."""

from __future__ import annotations

import difflib
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from pydantic import ValidationError

from onward.trainer.config.loss_rules import LOSS_RULES
from onward.trainer.config.removed_settings import sentence_of
from onward.trainer.config.section import Section, plain_word, section_at, table_type
from onward.trainer.config.urls import url_of
from onward.trainer.errors import MAX_SHOWN, shown

SYNONYMS: Mapping[str, tuple[str, ...]] = {
    "optimizer.learning_rate": ("lr", "learning", "rate", "base_lr", "max_lr", "peak_lr", "step_size", "eta"),
    "optimizer.weight_decay": ("wd", "decay", "l2", "l2_regularization"),
    "optimizer.name": ("optimizer_name", "optimizer_type", "algorithm"),
    "optimizer.alpha": ("beta1", "beta_1", "adam_beta1", "b1"),
    "optimizer.beta": ("beta2", "beta_2", "adam_beta2", "b2"),
    "optimizer.alpha and optimizer.beta": ("betas",),
    "optimizer.epsilon": ("eps", "adam_epsilon"),
    "optimizer.layer_decay": ("llrd", "layerwise_decay", "layerwise_lr_decay"),
    "train.global_batch_size": ("bs", "batch", "batch_size", "batchsize", "train_batch_size"),
    "train.evaluation_batch_size": ("eval_batch_size", "val_batch_size", "test_batch_size"),
    "train.gradient_accumulation_steps": (
        *("accumulation", "accum", "accumulate", "grad_accum", "accumulation_steps", "grad_accumulation_steps"),
        *("accumulate_grad_batches", "micro_batches", "num_micro_batches"),
    ),
    "train.num_epochs": ("epoch", "epochs", "n_epochs", "max_epochs", "num_train_epochs"),
    "train.num_steps": ("step", "steps", "max_steps", "iterations", "iters", "max_iters", "num_iterations", "updates"),
    "train.seed": ("random_seed", "random_state", "manual_seed"),
    "train.clip_norm": ("clip", "grad_clip", "gradient_clip", "max_grad_norm", "gradient_clip_val", "clip_grad_norm"),
    "train.log_period": ("log_every", "log_interval", "logging_steps", "log_every_n_steps"),
    "train.evaluation_period": ("eval_every", "eval_interval", "eval_steps", "eval_period", "val_check_interval"),
    "precision.compute": ("amp", "mixed_precision", "autocast", "fp16", "bf16", "tf32", "half", "dtype", "precision"),
    "precision.loss_scale": ("grad_scaler", "grad_scale", "scaler"),
    "schedule.mode": ("lr_schedule", "lr_scheduler", "lr_scheduler_type", "scheduler", "decay_mode"),
    "schedule.warmup_ratio": ("warmup", "warm_up", "warmup_steps", "num_warmup_steps", "warmup_fraction"),
    "schedule.floor": ("min_lr", "eta_min", "min_lr_ratio"),
    "model.path": ("onnx", "onnx_path", "model_path", "checkpoint_path"),
    "model.loss": ("criterion", "loss_fn", "loss_function", "loss_name", "objective"),
    "model.num_classes": ("classes", "n_classes", "num_labels"),
    "data.source": ("dataset", "train_data", "train_source", "data_path", "data_dir", "train_dir"),
    "data.evaluation_source": ("val_data", "eval_data", "val_source", "validation_source", "val_dir", "eval_source"),
    "data.evaluation_fraction": ("val_split", "validation_split", "val_fraction", "val_size", "eval_fraction"),
    "data.label": ("target", "targets", "labels", "label_column", "target_column", "y"),
    "data.text.max_length": ("max_len", "max_seq_length", "seq_len", "max_seq_len"),
    "data.image.workers": ("workers", "num_workers", "n_workers", "dataloader_num_workers"),
    "launch.num_ranks": (
        "nproc",
        "nprocs",
        "nproc_per_node",
        "np",
        "world_size",
        "ranks",
        "n_ranks",
        "processes",
        "workers",
    ),
    "launch.device": ("gpu", "cuda", "accelerator", "use_gpu"),
    "launch.threads_per_rank": ("threads", "num_threads", "omp_num_threads"),
    "launch.hostfile": ("hosts", "host_file", "machinefile"),
    "parallel.data": ("dp", "ddp", "replicas", "data_parallel", "data_parallel_size"),
    "parallel.sequence_parallel": ("sp", "sequence_parallelism"),
    "parallel.tensor": ("tp", "tensor_parallel", "tensor_parallel_size", "model_parallel"),
    "parallel.pipeline": ("pp", "pipeline_parallel", "pipeline_parallel_size"),
    "parallel.zero": ("zero_stage", "fsdp", "zero_optimization"),
    "recompute.mode": (
        *("checkpointing", "gradient_checkpointing", "activation_checkpointing", "remat"),
        *("use_gist", "gist", "activation_dtype"),
    ),
    "checkpoint.period": ("save_steps", "save_every", "save_period", "save_interval", "checkpoint_every", "every"),
    "checkpoint.keep_newest": ("keep", "keep_last", "save_total_limit", "max_to_keep", "save_top_k"),
    "checkpoint.load": ("resume", "resume_from", "resume_from_checkpoint", "load_from", "init_from"),
    "checkpoint.best_metric": ("metric_for_best_model",),
    "stop.patience": ("early_stopping", "early_stopping_patience"),
    "average.decay": ("ema", "ema_decay"),
    "lora.rank": ("lora_r", "lora_rank", "r"),
    "monitor.experiment": ("experiment_name", "project"),
    "monitor.report_to": (
        *("tensorboard", "tensor_board", "wandb", "weights_and_biases", "weights_&_biases", "w&b"),
        *("logger", "loggers", "log_with", "trackers"),
    ),
    "export.path": ("output_dir", "output_path", "save_path", "save_to"),
}
"""A setting -> the names that other tools and most people use for it."""

OF_CHOICES: Mapping[str, str] = {
    **{word: name for name, rule in LOSS_RULES.items() for word in rule.synonyms},
    "float32": "fp32",
    "float16": "fp16",
    "half": "fp16",
    "bfloat16": "bf16",
    "gpu": "cuda",
}
"""A word -> the choice of a setting that it usually means; of use where the setting has that choice."""


def explained(error: ValidationError, section: str, model: type[Section], root: type[Section]) -> list[str]:
    """Return pydantic's findings as sentences. section: the table that `model` was read from; root: all settings."""
    sentences = []
    findings = error.errors(include_url=False)
    # wrong values come first: one of them may be hidden behind many unknown keys
    strange = [finding for finding in findings if finding["type"] == "extra_forbidden"]
    others = _one_for_each_value(finding for finding in findings if finding["type"] != "extra_forbidden")
    for finding in [*others[:MOST_UNKNOWN], *strange[:MOST_UNKNOWN]]:
        where = shown(".".join(str(part) for part in (section, *finding["loc"]) if part != ""))
        # the tables around the key; a finding of a whole table has no key
        *outer, _ = (section, *finding["loc"]) if finding["loc"] else ("", "")
        table = section_at(model, finding["loc"])
        is_strange = finding["type"] == "extra_forbidden"
        if is_strange and (gone := sentence_of(where)):
            sentences.append(gone)
        elif is_strange and (len(outer) == 1 or table is not model):
            known = [".".join(map(str, (*outer, name))) for name in table.model_fields]
            sentences.append(unknown(where, known, "key", root))
        elif finding["type"] == "missing":
            sentences.append(f"{where} is missing; set it")
        else:
            message = finding["msg"].removeprefix("Value error, ").replace("valid tuple", "list")
            given = finding.get("input")
            is_secret = isinstance(given, str) and bool(url_of(given))  # a URL may hold a password
            said = (
                f", not {shown(repr(given))}" if isinstance(given, str | int | float | bool) and not is_secret else ""
            )
            if finding["type"] == "literal_error" and isinstance(given, str):
                said += _meant_choice(given, message)
            sentences += [f"{where}: {message}{said}"] if where else message.splitlines()
    of_section = f" of {section}" if section else ""
    return [
        *sentences,
        *_further(len(others), f"wrong values{of_section}"),
        *_further(len(strange), f"unknown keys{of_section}"),
    ]


def _one_for_each_value(findings: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Join what pydantic finds wrong with one value: of a setting of several types, something for each of them.

    The type in which it got deepest into the value is the one that is meant: ["a", 3] is a list with a wrong entry.
    """
    of_values: dict[Place, list[dict[str, Any]]] = {}
    for finding in findings:
        place = finding["loc"]
        setting = tuple(itertools.takewhile(lambda part: not TYPE.fullmatch(str(part)), place))
        inside = tuple(part for part in place[len(setting) :] if not TYPE.fullmatch(str(part)))
        of_values.setdefault(setting, []).append({**finding, "loc": (*setting, *inside)})
    joined: dict[Place, dict[str, Any]] = {}
    for found in of_values.values():
        depth = max(len(finding["loc"]) for finding in found)
        for finding in (finding for finding in found if len(finding["loc"]) == depth):
            former = joined.setdefault(finding["loc"], finding)
            if former is not finding:
                former["msg"] += f", or {finding['msg'].removeprefix('Input should be ')}"
                # whose choices may have the one that is meant
                former["type"] = max(former["type"], finding["type"], key="literal_error".__eq__)
    return [*joined.values()]


def unknown_sections(raw: Iterable[str], root: type[Section]) -> list[str]:
    """Return a sentence for each table and key outside of tables that is no section; of many, for the first ones."""
    strange = [key for key in raw if key not in root.model_fields]
    sentences = [unknown(shown(key), root.model_fields, "section", root) for key in strange[:MOST_UNKNOWN]]
    return [*sentences, *_further(len(strange), "unknown sections")]


def _further(found: int, what: str) -> list[str]:
    return [f"... and {found - MOST_UNKNOWN:,} more {what}"] if found > MOST_UNKNOWN else []


def unknown(key: str, known: Iterable[str], kind: str, root: type[Section]) -> str:
    """Return the sentence about an unknown setting or section, with the one that was probably meant.

    known: what the same table has. A synonym counts before a similar name: `optimizer.lr` is no misspelt
    `optimizer.alpha`. A setting that earlier versions had is answered with what took its place.
    """
    if gone := sentence_of(key):
        return gone
    names = {name.rpartition(".")[2]: name for name in known}
    word = plain_word(key.rpartition(".")[2])[:MAX_SHOWN]
    by_word = {plain_word(name): name for name in names}
    meant: list[str] = []
    # the same word but for case, dashes or underscores
    if word in by_word:
        meant = [names[by_word[word]]]
    elif named := _synonyms(word):
        meant = named
    elif near := difflib.get_close_matches(word, by_word, n=1):
        meant = [names[by_word[near[0]]]]
    else:
        meant = meant_settings(word, root)
    hint = f"did you mean {' or '.join(meant)}?" if meant else f"known: {', '.join(names.values())}"
    return f"unknown {kind} {key}; {hint}"


def meant_settings(word: str, root: type[Section]) -> list[str]:
    """Return the settings, in whichever table, that a word such as epochs, batch-size or num_steps may mean."""
    word = plain_word(word)[:MAX_SHOWN]
    elsewhere = [setting for setting in _settings(root, "") if setting.rpartition(".")[2] == word]
    # a name that many tables have says nothing
    return _synonyms(word) or (elsewhere if len(elsewhere) <= MOST_SUGGESTED else [])


def _synonyms(word: str) -> list[str]:
    return [setting for setting, words in SYNONYMS.items() if word in words]


MOST_SUGGESTED = 3
Place = tuple[int | str, ...]
TYPE = re.compile(r"str|int|float|bool|LabelUnits|constrained-\w+|function-.*|(literal|tuple|dict|list)\[.*")
"""How pydantic names a type in the place of a finding, behind the setting."""
MOST_UNKNOWN = 20
"""Unknown keys, and wrong values, of one table that are named; what each was meant to be takes a millisecond."""


def _settings(section: type[Section], name: str) -> Iterator[str]:
    """Yield every setting by its full name, such as `data.image.size`."""
    for key, field in section.model_fields.items():
        if inner := table_type(field.annotation):
            yield from _settings(inner, f"{name}{key}.")
        elif name:
            yield f"{name}{key}"


def _meant_choice(given: str, message: str) -> str:
    """Return which of the choices that pydantic's message lists was probably meant, as a question; "" for none."""
    # pydantic quotes each choice: every second part is one
    choices = message.split("'")[1::2]
    synonym = OF_CHOICES.get(plain_word(given))
    word = plain_word(given)[:MAX_SHOWN]  # which would be compared letter by letter
    near = [synonym] if synonym in choices else difflib.get_close_matches(word, choices, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""
