"""Print the results of `onward doctor`, `onward init` and `onward diff` as tables, and the layout of `onward plan`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from onward.flows.shown.terminal_tables import as_toml, print_item, table, wrapped
from onward.trainer.quantities import gib

if TYPE_CHECKING:
    from onward.flows.machine.machine_findings import MachineReport
    from onward.trainer.diagnostics.difference import Difference, TensorChange
    from onward.trainer.diagnostics.doctor import Diagnosis, Operator, Unsupported, Weight
    from onward.trainer.parallel.planning.plan_record import Plan
    from onward.trainer.proposal.initialise import Proposed
    from onward.trainer.run.recorded.trial_records import PreprocessingTrial, PreprocessingTrials

MOST_LETTERS = 48
"""Of a value in a table of reasons."""
MAX_ROWS = 12
"""Rows of one table that are shown without --all."""


def show_diagnosis(found: Diagnosis, *, everything: bool) -> None:
    """Print the facts, the weights with their reasons, the operators, and the problems with their remedies."""
    opsets = ", ".join(f"{domain} {version}" for domain, version in found.opsets.items())
    facts = [
        ("model", str(found.path)),
        ("size", f"{found.size_bytes:,} bytes"),
        ("written by", f"{found.producer or 'an unknown exporter'}; ir {found.ir_version}, opset {opsets}"),
    ]
    facts += [("input", text) for text in found.inputs]
    facts += [("output", text) for text in found.outputs]
    facts += [(role, f"{total.values:,} numbers in {total.tensors} tensors") for role, total in found.totals.items()]
    every = sum(total.values for total in found.totals.values())
    facts.append(("in all", f"trained {found.totals['trained'].values:,} of {every:,} numbers"))
    # one clause on each line
    facts += zip(("pre-processing", "", ""), filter(None, found.preprocessing.split("; ")), strict=False)
    facts.append(("importable", _importable(found)))
    facts.append(("onnxruntime", "opens it" if found.runtime.opens else f"rejects it: {found.runtime.error}"))
    if found.guard:
        facts.append(("guard", found.guard.summary))
    table(facts)
    _title("weights")
    rows = list(_weight_rows(found.weights, everything=everything))
    table(rows or [("none", "")], heads=("tensor", "role", "reason", "source", "stored as") if rows else ())
    _title("operators")
    uses = [(f"{use.operator}-{use.version}", str(use.nodes), _how(use)) for use in found.operators]
    table(uses, heads=("operator", "nodes", "imported by"))
    for title, entries in (
        ("not supported", [(_refusal(entry), entry.remedy) for entry in found.unsupported]),
        ("warnings", [(f"{entry.key}: {entry.what}", entry.remedy) for entry in found.warnings]),
    ):
        if entries:
            _title(title)
        for what, remedy in entries:
            print_item(what)
            if remedy:
                print(wrapped(remedy, "    -> "))
    if found.trials:
        show_trials(found.trials, everything=everything)


def show_trials(found: PreprocessingTrials, *, everything: bool) -> None:
    """Print the preprocessings that were tried, best first, and the settings of the best."""
    _title("preprocessings, tried on labelled rows")
    rows = [(f"{trial.accuracy:.3f}", f"{trial.loss:.3g}", str(trial.rows), _settings(trial)) for trial in found.trials]
    _some(rows, (found.measure, "loss", "rows", "settings"), everything=everything)
    best = found.trials[0]
    if found.model_classes:
        print_item(_labels(found))
    if found.other_order:
        print_item(_other_order(found))
    # settings that predict no better than a constant are no advice, so none are printed
    elif not found.better_than_chance:
        guess = "always naming the most frequent class" if found.measure == "accuracy" else "always naming the mean"
        print_item(
            f"none is better than a constant: {guess} gives {found.chance:.3f}. The head is not trained for these "
            "labels, the labels are in another column or order, or the preprocessing is none of these"
        )
        return
    _title("settings of the best" if best.settings else "the best is the configuration as it is")
    for key, value in best.settings.items():
        print(f"{key} = {as_toml(value)}")


def _settings(trial: PreprocessingTrial) -> str:
    if trial.refused:
        return f"refused: {trial.refused}"
    # the last part of a key says enough in a table
    shown = [f"{key.rpartition('.')[2]} {as_toml(_rounded(value))}" for key, value in trial.settings.items()]
    return ", ".join(shown) or "as configured"


def _rounded(value: Any) -> Any:
    if isinstance(value, list):
        return [_rounded(each) for each in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


def _labels(found: PreprocessingTrials) -> str:
    """Return which class each label was taken for, and whether that fits."""
    # a model may have thousands of classes, and the first ones show the order
    few = [f"{number} = {name}" for number, name in enumerate(found.classes[:MAX_ROWS])]
    more = [f"... {len(found.classes) - MAX_ROWS} more"] if len(found.classes) > MAX_ROWS else []
    text = f"labels: {', '.join([*few, *more])}" if few else "labels: the numbers in the data"
    if found.sorted_by_name:
        text += ", in the order of their names (data.classes sets another order)"
    text += f"; the model has {found.model_classes} classes"
    if found.other_order or not found.better_than_chance:
        return f"{text}, which do not fit in this order"
    return f"{text}, which fit: {found.trials[0].accuracy:.3f} are right, by chance {found.chance:.3f}"


def _other_order(found: PreprocessingTrials) -> str:
    best = found.trials[0]
    moved = {label: to for label, to in found.other_order.items() if label != to}
    few = ", ".join(f"{label} -> {to}" for label, to in list(moved.items())[:MAX_ROWS])
    text = (
        f"the order of the classes is another one: accuracy {best.accuracy:.3f} as they are, "
        f"{found.other_order_accuracy:.3f} with labels {few}"
    )
    names = {to: found.classes[label] for label, to in found.other_order.items() if label < len(found.classes)}
    # data.classes needs a name for each class; with gaps only the labels themselves can be changed
    if found.classes and sorted(names) == list(range(len(found.classes))):
        return f"{text}; set data.classes = {as_toml([names[place] for place in sorted(names)])}"
    return f"{text}; renumber the labels"


def _importable(found: Diagnosis) -> str:
    if not found.importable:
        return f"no: {len(found.unsupported)} problems, listed below"
    return "yes" if found.runtime.opens else "yes, but onnxruntime rejects the file"


def _how(use: Operator) -> str:
    return f"{use.imported_by}; {use.leaves} at run time" if use.leaves else use.imported_by


def _refusal(entry: Unsupported) -> str:
    named = f"node {entry.where!r}: {entry.operator}-{entry.version}: " if entry.operator else ""
    return named + entry.why


def _weight_rows(weights: Iterable[Weight], *, everything: bool) -> Iterator[tuple[str, ...]]:
    """Yield a row for every tensor, or one row for the tensors of one kind and reason."""
    # A model has hundreds of weights but few reasons.
    groups: dict[tuple[str, str, str], list[Weight]] = defaultdict(list)
    for weight in weights:
        groups[weight.kind, weight.reason, weight.source].append(weight)
    for key, members in groups.items():
        if everything or len(members) == 1:
            yield from ((_name(weight), *key, f"{weight.stored_as} {list(weight.shape)}") for weight in members)
        else:
            yield f"{_name(members[0])} and {len(members) - 1} more", *key, ""


def _name(weight: Weight) -> str:
    """Return the name of a tensor, with what it was in the exported network if the name does not say it."""
    if weight.original:
        return f"{weight.name} ({weight.original})"
    # in files of torch's older exporter a made-up name is the path of a node: /encoder/fc1/Constant_output_0
    named = weight.module in weight.name.replace("/", ".")
    return weight.name if named else f"{weight.name} (in {weight.module})"


def show_difference(found: Difference, *, everything: bool) -> None:
    """Print what differs, part by part; one line if nothing does."""
    if found.same:
        bytes_too = "byte for byte" if found.same_bytes else "in content, but not byte for byte"
        print(f"{found.a} and {found.b} are equal {bytes_too}")
        return
    for title, lines in (("model", found.model), ("inputs and outputs", found.interface)):
        if lines:
            _title(title)
            print("\n".join(f"  {line}" for line in lines))
    if found.stripped:
        kinds = ", ".join(f"{count} {kind}" for kind, count in found.stripped.items())
        number = sum(found.stripped.values())
        _title(f"{number} training-only node{'s' * (number > 1)} removed, or without training mode: {kinds}")
    if found.nodes:
        _title(f"nodes: {len(found.nodes)} {'others ' if found.stripped else ''}changed")
        nodes = [(change.node, change.operator, change.change) for change in found.nodes]
        _some(nodes, ("node", "operator", "change"), everything=everything)
    _title(f"tensors: {found.equal_tensors} equal, {len(found.tensors)} changed")
    if found.tensors:
        rows = [(change.name, _what(change), *_distances(change)) for change in found.tensors]
        _some(rows, ("tensor", "what", "relative change", "greatest", "cosine"), everything=everything)


def _what(change: TensorChange) -> str:
    if change.change == "values":
        return f"{change.changed:,} values of {change.before}"
    return f"{change.change}: {' -> '.join(filter(None, (change.before, change.after)))}"


def _distances(change: TensorChange) -> tuple[str, str, str]:
    relative, greatest = ("" if x is None else f"{x:.3g}" for x in (change.relative, change.greatest))
    return relative, greatest, "" if change.cosine is None else f"{change.cosine:.7f}"


def _some(rows: Sequence[tuple[str, ...]], heads: tuple[str, ...], *, everything: bool) -> None:
    shown = rows if everything or len(rows) <= MAX_ROWS else rows[:MAX_ROWS]
    table(shown, heads=heads)
    if len(shown) < len(rows):
        print(f"... and {len(rows) - len(shown)} more; --all shows them")


def _title(text: str) -> None:
    print(f"\n{text}")


# -- the machine


def show_machine(found: MachineReport) -> None:
    """Print the findings about a machine, problems with what to do, and a last line with their number."""
    for finding in found.findings:
        # only the first line is a sentence that can be wrapped
        what, *more = finding.what.splitlines()
        print(wrapped(f"{finding.check}: {what}", f"{finding.level:8}"))
        for line in more:  # the output of another program
            print(f"{'':8}{line}")
        if finding.fix:
            print(wrapped(finding.fix, f"{'':8}-> "))
    number = {level: sum(each.level == level for each in found.findings) for level in ("problem", "note")}
    kinds = [f"{count} {level}{'s' * (count != 1)}" for level, count in number.items()]
    print(f"\n{found.host}: {' and '.join(kinds)}, found in {found.elapsed_s:.1f} s")


# -- proposals


def _shortened(value: str) -> str:
    return value if len(value) <= MOST_LETTERS else f"{value[: MOST_LETTERS - 4]} ..."


def show_proposed(found: Proposed, to_train: str) -> None:
    """Print what was guessed and why, the open questions, the proof, and the next command."""
    # the raw outputs of a detector would move all reasons to the right; the file has them in full
    shown = [(f"{guess.setting} = {_shortened(guess.value)}", guess.reason) for guess in found.guesses]
    table(shown)
    for note in found.notes:
        print_item(note)
    if found.questions:
        _title(f'decide these in {found.path}, where they are "?"')
        for question in found.questions:
            print_item(f"{question.setting}: {question.what}")
    if found.proof:
        _title("proof")
        print(found.proof.summary)
        # a loss that falls proves that gradients arrive; one that rises hints at the rate
        if found.proof.loss_after > found.proof.loss_before:
            print_item("the loss has not fallen: optimizer.learning_rate may be too high or too low")
        elif found.proof.has_not_moved:
            print_item(
                "the loss has hardly moved, so this proves that the run works, and not that it learns: raise "
                "optimizer.learning_rate, scale the inputs (data.table.standardise), and of a regression the label "
                "(loss.standardise_label)"
            )
    if found.refused:
        _title(f"{found.path} does not train yet")
        for problem in found.refused:
            print_item(problem)
    _title("written")
    print(found.path)
    _title("when it is corrected" if found.refused else "when these are decided" if found.questions else "next")
    print(to_train)


# -- plans


def show_plan(found: Plan, *, everything: bool) -> None:
    """Print the layout, its stages and their memory, what is tensor parallel, and what is sent."""
    table(list(_division(found)))
    _title("stages")
    flops = sum(stage.flops for stage in found.stages) or 1  # 1: avoids a division by 0
    stages = [
        (
            f"{stage.stage} on {stage.rank}",
            f"{stage.flops / 1e9:.3g}",
            f"{stage.flops / flops:.0%}",
            f"{stage.parameters:,}",
            _mib(stage.sends),
            f"{stage.recomputed} of {stage.units}",
            f"{stage.begins} ... {stage.ends}",
        )
        for stage in found.stages
    ]
    table(stages, heads=("stage", "GFLOPs", "share", "numbers", "sends", "recomputed units", "from ... to"))
    _title("memory of one rank at its peak, MiB")
    kinds = ("weights", "gradients", "optimizer", "activations", "transient", "peak")
    rows = [(str(rank), *(_mib(getattr(memory, kind)) for kind in kinds)) for rank, memory in enumerate(found.memory)]
    table(rows, heads=("pipeline rank", *kinds))
    if found.traffic:
        _title("sent and received by one rank in one step")
        sent = [(each.axis, each.what, str(each.count), _mib(each.bytes)) for each in found.traffic]
        table(sent, heads=("axis", "what", "times", "MiB"))
    if found.regions:
        _title("sharded over tensor-parallel ranks")
        table(_few([(region.kind, ", ".join(region.weights)) for region in found.regions], everything=everything))
    if found.parallel.tensor > 1 and found.replicated:
        _title("replicated on every tensor-parallel rank")
        table(_few(list(found.replicated), everything=everything))
    if found.rates:
        _title("layers and learning rates (optimizer.layer_decay)")
        rates = [(each.weight, str(each.layer), f"{each.learning_rate:.3g}") for each in found.rates]
        table(_few(rates, everything=everything), heads=("weight", "layer", "rate"))
    if found.considered:
        _title("considered")
        for line in _few([(line,) for line in found.considered], everything=everything):
            print_item(line[0])


def _division(found: Plan) -> Iterator[tuple[str, str]]:
    parallel = found.parallel
    yield "ranks", f"{parallel.layout} = {found.num_ranks}"
    zero = f"ZeRO {parallel.zero}" + (f" within groups of {parallel.shard}" if parallel.shard else "")
    yield "replicas", zero if parallel.zero else f"{parallel.reduction} by {parallel.transport}"
    yield "micro-batches", f"{found.gradient_accumulation_steps} of {found.micro_batch_size} samples in each replica"
    if parallel.pipeline > 1:
        yield "schedule", f"{parallel.schedule}, bubble {found.bubble:.1%}"
    yield "recomputation", found.recompute.mode
    yield "products", found.compute
    yield "device", found.device
    limit = f" of {gib(found.memory_bytes)}" if found.memory_bytes else ""
    if found.reserve.total:
        kinds = ", ".join(f"{kind} {_mib(size)}" for kind, size in found.reserve.model_dump().items())
        yield "kept free", f"{gib(found.reserve.total)} (MiB: {kinds})"
    yield "predicted peak", f"{gib(max(memory.peak for memory in found.memory))}{limit}"


def _mib(size: int) -> str:
    return f"{size / 2**20:,.1f}"


def _few(rows: Sequence[tuple[str, ...]], *, everything: bool) -> list[tuple[str, ...]]:
    """Return all rows, or the first MAX_ROWS and how many more there are."""
    if everything or len(rows) <= MAX_ROWS:
        return list(rows)
    # the row has as many cells as the others, so that the table stays one
    more = (f"... {len(rows) - MAX_ROWS} more: --all", *("" for _ in rows[0][1:]))
    return [*rows[:MAX_ROWS], more]
