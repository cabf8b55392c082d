"""Compile the modules that a rank runs with torch.compile, and say so.

    forward pass of a chain                                              static shapes            dynamic shapes
    shapes of a full micro-batch (training)                              compiled for them        compiled
    shapes of the first evaluation batch                                 compiled for them        compiled
    any other, such as the last, smaller micro-batch; padding            eager                    compiled; eager

With static shapes each module is compiled twice and never again; with dynamic ones as often as torch's limit allows
(`torch._dynamo.config.recompile_limit`), and what needs yet another code runs eagerly. Static code depends on the
configuration and not on what was seen first, so a resumed run computes each micro-batch with the code of the
uninterrupted one.

Runtime nodes (loops, branches and shapes that depend on data) are graph breaks: a warning names them, and the parts
between them are compiled. Compiled code is kept in a directory that later runs read.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, fx, nn

from onward.trainer.config.sections.model import CompileMode
from onward.trainer.errors import ConfigError
from onward.trainer.model.repeated_blocks import outline_repeated_blocks
from onward.trainer.onnx_import.lowering.runtime_node import RuntimeNode
from onward.trainer.run.directory import RunDir, onward_home
from onward.trainer.run.machine.this_machine import missing_compiler
from onward.trainer.run.records import Rehearsal, read_record

log = logging.getLogger(__name__)

Regions = Literal["whole", "repeated"]
Shapes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class CompileChoice:
    """How the modules of a rank are compiled, without `auto`."""

    shapes: Literal["static", "dynamic"] = "dynamic"
    mode: CompileMode = "default"
    regions: Regions = "whole"


class Compiler:
    """Compiles the modules of one chain, which all run compiled or all eagerly in one forward pass.

    device: on which they compute. beat: called before and after each compilation, which may take minutes. Raises
    ConfigError where there is no C++ compiler.
    """

    def __init__(self, choice: CompileChoice, *, device: torch.device, beat: Callable[[], None] = lambda: None) -> None:
        if problem := missing_compiler():
            raise ConfigError(problem)
        keep_compiled_code()
        self.choice = choice
        self.device = device
        self.eager = False
        """Whether the current forward pass is not compiled."""
        self.num_modules = 0
        self._beat = beat
        self._compiled: dict[bool, list[float]] = {True: [], False: []}
        """For training and for evaluation: the seconds of each module."""

    def compile(self, unit: nn.Module, graph: fx.GraphModule) -> nn.Module:
        """Return what to call in place of a unit: its imported graph, or a module that runs it."""
        breaks = [f"{node.target} ({child.node.op_type})" for node, child in runtime_nodes(graph)]
        if breaks:
            log.warning(
                "graph.compile: %d nodes are computed by Python when the graph runs, between compiled parts: %s",
                len(breaks),
                ", ".join(breaks),
            )
        # integers from another unit arrive as tensors
        divided = bool(breaks or graph.graph.find_nodes(op="call_method", target="item"))
        if self.device.type == "cpu":
            from onward.trainer.model.compiled_on_cpu import use_sigmoid_in_gelu  # here: it imports the compiler

            use_sigmoid_in_gelu(graph)
        outlines = self.choice.regions == "repeated" and unit is graph and not divided
        names = outline_repeated_blocks(graph) if outlines else []
        for name in names:
            setattr(graph, name, self._compile(graph.get_submodule(name), fullgraph=True))
        return graph if names else self._compile(unit, fullgraph=not divided)

    def _compile(self, module: nn.Module, *, fullgraph: bool) -> nn.Module:
        self.num_modules += 1
        from onward.trainer.model.compiled_on_cpu import compile_options  # here: it imports the compiler

        mode = self.choice.mode
        options = compile_options(self.device)
        if options and mode != "default":  # torch takes one of the two
            options |= torch._inductor.list_mode_options(mode)
        how = {"options": options} if options else {"mode": None if mode == "default" else mode}
        dynamic = self.choice.shapes == "dynamic"
        return Compiled(torch.compile(module, fullgraph=fullgraph, dynamic=dynamic, **how), self)  # type: ignore[arg-type]

    def watch(self, chain: nn.Module, training_shapes: Shapes) -> None:
        """Decide before each forward pass of a chain whether it is compiled; it takes tensors of these shapes for a
        full micro-batch."""
        shapes: dict[bool, Shapes] = {True: training_shapes}

        def before_forward(chain: nn.Module, inputs: Sequence[Tensor]) -> None:
            # neither training nor evaluation: a padding micro-batch, which is alone
            self.eager = chain.training != torch.is_grad_enabled()
            if self.choice.shapes == "static" and not self.eager:
                shapes_now = tuple(tuple(value.shape) for value in inputs)
                # evaluation begins with the same batch each time
                self.eager = shapes_now != shapes.setdefault(chain.training, shapes_now)
            if self.choice.mode == "reduce-overhead":
                # the results of the previous micro-batch have been used, so their memory may be written again
                torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]

        chain.register_forward_pre_hook(before_forward)

    def first_call(self, compiled: nn.Module, values: Sequence[Any]) -> Any:
        """Run a module for the first time, which compiles it, and log how long it took."""
        self._beat()
        started_at = time.monotonic()
        result = compiled(*values)
        done = self._compiled[compiled.training]
        done.append(time.monotonic() - started_at)
        self._beat()
        log.info(
            "graph.compile: %d of %d compiled for %s in %.1f s%s",
            len(done),
            self.num_modules,
            "training" if compiled.training else "evaluation",
            done[-1],
            f", {sum(done):.1f} s in all" if len(done) == self.num_modules > 1 else "",
        )
        return result


class Compiled(nn.Module):
    """A module that runs compiled, or eagerly where its compiler says so."""

    def __init__(self, compiled: nn.Module, compiler: Compiler) -> None:
        super().__init__()
        self.compiled = compiled
        self._compiler = compiler
        self._seen: set[bool] = set()
        self._limited = False
        self.train(compiled.training)

    def forward(self, *values: Any) -> Any:
        original: Any = self.compiled._orig_mod
        if self._compiler.eager:
            return original(*values)
        if self.training not in self._seen:
            self._seen.add(self.training)
            return self._compiler.first_call(self.compiled, values)
        try:
            return self.compiled(*values)
        except Exception as error:
            # dynamic shapes can still need other code, such as for a length that equals another one
            if type(error).__name__ != "FailOnRecompileLimitHit":
                raise
            if not self._limited:
                log.warning("graph.compile: from now on shapes that need yet another code run eagerly")
            self._limited = True
            return original(*values)


def why_compiled(run: RunDir) -> str:
    """Return why `graph.compile` "auto" of a run is what it is; "" if it was given, or no rehearsal is recorded."""
    if not run.rehearsal.exists():
        return ""
    found = read_record(run.rehearsal, Rehearsal).compile
    return f"graph.compile 'auto' is {str(found.compiles).lower()}: {found.text}" if found else ""


def compiled_s() -> float:
    """Return the seconds that torch.compile has taken in this process; 0 where it was not used."""
    dynamo = sys.modules.get("torch._dynamo.utils")  # importing it takes seconds
    return float(dynamo.calculate_time_spent()["total_wall_time"]) if dynamo else 0.0


def runtime_nodes(module: fx.GraphModule) -> list[tuple[fx.Node, RuntimeNode]]:
    """Return the nodes of a graph that Python computes when the graph runs, which end a compiled part."""
    called = [(node, module.get_submodule(str(node.target))) for node in module.graph.nodes if node.op == "call_module"]
    return [(node, child) for node, child in called if isinstance(child, RuntimeNode)]


# -- the compiler of the machine, and its results


def keep_compiled_code() -> Path | None:
    """Let torch keep compiled code below ONWARD_HOME, and not in /tmp, so that the next run does not compile again.

    Returns the directory; None if it cannot be written, and torch's own place remains. TORCHINDUCTOR_CACHE_DIR, if it
    is set, decides. Machines with other processors have other directories, since the code is made for the processor.
    """
    # here, since it takes seconds, and only who compiles needs it
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    named = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    # torch itself sets the variable to its default when the compiler is first used
    if named and Path(named) != Path(default_cache_dir()):
        return Path(named)
    folder = onward_home() / "compiled" / hashlib.sha256(_processor().encode()).hexdigest()[:8]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        log.warning("graph.compile: compiled code cannot be kept in %s (%s)", folder, error)
        return None
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)
    return folder


def _processor() -> str:
    """Return the processor's instruction sets, or as much as the system says of them."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return f"{platform.machine()} {flags}"
