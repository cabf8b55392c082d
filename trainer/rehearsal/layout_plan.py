"""Estimate the layout of a run before it is launched, in a process of its own, which needs torch."""

from __future__ import annotations

from onward.trainer.data.schema.signature import facts_of, read_source
from onward.trainer.model.choose_fixed_batch import choose_fixed_batch
from onward.trainer.model.first_output_units import with_first_units
from onward.trainer.model.trainable import open_with_teacher
from onward.trainer.parallel.planning.cluster import THIS_MACHINE, Cluster, cluster_in
from onward.trainer.parallel.planning.planner import plan, refuse_absent_gpu
from onward.trainer.rehearsal.needs import least_needs
from onward.trainer.run.directory import RunDir, read_config
from onward.trainer.run.outcomes.refusals import exit_with_refusal
from onward.trainer.run.records import read_record, write_record


def make_plan(folder: RunDir) -> None:
    """Estimate the layout for `config.json` in `folder`, and write plan.json there."""
    with exit_with_refusal(folder.root):
        place = cluster_in(folder.root)
        cluster = read_record(place, Cluster) if place.exists() else THIS_MACHINE
        config = read_config(folder)
        refuse_absent_gpu(config.launch, cluster)
        source = read_source(config.model.path, by_parts=True)
        facts = facts_of(source, config.model)
        config, _ = choose_fixed_batch(config, facts.signature)
        config = with_first_units(config, facts.signature)
        module = open_with_teacher(config, source=source, by_parts=True).module
        needs = least_needs(module, config, size_bytes=facts.size_bytes)  # before the planner divides the module
        found = plan(config, module, cluster, facts.signature)
        write_record(folder.root / "plan.json", found.model_copy(update={"needs": needs}))
