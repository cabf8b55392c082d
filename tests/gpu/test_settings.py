"""With every setting of precision, memory and speed the device trains: the loss falls, the export passes its gate."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, get_args

import numpy as np
import onnxruntime
import pytest

from onward.trainer.config.sections.training import PrecisionConfig
from onward.trainer.distributed.weights import weights_in
from onward.trainer.export import exported_model as export
from onward.trainer.export.export_commands import evaluation_data
from onward.trainer.export.variants.variants import make_variant
from onward.trainer.run.directory import RunDir
from onward.trainer.run.machine.this_machine import missing_compiler
from tests.gpu import ranks
from tests.gpu.device import DEVICE, REASON, REHEARSAL, available
from tests.support import graphs
from tests.support.runs import events, final_tensors, losses, make_run, tiny_images, tiny_text

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not available(), reason=REASON)]

Record = Callable[[str, object], None]
Sections = Mapping[str, Mapping[str, Any]]
NUM_STEPS = 30
PRECISIONS = get_args(PrecisionConfig.model_fields["compute"].annotation)
SETTINGS: dict[str, Sections] = {
    **{compute: {"precision": {"compute": compute}} for compute in PRECISIONS},
    "recompute whole": {"recompute": {"mode": "whole"}},
    "recompute selective, bf16": {"recompute": {"mode": "selective"}, "precision": {"compute": "bf16"}},
    "compressed, exact": {"recompute": {"mode": "compressed"}},
    "compressed, fp8, bf16": {
        "recompute": {"mode": "compressed_fp8"},
        "precision": {"compute": "bf16"},
    },
    **{f"ZeRO {zero}": {"parallel": {"zero": zero}} for zero in (1, 2, 3)},
    "ZeRO 3, bf16": {"parallel": {"zero": 3}, "precision": {"compute": "bf16"}},
    "channels last": {"graph": {"memory_format": "channels_last"}},
    "contiguous, bf16": {"graph": {"memory_format": "contiguous"}, "precision": {"compute": "bf16"}},
    "LoRA": {"lora": {"weights": ("*weight*",), "rank": 4, "also_train": ("*bias*",)}},
    "LAMB": {"optimizer": {"name": "lamb", "learning_rate": 1e-2}},
    "SGD": {"optimizer": {"name": "sgd", "learning_rate": 0.05, "momentum": 0.9}},
    "bf16 moments": {"optimizer": {"name": "adamw", "learning_rate": 5e-3, "moments": "bf16"}},
    "4 micro-batches, fp16": {"train": {"gradient_accumulation_steps": 4}, "precision": {"compute": "fp16"}},
    "compile": {"graph": {"compile": True}},
    "compile, dynamic shapes": {"graph": {"compile": "dynamic"}},
    "compile, CUDA graphs": {"graph": {"compile": "reduce-overhead"}},
    "compile, autotuned": {"graph": {"compile": "max-autotune-no-cudagraphs"}},
    "compile, repeated blocks": {"graph": {"compile": "repeated"}},
    "compile, bf16": {"graph": {"compile": True}, "precision": {"compute": "bf16"}},
    "Lion": {"optimizer": {"name": "lion", "learning_rate": 1e-3}},
    "Adafactor": {"optimizer": {"name": "adafactor", "learning_rate": 2e-2}},
    "Muon": {"optimizer": {"name": "muon", "learning_rate": 0.02}},
    "Muon, bf16": {"optimizer": {"name": "muon", "learning_rate": 0.02, "muon": {"arithmetic": "bf16"}}},
}
REHEARSED = ("fp32", "bf16", "recompute whole", "ZeRO 3", "LoRA", "compile")
MODELS = {"GPT-2": (graphs.tiny_transformer, tiny_text), "conv net": (graphs.tiny_resnet, tiny_images)}
CASES = [
    (setting, model)
    for number, setting in enumerate(SETTINGS)
    for place, model in enumerate(MODELS)
    if not REHEARSAL or (setting in REHEARSED and number % 2 == place)
]


def make(folder: Path, model: str, sections: Sections) -> RunDir:
    build, columns = MODELS[model]
    basic: dict[str, dict[str, Any]] = {
        "train": {"num_steps": NUM_STEPS, "global_batch_size": 16, "seed": 3},
        "optimizer": {"name": "adamw", "learning_rate": 5e-3},
        "launch": {"device": DEVICE.type, "start_timeout_s": 300, "heartbeat_timeout_s": 290},
    }
    for name, values in sections.items():
        basic[name] = {**basic.get(name, {}), **values} if name != "optimizer" else dict(values)
    return make_run(folder, build(), columns(200), **basic)


@pytest.mark.parametrize(("setting", "model"), CASES)
def test_the_loss_falls_and_the_export_passes_its_gate(
    setting: str, model: str, tmp_path: Path, record_property: Record
) -> None:
    sections = SETTINGS[setting]
    if sections.get("graph", {}).get("compile"):
        if problem := missing_compiler():
            pytest.skip(problem)
        if REHEARSAL:
            pytest.skip("a C++ compiler takes most of a minute for it; a rehearsal compiles in its measurements")
    run = make(tmp_path, model, sections)
    result = ranks.train(run, timeout_s=290)
    found = losses(run)
    first, last = (float(np.mean([found[step] for step in steps])) for steps in (range(1, 4), range(28, 31)))
    record_property("first_loss", first)
    record_property("last_loss", last)
    assert result.step == NUM_STEPS
    assert last < 0.9 * first
    made = exported(run)
    record_property("parity", made.parity)
    record_property("evaluation_loss", [made.before["evaluation/loss"], made.after["evaluation/loss"]])
    assert made.after["evaluation/loss"] < made.before["evaluation/loss"]


def exported(run: RunDir) -> Any:
    """The record of the exported file, which onnxruntime has compared with the trained module."""
    checkpoint = export.Checkpoint(step=NUM_STEPS, weights=weights_in(final_tensors(run)))
    return export.export(run, checkpoint, data=evaluation_data(run), folder=run.root / "export")


def test_an_fp16_overflow_skips_its_step_and_training_goes_on(tmp_path: Path, record_property: Record) -> None:
    """The loss scale begins so high that the first gradients overflow; it is halved until they do not."""
    scale = {"compute": "fp16", "loss_scale": ("dynamic", 2.0**24)}
    run = make(tmp_path, "GPT-2", {"precision": scale})
    ranks.train(run)
    scalars = [event.values for event in events(run, "scalars")]
    skipped = [values["train/loss_scale"] for values in scalars if values.get("train/skipped")]
    record_property("skipped", len(skipped))
    last = [values["train/loss_scale"] for values in scalars if "train/loss_scale" in values][-1]
    record_property("loss_scale", last)
    assert skipped
    assert last < 2.0**24
    assert len(losses(run)) == NUM_STEPS


def test_the_exported_file_gives_the_same_results_under_the_cuda_provider(
    tmp_path: Path, record_property: Record
) -> None:
    providers = onnxruntime.get_available_providers()
    if "CUDAExecutionProvider" not in providers:
        pytest.skip(f"onnxruntime {onnxruntime.__version__} has no CUDAExecutionProvider, only {', '.join(providers)}")
    for model, (_, columns) in MODELS.items():
        run = make(tmp_path / model, model, {})
        ranks.train(run)
        made, results = exported(run), []
        path = made.path
        inputs = {name: array for name, array in columns(16).items() if name != "label"}
        for provider in ("CPUExecutionProvider", "CUDAExecutionProvider"):
            session = onnxruntime.InferenceSession(path, providers=[provider])
            if provider not in session.get_providers():
                pytest.skip(f"onnxruntime {onnxruntime.__version__} cannot start its {provider} on this machine")
            results.append(session.run(None, inputs)[0])
        difference = float(np.abs(results[0] - results[1]).max() / np.abs(results[0]).max())
        record_property(model, difference)
        assert difference <= 1e-3
        # behind the sessions: a provider that is listed may not start on this machine
        assert made.cuda is not None, "the export has compared them itself"
        record_property(f"{model}, recorded by the export", made.cuda.model_dump())
        assert made.cuda.difference <= 1e-3
        half = make_variant("fp16_compute", path, data=evaluation_data(run), tolerance=0.02)
        assert half.cuda is not None
        record_property(f"{model} in half precision", half.cuda.model_dump())
        assert not half.refused
        assert half.cuda.difference <= 2e-2
        assert half.cuda.latency_ratio > 0
