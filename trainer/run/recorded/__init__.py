"""Records of single features, each beside the file of the run directory that has it."""
