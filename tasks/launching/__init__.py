"""What starts the ranks of a run: the launcher of its settings, and the jobs that it runs."""
