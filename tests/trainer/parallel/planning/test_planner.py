"""`onward plan` estimates what training then does; `auto` chooses what fits, with the reason against all others."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from onward.trainer.config.run_config import RunConfig
from onward.trainer.distributed.processes import MPIContext
from onward.trainer.errors import ConfigError
from onward.trainer.onnx_graph.examples.reference_models import build_gpt2, build_squeezenet
from onward.trainer.parallel.planning.plan_record import Plan
from onward.trainer.parallel.planning.planner import divisions, plan
from onward.trainer.run.directory import RunDir, read_config
from tests.equivalence.layouts import MODELS, Case, make_case
from tests.support.ranks import run_ranks
from tests.support.runs import make_run, tiny_text

GPT, BERT, LLAMA, CONV = MODELS
LAYERS, MICRO_BATCHES = 4, 8


def gpt2(folder: Path, **sections: Any) -> RunConfig:
    """4 layers of width 64: 16 sequences of 32 bytes in 8 micro-batches, if `train` says nothing else."""
    model = build_gpt2(vocab_size=96, sequence_length=12, num_layers=LAYERS, num_heads=4, width=64, dropout=0.0)
    train = {"global_batch_size": 16, "gradient_accumulation_steps": MICRO_BATCHES, "num_steps": 1}
    run = make_run(folder, model, tiny_text(40), **{"train": train, **sections})
    return read_config(run)


def sent(found: Plan, axis: str) -> dict[str, tuple[int, int]]:
    return {each.what: (each.count, each.bytes) for each in found.traffic if each.axis == axis}


def test_stages_have_equal_work_and_hold_every_weight(tmp_path: Path) -> None:
    alone = plan(gpt2(tmp_path / "1"))
    found = plan(gpt2(tmp_path / "4", parallel={"pipeline": 4}))
    assert [stage.stage for stage in found.stages] == [0, 1, 2, 3]
    assert sum(stage.flops for stage in found.stages) == alone.stages[0].flops
    assert max(stage.flops for stage in found.stages) < 1.3 * alone.stages[0].flops / 4
    table = 96 * 64  # the head is tied to the table: the first stage and the last hold it
    assert sum(stage.parameters for stage in found.stages) == alone.stages[0].parameters + table
    assert found.stages[0].ends
    assert found.stages[-1].ends == "logits"
    assert [stage.sends for stage in found.stages] == [2 * 12 * 64 * 4] * 3 + [0]
    assert found.bubble == pytest.approx(3 / 11)
    assert sent(found, "pipeline")["gradients of tied weights"] == (2, 2 * table * 4)
    assert [memory.activations for memory in found.memory] == sorted(
        (memory.activations for memory in found.memory), reverse=True
    )


def test_a_tensor_parallel_plan_has_megatrons_regions_and_collectives(tmp_path: Path) -> None:
    found = plan(gpt2(tmp_path, parallel={"tensor": 2}))
    assert Counter(region.kind for region in found.regions) == {"attention": LAYERS, "mlp": LAYERS, "vocabulary": 1}
    reasons = dict(found.replicated)
    assert list(reasons) == ["transformer.wpe.weight"]
    assert "positions" in reasons["transformer.wpe.weight"]
    # 2 forward and 2 backward in a layer; the table forward, the head backward, 2 for the loss
    count, _ = sent(found, "tensor")["all-reduce of activations"]
    assert count == MICRO_BATCHES * (4 * LAYERS + 4)


def counted(mpi: MPIContext, root: str) -> int:
    """Train one step; return the number of tensor-parallel collectives of its forward and backward passes."""
    from onward.trainer.events import Heartbeat
    from onward.trainer.loop import train

    class Calls(TorchDispatchMode):
        number = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.number += func.namespace == "_c10d_functional" and func._opname == "all_reduce"
            return func(*args, **(kwargs or {}))

    class Step(Heartbeat):
        """Counts from the beginning of the step to its last micro-batch, before the evaluation."""

        first = last = 0
        training = True

        def beat(self, step: int | None = None, *, longest_step_s: float = 0.0) -> None:
            if self.step == 0 and step == 1:
                self.first = calls.number
            elif self.step == 1:
                self.training = self.training and torch.is_grad_enabled()
                self.last = calls.number if self.training else self.last
            super().beat(step, longest_step_s=longest_step_s)

    run = RunDir(Path(root))
    if mpi.rank == 0:
        run.begin_attempt()
    torch.distributed.barrier()
    with Calls() as calls:  # type: ignore[no-untyped-call]
        heartbeat = Step(run.heartbeat)
        train(run, mpi, attempt=1, heartbeat=heartbeat, stop_requested=lambda: False)
    return heartbeat.last - heartbeat.first


@pytest.mark.mpi
@pytest.mark.parametrize("model", [GPT, *(pytest.param(model, marks=pytest.mark.slow) for model in (BERT, LLAMA))])
def test_a_run_makes_as_many_collectives_as_its_plan_estimates(tmp_path: Path, model: str) -> None:
    run = make_case(Case(model, "tp2", sections={"train": {"num_steps": 1}}), tmp_path)
    wanted, _ = sent(plan(read_config(run)), "tensor")["all-reduce of activations"]
    assert run_ranks(2, "tests.trainer.parallel.planning.test_planner:counted", str(run.root), timeout_s=120) == [
        wanted,
        wanted,
    ]


def test_a_plan_has_the_bytes_that_zero_gathers_scatters_and_saves(tmp_path: Path) -> None:
    found = [
        plan(gpt2(tmp_path / str(zero), parallel={"data": 2, "zero": zero, "units": 2}, train=SHORT))
        for zero in range(4)
    ]
    model = found[0].stages[0].parameters * 4
    assert sent(found[0], "data") == {"gradients (sum)": (1, 2 * model)}
    for zero, gathers, scatters in ((1, 1, 1), (2, 1, 4), (3, 8, 4)):
        traffic = sent(found[zero], "data")
        assert traffic["weights gathered"][1] == gathers * model
        assert traffic["gradients scattered"][1] == scatters * model
    memory = [each.memory[0] for each in found]
    assert memory[1].optimizer == memory[0].optimizer // 2
    assert memory[2].gradients == memory[0].gradients // 2
    assert memory[3].weights < memory[2].weights


@pytest.mark.slow
def test_in_bf16_zero_gathers_what_products_read_in_half_and_a_rank_without_zero_has_casts(tmp_path: Path) -> None:
    def planned(compute: str, zero: int) -> Plan:
        parallel = {"data": 2, "zero": zero, "units": 2}
        folder = tmp_path / f"{compute}-{zero}"
        return plan(gpt2(folder, parallel=parallel, train=SHORT, precision={"compute": compute}))

    (full, whole), (half, casts) = ([planned(compute, zero) for zero in (2, 0)] for compute in ("tf32", "bf16"))
    assert [found.compute for found in (whole, casts)] == ["fp32", "bf16"], "a CPU has no TF32"
    products = LAYERS * (64 * (192 + 64 + 256 + 256) + 192 + 64 + 256 + 64)
    tied = 96 * 64
    gathered = [sent(found, "data")["weights gathered"][1] for found in (full, half)]
    assert gathered[0] - gathered[1] == 2 * products
    assert casts.memory[0].weights - whole.memory[0].weights == 2 * (products + tied)
    assert full.memory[0].weights - half.memory[0].weights == 2 * (products - tied), "the tied weight is cast"


SHORT = {"global_batch_size": 16, "gradient_accumulation_steps": 4, "num_steps": 1}


@pytest.mark.slow
def test_as_few_units_are_recomputed_as_memory_allows(tmp_path: Path) -> None:
    def planned(gib: float) -> Plan:
        parallel = {"units": LAYERS, "memory_gib": gib}
        return plan(gpt2(tmp_path / f"{gib}", parallel=parallel, recompute={"mode": "whole"}, train=LONG))

    plain = planned(1.0)
    assert plain.stages[0].recomputed == 0
    everything = plan(gpt2(tmp_path / "all", parallel={"units": LAYERS}, recompute={"mode": "whole"}, train=LONG))
    assert everything.stages[0].recomputed == everything.stages[0].units
    middle = (plain.memory[0].peak + everything.memory[0].peak) / 2 / 2**30
    some = planned(middle)
    assert 0 < some.stages[0].recomputed < some.stages[0].units
    assert everything.memory[0].peak < some.memory[0].peak < plain.memory[0].peak
    assert plain.stages[0].flops < some.stages[0].flops < everything.stages[0].flops
    with pytest.raises(ConfigError, match=r"activations of 1 micro-batches take [\d,]+ bytes with all .* recomputed"):
        planned(everything.memory[0].weights * 4 / 2**30)


LONG = {"global_batch_size": 16, "gradient_accumulation_steps": 1, "num_steps": 1}


# -- auto


def test_a_graph_whose_results_do_not_fit_the_loss_is_refused_with_the_reason(tmp_path: Path) -> None:
    text = """
        <ir_version: 10, opset_import: ["" : 17]>
        mean (float[N, 3] x) => (float[2] y) <float[3, 2] w = {1, 2, 3, 4, 5, 7}> {
            scores = MatMul(x, w)
            y = ReduceMean <axes = [0], keepdims = 0> (scores)
        }"""
    columns = {"x": np.ones((20, 3), np.float32), "label": np.arange(20) % 2}
    run = make_run(tmp_path, onnx.parser.parse_model(text), columns, train={"global_batch_size": 8, "num_steps": 1})
    with pytest.raises(ConfigError, match=r"output 'y' is \[2\] and the labels are \[8\]: the output has 2 rows"):
        plan(read_config(run))


def test_divisions_are_all_products_of_three_sizes() -> None:
    found = [tuple(sizes.values()) for sizes in divisions(8)]
    assert len({*found}) == len(found) == 10
    assert all(data * tensor * pipeline == 8 for data, tensor, pipeline in found)


def automatic(folder: Path, gib: float, num_ranks: int = 4) -> Plan:
    launch = {"num_ranks": num_ranks}
    return plan(gpt2(folder, parallel={"sizes": "auto", "memory_gib": gib}, train=LONG, launch=launch))


@pytest.mark.slow
def test_auto_adds_zero_and_recomputation_only_when_memory_requires_it(tmp_path: Path) -> None:
    plain = automatic(tmp_path / "plain", 1.0)
    assert plain.num_ranks == 4
    assert (plain.recompute.mode, plain.parallel.zero) == ("none", 0)
    assert len(plain.considered) == len(divisions(4)) - 1
    least = min(memory.peak for memory in plain.memory)
    tight = automatic(tmp_path / "tight", 0.6 * least / 2**30)
    assert max(memory.peak for memory in tight.memory) <= tight.memory_bytes == int(0.6 * least)
    assert tight.parallel.sizes == "auto"  # so that the run that it becomes may be begun again with `auto`


@pytest.mark.slow
def test_auto_refuses_a_model_that_fits_nowhere_with_the_numbers(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        automatic(tmp_path, 1e-4)
    assert "no division of 4 ranks fits into 0.0001 GiB a rank" in error.value.problems[0]
    assert len(error.value.problems) == 1 + len(divisions(4))
    assert "data 4 x tensor 1 x pipeline 1: takes 0.00" in error.value.problems[1]


def test_auto_leaves_out_divisions_that_the_graph_or_the_batch_does_not_allow(tmp_path: Path) -> None:
    found = automatic(tmp_path, 1.0, num_ranks=7)
    assert found.num_ranks == 7
    assert (
        "data 7 x tensor 1 x pipeline 1: 16 samples (train.global_batch_size) do not divide among 7 replicas "
        "with 1 or more micro-batches each"
    ) in found.considered


def conv_net(folder: Path, **sections: Any) -> RunConfig:
    """A SqueezeNet, a batch of 8 images of 64 x 64 pixels."""
    rows = np.random.default_rng(0)
    columns = {"image": rows.normal(size=(16, 3, 64, 64)).astype(np.float32), "label": rows.integers(0, 5, 16)}
    train = {"global_batch_size": 8, "num_steps": 1}
    model = build_squeezenet(num_classes=5, image_size=64)
    return read_config(make_run(folder, model, columns, **{"train": train, **sections}))


@pytest.mark.slow
def test_the_plan_of_compressed_activations_knows_that_they_are_smaller(tmp_path: Path) -> None:
    plain = plan(conv_net(tmp_path / "plain"))
    exact, fp8 = (
        plan(conv_net(tmp_path / mode, recompute={"mode": mode})) for mode in ("compressed", "compressed_fp8")
    )
    activations = [found.memory[0].activations for found in (plain, exact, fp8)]
    assert activations[1] < 0.5 * activations[0]
    assert activations[2] < 0.9 * activations[1]
    assert (exact.stages[0].recomputed, exact.stages[0].units) == (0, 1)
    assert exact.step_s == plain.step_s


@pytest.mark.slow
def test_auto_compresses_before_it_recomputes_and_never_rounds(tmp_path: Path) -> None:
    def automatic(folder: Path, peak: float, **sections: Any) -> Plan:
        # one sample a micro-batch already: nothing else is left to try
        sizes = {"sizes": "auto", "memory_gib": peak / 2**30}
        train = {"global_batch_size": 1, "num_steps": 1}
        return plan(conv_net(folder, parallel=sizes, launch={"num_ranks": 1}, train=train, **sections))

    plain, exact, fp8 = (
        automatic(tmp_path / name, 2.0**30, recompute=recompute).memory[0].peak
        for name, recompute in {
            "plain": {},
            "exact": {"mode": "compressed"},
            "fp8": {"mode": "compressed_fp8"},
        }.items()
    )
    assert fp8 < exact < plain
    found = automatic(tmp_path / "between", (plain + exact) / 2)
    assert found.recompute.mode == "compressed"
    with pytest.raises(ConfigError, match="no division of 1 ranks fits"):
        automatic(tmp_path / "tight", min(fp8, exact - 1000))
