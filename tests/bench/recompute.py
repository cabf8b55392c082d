"""What recomputation costs in eager mode: one forward and backward pass in each mode, beside none.

    python -m tests.bench.recompute            about 1 minute on 2 cores

Two GPT-2 of 4 layers in 4 units, one thread: a tiny one, whose time is that of calling operators, and one of width 256,
whose time is that of the arithmetic. The modes take turns in one process; printed is the median of the ratios to none.
"""

from __future__ import annotations

import statistics
import time

import torch
from torch import Tensor

from onward.trainer.onnx_graph.examples.reference_models import build_gpt2
from onward.trainer.onnx_import.driver import to_module
from onward.trainer.parallel.cost import estimate_costs
from onward.trainer.parallel.pipeline.balance import choose_unit_cuts, node_work
from onward.trainer.parallel.pipeline.cut_points import find_cut_points
from onward.trainer.parallel.pipeline.split import split
from onward.trainer.parallel.pipeline.stage import Chain, build_stages
from onward.trainer.parallel.recomputation.recompute import Mode, recompute

MODES: tuple[Mode, ...] = ("none", "selective", "whole")
TURNS, WARM = 30, 5
SIZES = {"width 32, 2 x 16 tokens": (32, 16, 2), "width 256, 4 x 128 tokens": (256, 128, 4)}


def chain_of(width: int, length: int, batch: int, mode: Mode) -> tuple[Chain, Tensor]:
    """The model in four units with one mode, and its input."""
    model = build_gpt2(vocab_size=256, sequence_length=length, num_layers=4, num_heads=4, width=width, dropout=0.0)
    module = to_module(model)
    ids = torch.randint(0, 256, (batch, length), generator=torch.Generator().manual_seed(0))
    costs = estimate_costs(module, [ids])
    cuts = choose_unit_cuts(module, find_cut_points(module.graph, costs), node_work(module.graph, costs), (), 4)
    (stage,) = build_stages(module, [split(module, cuts)], costs)
    recompute(stage.chain, mode, range(4))
    return stage.chain, ids


def one_pass(chain: Chain, ids: Tensor) -> float:
    """The CPU seconds of a forward and a backward pass, which other programs on the machine change little."""
    began = time.process_time()
    chain(ids)[0].square().mean().backward()
    return time.process_time() - began


def main() -> None:
    """Take turns; print the table."""
    torch.set_num_threads(1)
    for name, (width, length, batch) in SIZES.items():
        chains = {mode: chain_of(width, length, batch, mode) for mode in MODES}
        times: dict[Mode, list[float]] = {mode: [] for mode in MODES}
        for turn in range(WARM + TURNS):
            for mode, (chain, ids) in chains.items():
                seconds = one_pass(chain, ids)
                if turn >= WARM:
                    times[mode].append(seconds)
        ratios = {
            mode: statistics.median(a / b for a, b in zip(times[mode], times["none"], strict=True)) for mode in MODES
        }
        print(f"{name:26} none {statistics.median(times['none']) * 1e3:6.1f} ms", end="")
        print("".join(f"   {mode} {ratios[mode]:.2f}" for mode in MODES[1:]))


if __name__ == "__main__":
    main()
