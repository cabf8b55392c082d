"""Choose the arithmetic of a job, which its slowest GPU decides, and set torch's global switches for it.

    precision.compute    GPUs from Ampere on (compute capability 8.0)    older GPUs    CPU
    fp32                 fp32, TF32 off                                  fp32          fp32
    tf32                 TF32                                            fp32          fp32
    auto                 bf16                                            fp32          fp32
    bf16, fp16           as they say                                     ...           ...

On a CPU fp32 is fp32, whatever the environment says to torch (TORCH_ALLOW_TF32_CUBLAS_OVERRIDE), and numbers below
1.2e-38 are zero. The momentum of a weight that gets no more gradients would otherwise stay at such a number, since 0.9
of the smallest is rounded to the smallest, and processors take several times as long for them.

TF32 is fp32 whose products and convolutions read 10 of the 23 bits of each factor (NVIDIA, Ampere whitepaper). torch
switches it on for convolutions by default and off for matrix products; here `fp32` switches both off.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections.abc import Iterator

import torch
import torch.distributed as dist

from onward.trainer.config.run_config import RunConfig
from onward.trainer.config.sections.training import PrecisionConfig
from onward.trainer.distributed.processes import MPIContext
from onward.trainer.errors import UnsupportedModel

log = logging.getLogger(__name__)

AMPERE = (8, 0)
"""The first compute capability with tensor cores for bf16 and TF32."""
WORKSPACES = (":4096:8", ":16:8")
"""Values of CUBLAS_WORKSPACE_CONFIG with which cuBLAS gives the same bits every time, the faster one first."""


def set_arithmetic(config: RunConfig, mpi: MPIContext) -> RunConfig:
    """Return the configuration with the type in which this job computes, and set torch's switches for it.

    To be called before the first product. Collective: every rank of the world; all of them choose the same.
    """
    capability = _least_capability(mpi)
    precision = resolve_precision(config.precision, capability)
    if mpi.rank == 0 and precision != config.precision:
        devices = f"GPUs of compute capability {'.'.join(map(str, capability))}" if any(capability) else "the CPU"
        log.info("precision.compute %r: computing in %s on %s", config.precision.compute, precision.compute, devices)
    if mpi.device.type == "cuda":
        # torch.compile reads these older switches and the newer fp32_precision; setting these sets both, setting the
        # newer ones makes torch refuse to read the older ones
        torch.backends.cuda.matmul.allow_tf32 = precision.compute == "tf32"
        torch.backends.cudnn.allow_tf32 = precision.compute == "tf32"
    else:
        # threads that are started later have the switch of the one that starts them
        torch.set_flush_denormal(True)
        torch.set_float32_matmul_precision("highest")
    if config.train.deterministic:
        _use_deterministic_algorithms(compiled=config.graph.compiles)
    return config.model_copy(update={"precision": precision})


def resolve_precision(config: PrecisionConfig, capability: tuple[int, int]) -> PrecisionConfig:
    """Return the settings with a type that devices of this compute capability have; (0, 0) is a CPU.

    `auto` chooses no fp16: its gradients may overflow where those of bf16 do not. The exported file is compared with
    the module in fp32 whatever the type of the training, so the choice does not concern that check.
    """
    compute = config.compute
    if compute == "auto":
        compute = "bf16" if capability >= AMPERE else "fp32"
    if compute == "tf32" and capability < AMPERE:
        compute = "fp32"
    return config.model_copy(update={"compute": compute})


def capability_of(device: torch.device) -> tuple[int, int]:
    """Return the compute capability of a GPU; (0, 0) for the CPU."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


def _least_capability(mpi: MPIContext) -> tuple[int, int]:
    """Return the lowest compute capability among the job's GPUs. Collective: every rank of the world."""
    major, minor = capability_of(mpi.device)
    # one number, so that one minimum compares major and minor together
    least = torch.tensor(1000 * major + minor)
    if mpi.world_size > 1 and mpi.device.type == "cuda":
        dist.all_reduce(least, op=dist.ReduceOp.MIN)
    return divmod(int(least), 1000)


# -- train.deterministic


def _use_deterministic_algorithms(*, compiled: bool) -> None:
    # torch refuses matrix products on a GPU without this, and cuBLAS reads it when it starts
    if os.environ.get("CUBLAS_WORKSPACE_CONFIG") not in WORKSPACES:
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = WORKSPACES[0]
    torch.use_deterministic_algorithms(True)
    # torch would also fill all new memory with NaN, to show reads before the first write
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.deterministic = True
    # the fastest of several algorithms, by a measurement, may be another one in the next run
    torch.backends.cudnn.benchmark = False
    if compiled:
        import torch._inductor.config as inductor  # here: the import takes a second

        if hasattr(inductor, "deterministic"):
            inductor.deterministic = True


@contextlib.contextmanager
def named_if_not_deterministic() -> Iterator[None]:
    """Raise UnsupportedModel, which names the setting, where torch refuses an operator that is not deterministic."""
    try:
        yield
    except RuntimeError as error:
        found = re.search(r"(\S+) does not have a deterministic implementation", str(error))
        if not found:
            raise
        raise UnsupportedModel(
            f"train.deterministic: torch has no deterministic implementation of {found[1]} on this device, and the "
            "graph or its gradients need it; set train.deterministic to false (a resumed run then equals one that was "
            "never interrupted up to rounding), or train on the CPU"
        ) from error
