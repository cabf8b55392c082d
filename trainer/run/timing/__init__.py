"""When things happened in a run, and where its time went."""
