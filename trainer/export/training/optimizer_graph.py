"""Make optimizer.onnx: one weight update as an ONNX graph, with the formulas of trainer/optim."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import onnx
from onnx import TensorProto, helper
from torch import Tensor

from onward.trainer.config.sections.training import OptimizerConfig
from onward.trainer.export.training.gradients import gradient_of, updated
from onward.trainer.onnx_graph.node_builder import GraphExtender
from onward.trainer.optim.optimizers import NO_SCALES, build_optimizer
from onward.trainer.optim.state import optimizer_tensors
from onward.trainer.optim.weight_settings import WeightSettings

OPSET = 20

STEP = "step"
RATE = "learning_rate"
NORM = "gradient_norm"
"""The number of this update, from 1; the rate of this update; the norm before clipping."""


@dataclass(frozen=True)
class UpdateModel:
    """The graph, and for each weight the names of its state: key, as in checkpoints -> name."""

    model: onnx.ModelProto
    state: Mapping[str, Mapping[str, str]]


@dataclass(frozen=True)
class _Weight:
    """What one weight's nodes read. All are names of values."""

    weight: str
    gradient: str
    rate: str
    settings: WeightSettings
    state: Mapping[str, str]


def optimizer_model(
    config: OptimizerConfig,
    weights: Mapping[str, Tensor],
    *,
    clip_norm: float,
    layer_scales: Mapping[str, float] = NO_SCALES,
) -> UpdateModel:
    """Make the graph of one update of `weights` (the trained ones, by name), with clipping and attributes of weights.

    Inputs: weights, `gradient_of(weight)`, the state (zeros before the first step), `step` (int64, from 1) and
    `learning_rate`. Outputs: `updated(name)` of weights and state, and `gradient_norm`. Raises ConfigError as
    build_optimizer does.
    """
    # the same optimizer as in training decides learning rate scales, decay and state, so that the two cannot differ
    optimizer = build_optimizer(config, weights.items(), layer_scales=layer_scales)
    groups = {id(weight): group for group in optimizer.param_groups for weight in group["params"]}
    state: dict[str, dict[str, str]] = {name: {} for name in weights}
    for path in optimizer_tensors(optimizer, weights.items()):
        # a path is optimizer/WEIGHT/KEY, and the name of a weight may have slashes of its own
        name, _, key = path.removeprefix("optimizer/").rpartition("/")
        # the number of updates is an input
        if key != "step":  # one for all weights here
            state[name][key] = f"{name}_{key}"
    graph = onnx.GraphProto(name="optimizer")
    graph.input.extend(_inputs(weights, state))
    # state tensors have the shape of their weight, in each of the rules below
    carried = dict(weights) | {each: weights[name] for name in weights for each in state[name].values()}
    # an ONNX graph has no side effects: the caller passes each output as the input of the next run
    outputs = {updated(name): list(tensor.shape) for name, tensor in carried.items()}
    g = GraphExtender(graph, reserved=[*outputs, NORM])
    gradients = _clipped(g, {name: gradient_of(name) for name in weights}, clip_norm)
    rule = UPDATES[config.name](g, config)
    # the settings of a weight are those of its group, which `build_optimizer` has made of patterns
    for name, tensor in weights.items():
        group = groups[id(tensor)]
        scale = group["learning_rate_scale"]
        rate = RATE if scale == 1.0 else g.op("Mul", RATE, g.constant(scale))
        new = rule(_Weight(name, gradients[name], rate, group["settings"], state[name]))
        # an Identity gives the result the name that the caller asks for
        for value, given in new.items():
            g.op("Identity", given, output=updated(value))
    graph.output.extend(helper.make_tensor_value_info(n, TensorProto.FLOAT, dims) for n, dims in outputs.items())
    graph.output.append(helper.make_tensor_value_info(NORM, TensorProto.FLOAT, []))
    opsets = [helper.make_opsetid("", OPSET)]
    version = helper.find_min_ir_version_for(opsets)
    return UpdateModel(
        helper.make_model(graph, producer_name="onward", opset_imports=opsets, ir_version=version), state
    )


def _inputs(weights: Mapping[str, Tensor], state: Mapping[str, Mapping[str, str]]) -> list[onnx.ValueInfoProto]:
    """Return the graph's inputs: weights, gradients, state, step and rate, in this order."""
    shapes = {name: list(tensor.shape) for name, tensor in weights.items()}
    named = [*shapes.items(), *((gradient_of(name), dims) for name, dims in shapes.items())]
    # the state in the order of the weights, as the outputs have it
    named += [(each, dims) for name, dims in shapes.items() for each in state[name].values()]
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, dims) for name, dims in named]
    values.append(helper.make_tensor_value_info(STEP, TensorProto.INT64, []))
    return [*values, helper.make_tensor_value_info(RATE, TensorProto.FLOAT, [])]


def _clipped(g: GraphExtender, gradients: Mapping[str, str], clip_norm: float) -> dict[str, str]:
    """Add clipping by the global norm; return weight -> name of its clipped gradient."""
    # the norm over all weights: clipping keeps the direction of the update
    squares = [g.op("ReduceSumSquare", gradient, keepdims=0) for gradient in gradients.values()]
    # also without clipping, since it is an output of the graph
    g.op("Sqrt", g.op("Sum", *squares), output=NORM)
    if not clip_norm:
        return dict(gradients)
    limit = g.constant(clip_norm)
    # as optimizers.clip_factor; Where discards limit / 0, which is computed when all gradients are 0
    factor = g.op("Where", g.op("Greater", NORM, limit), g.op("Div", limit, NORM), g.constant(1.0))
    return {name: g.op("Mul", gradient, factor) for name, gradient in gradients.items()}


# -- the rules: a weight's names -> weight and state -> their new values

Rule = Callable[[_Weight], dict[str, str]]


def _adam(g: GraphExtender, config: OptimizerConfig) -> Rule:
    decays_after = config.name == "adam" and config.weight_decay_mode == "huggingface"
    # once for each pair of decays: weights of one group share the nodes
    corrections = functools.cache(functools.partial(_corrections, g))

    def rule(w: _Weight) -> dict[str, str]:
        c1, root_c2 = corrections(w.settings.alpha, w.settings.beta, w.settings.bias_correction)
        # huggingface's Adam adds epsilon before the bias correction, so it is divided by the correction here
        epsilon = g.constant(w.settings.epsilon)
        epsilon = g.op("Div", epsilon, root_c2) if decays_after else epsilon
        m, v = _moments(g, w)
        # decoupled decay: the weight is multiplied, and the gradient does not see it
        keep = (
            g.op("Sub", g.constant(1.0), g.op("Mul", w.rate, g.constant(w.settings.weight_decay)))
            if w.settings.weight_decay
            else ""
        )
        weight = g.op("Mul", w.weight, keep) if keep and not decays_after else w.weight
        root = g.op("Add", g.op("Div", g.op("Sqrt", v), root_c2), epsilon)
        # w - (rate / (1 - alpha^t)) m / (sqrt(v) / sqrt(1 - beta^t) + epsilon), Adam's step (arXiv:1412.6980)
        weight = g.op("Sub", weight, g.op("Div", g.op("Mul", g.op("Div", w.rate, c1), m), root))
        # huggingface's Adam decays the weight that the step has changed
        weight = g.op("Mul", weight, keep) if keep and decays_after else weight
        return {w.weight: weight, w.state["moment_1"]: m, w.state["moment_2"]: v}

    return rule


def _lamb(g: GraphExtender, config: OptimizerConfig) -> Rule:
    corrections = functools.cache(functools.partial(_corrections, g))
    zero = g.constant(0.0)
    one = g.constant(1.0)

    def rule(w: _Weight) -> dict[str, str]:
        c1, root_c2 = corrections(w.settings.alpha, w.settings.beta, w.settings.bias_correction)
        m, v = _moments(g, w)
        root = g.op("Add", g.op("Div", g.op("Sqrt", v), root_c2), g.constant(w.settings.epsilon))
        # Adam's direction, plus the decay: LAMB scales both by the trust ratio (arXiv:1904.00962)
        direction = g.op("Div", g.op("Div", m, root), c1)
        direction = g.op("Add", direction, g.op("Mul", w.weight, g.constant(w.settings.weight_decay)))
        # the trust ratio |weight| / |direction| scales the step
        length, norm = (g.op("Sqrt", g.op("ReduceSumSquare", each, keepdims=0)) for each in (w.weight, direction))
        limits = (g.constant(w.settings.trust_ratio[0]), g.constant(w.settings.trust_ratio[1]))
        ratio = g.op("Clip", g.op("Div", length, norm), *limits)
        # where a norm is 0 the ratio is 1, as in optimizers.Lamb
        both = g.op("And", g.op("Greater", length, zero), g.op("Greater", norm, zero))
        step = g.op("Mul", w.rate, g.op("Where", both, ratio, one))
        weight = g.op("Sub", w.weight, g.op("Mul", step, direction))
        return {w.weight: weight, w.state["moment_1"]: m, w.state["moment_2"]: v}

    return rule


def _sgd(g: GraphExtender, config: OptimizerConfig) -> Rule:
    def rule(w: _Weight) -> dict[str, str]:
        direction = w.gradient
        state = {}
        # coupled decay: it is a part of the gradient, and so of the momentum
        if w.settings.weight_decay:
            direction = g.op("Add", direction, g.op("Mul", w.weight, g.constant(w.settings.weight_decay)))
        if w.settings.momentum:
            momentum = g.constant(w.settings.momentum)
            old = w.state["momentum_buffer"]
            velocity = g.op("Add", g.op("Mul", old, momentum), direction)
            state = {old: velocity}
            # Nesterov's step looks ahead by one more momentum, as torch.optim.SGD computes it
            direction = g.op("Add", direction, g.op("Mul", velocity, momentum)) if config.nesterov else velocity
        return {w.weight: g.op("Sub", w.weight, g.op("Mul", w.rate, direction)), **state}

    return rule


UPDATES: dict[str, Callable[[GraphExtender, OptimizerConfig], Rule]] = {
    "adam": _adam,
    "adamw": _adam,
    "lamb": _lamb,
    "sgd": _sgd,
}
"""`optimizer.name` -> its update rule. The other optimizers are refused by config/rules.py and in files.py."""


def _moments(g: GraphExtender, w: _Weight) -> tuple[str, str]:
    # a moving average: old x factor + new x (1 - factor)
    def decayed(old: str, factor: float, new: str) -> str:
        return g.op("Add", g.op("Mul", old, g.constant(factor)), g.op("Mul", new, g.constant(1.0 - factor)))

    first = decayed(w.state["moment_1"], w.settings.alpha, w.gradient)
    return first, decayed(w.state["moment_2"], w.settings.beta, g.op("Mul", w.gradient, w.gradient))


def _corrections(g: GraphExtender, alpha: float, beta: float, corrected: bool) -> tuple[str, str]:
    """Add 1 - alpha^t and the root of 1 - beta^t, in fp64: 1 - 0.999^t in fp32 loses half of the digits."""
    if not corrected:
        return g.constant(1.0), g.constant(1.0)
    step = g.op("Cast", STEP, to=TensorProto.DOUBLE)

    # the moving averages begin at zero, and are too small by this factor after t steps
    def correction(decay: float) -> str:
        return g.op("Sub", g.constant(1.0, float), g.op("Pow", g.constant(decay, float), step))

    first = correction(alpha)
    second = g.op("Sqrt", correction(beta))
    return g.op("Cast", first, to=TensorProto.FLOAT), g.op("Cast", second, to=TensorProto.FLOAT)
