"""Start, watch and end a job of ranks on this host or others, and leave no process of it behind."""
