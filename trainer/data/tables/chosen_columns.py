"""Replace patterns of columns in a configuration by the columns of its data (column_patterns.py)."""

from __future__ import annotations

from onward.trainer.config.run_config import RunConfig
from onward.trainer.data.reading.inferred_schema import infer_schema
from onward.trainer.data.tables.column_patterns import as_tuple, expanded, is_pattern, matching
from onward.trainer.data.tables.table_columns import INDICATOR


def with_columns(config: RunConfig, local: RunConfig | None = None) -> RunConfig:
    """Return the configuration with columns in place of patterns; the data is read only if there are any.

    local: the same configuration with local copies in place of URLs. Raises ConfigError for patterns that match no
    column, or a label, and DataError when the data cannot be read.
    """
    data = config.data
    if not any(is_pattern(name) for names in (data.label, *data.inputs.values()) for name in as_tuple(names)):
        return config
    columns = list(infer_schema((local or config).data))
    columns += [name + INDICATOR for name in matching(data.table.indicators, columns)]
    labels = {name for each in config.loss for name in each.columns}
    return config.model_copy(update={"data": expanded(data, columns, labels)})
