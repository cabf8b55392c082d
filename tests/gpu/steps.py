"""The steps of the examination, in their order."""

from __future__ import annotations

from dataclasses import dataclass

STEP_LIMIT_S = 9 * 60.0
TOTAL_LIMIT_S = 40 * 60.0


@dataclass(frozen=True)
class Step:
    """One step: a process of its own, with a limit of time."""

    name: str
    module: str
    """Module in tests/gpu/: `test_X` is run by pytest, of `measure_X` the function `main` is called."""
    claim: str
    """What it proves or measures, for the page."""
    needs: tuple[str, ...] = ()
    """Packages without which the step is skipped, beside EVERY_STEP_NEEDS."""
    keyword: str = ""
    """The tests of the module that belong to this step, as pytest's option -k; empty = all."""
    limit_s: float = STEP_LIMIT_S


PYTEST = ("pytest", "pytest_timeout")
STEPS: tuple[Step, ...] = (
    Step(
        "operators",
        "test_operators",
        "ONNX's node tests on the GPU; three steps of every kind of model as on the CPU (losses 1e-5, gradients 1e-4)",
        (*PYTEST, "onnxruntime", "onnxscript"),
    ),
    Step(
        "layouts",
        "test_layouts",
        "one rank over NCCL under mpirun; 2 and 4 ranks that share the GPU over gloo train what one rank trains",
        (*PYTEST, "onnxruntime"),
    ),
    Step(
        "links",
        "test_links",
        "gradients on a stream of their own, compressed, by Adasum; two ranks on one GPU under mpirun; memory segments",
        PYTEST,
    ),
    Step(
        "hot-loop",
        "test_hot_loop",
        "one wait of the host in a step; copies beside the computation; norm and half-precision loss as on the CPU",
        (*PYTEST, "onnxruntime"),
    ),
    Step(
        "resume",
        "test_resume",
        "killed and resumed with the same bits under deterministic algorithms; a checkpoint from CPU to GPU and back",
        (*PYTEST, "onnxruntime", "onnxscript"),
    ),
    Step(
        "settings",
        "test_settings",
        "every precision, fp16 overflow, recomputation, ZeRO 1-3, channels_last, LoRA: trains, exports; CUDA provider",
        (*PYTEST, "onnxruntime"),
        keyword="not compile",
    ),
    Step(
        "compiled",
        "test_settings",
        "every way to compile: the loss falls, and the exported file passes its gate",
        (*PYTEST, "onnxruntime"),
        keyword="compile",
    ),
    Step(
        "failures",
        "test_failures",
        "out of memory, a killed rank, a label out of range, a kernel that never ends: the message and the record",
        PYTEST,
    ),
    Step(
        "profile", "test_profile", "chosen steps by node of the file: kernels and nodes, the sum, the same bits", PYTEST
    ),
    Step("speed-gpt2", "measure_gpt2", "GPT-2 124M beside a loop written by hand: fp32, TF32, bf16, compiled, batch 1"),
    Step(
        "speed-large",
        "measure_large",
        "GPT-2 of 1.0 billion parameters beside a loop written by hand, in bf16, compiled and not",
    ),
    Step("one-step", "measure_step", "one step under the profiler: kernels, idle time, waits, copies, optimizer, norm"),
    Step("attention", "measure_attention", "the kernel that computes attention, for each form of mask"),
    Step("speed-vision", "measure_vision", "ResNet-50, channels_last and contiguous", ("torchvision",)),
    Step("speed-bert", "measure_bert", "BERT-base with padded sequences, eager and compiled"),
    Step("input", "measure_input", "batches from shards beside the step's rate, and their copies", ("torchvision",)),
    Step("checkpoint", "measure_checkpoint", "what a checkpoint costs the steps around it"),
    Step("memory", "measure_memory", "predicted and measured peaks, 28 layouts and larger; a rank before it trains"),
    Step("compile", "measure_compile", "compiled with static and dynamic shapes, CUDA graphs, by repeated blocks"),
)

EVERY_STEP_NEEDS = ("torch", "onnx", "numpy", "pydantic", "psutil", "pyarrow", "safetensors", "mpi4py")
"""What the trainer imports at its start; mpi4py may be without an MPI library."""
