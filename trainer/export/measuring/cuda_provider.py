"""Run exported files on onnxruntime's CUDA provider as well, where there is one.

    CPU    outputs --- within export.tolerance? ---+
    CUDA   outputs --------------------------------+     a variant: its metrics and its time as well

onnxruntime lists the provider if it was built with it (onnxruntime-gpu). If then no GPU or no library of CUDA is found,
nothing is compared, and the record says why.
"""

from __future__ import annotations

import logging
from pathlib import Path

import onnxruntime

from onward.trainer.errors import ExportRefused
from onward.trainer.export.measuring.latency import latency_on_evaluation
from onward.trainer.export.measuring.onnx_runner import OnnxRunner
from onward.trainer.onnx_graph.files.onnxruntime_session import PROVIDERS
from onward.trainer.run.records import CudaCheck

log = logging.getLogger(__name__)


def has_cuda() -> bool:
    """Return whether this onnxruntime was built with the CUDA provider."""
    return PROVIDERS["cuda"] in onnxruntime.get_available_providers()


def check_on_cuda(runner: OnnxRunner, *, batches: int, tolerance: float) -> CudaCheck | None:
    """Compare a verified file on the GPU with itself on the CPU; return None where there is no CUDA provider.

    Raises ExportRefused if an output differs by more than `tolerance`, relative to its largest value, and more than the
    kernels of the CPU round.
    """
    if not has_cuda():
        return None
    if runner.draws:
        return CudaCheck(not_run="the file draws random numbers, of which the two providers draw different ones")
    try:
        on_gpu = open_on_cuda(runner)
    except ExportRefused as error:
        log.warning("the exported file was not run on a GPU: %s", error)
        return CudaCheck(not_run=str(error))
    difference = runner.difference_from(on_gpu, batches=batches)
    # the kernels of the GPU may round less, or as much in another way
    allowed = tolerance + 2 * runner.rounding
    if not difference <= allowed:  # true for NaN, too
        rounding = f" and twice the rounding of its kernels, {runner.rounding:.3g}" if runner.rounding else ""
        raise ExportRefused(
            f"onnxruntime's CUDA provider is {difference:.3g} off its CPU provider, above export.tolerance "
            f"{tolerance:g}{rounding}"
        )
    return CudaCheck(difference=difference)


def measure_on_cuda(exported: Path, variant: Path, runner: OnnxRunner, of_variant: OnnxRunner) -> CudaCheck:
    """Evaluate a variant on the GPU; compare its outputs with those on the CPU, and its time with the file's there.

    runner, of_variant: run the two files on the CPU.
    """
    try:
        on_gpu = open_on_cuda(of_variant)
    except ExportRefused as error:
        log.warning("the variant was not run on a GPU: %s", error)
        return CudaCheck(not_run=str(error))
    return CudaCheck(
        difference=of_variant.difference_from(on_gpu, batches=1),
        latency_ratio=latency_on_evaluation(exported, variant, runner, "cuda"),
        metrics=on_gpu.evaluate(),
    )


def open_on_cuda(runner: OnnxRunner) -> OnnxRunner:
    """Return a runner of the same file on the GPU. Raises ExportRefused if onnxruntime cannot run it there."""
    if not runner.runtime.startswith("onnxruntime"):
        raise ExportRefused(f"it runs under {runner.runtime}, which has no GPU")
    other = runner.on("cuda")
    if not other.runtime.startswith("onnxruntime"):
        raise ExportRefused(f"onnxruntime cannot run it on {PROVIDERS['cuda']}; the log has the reason")
    return other
