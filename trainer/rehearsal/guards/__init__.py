"""What a rehearsal compares and refuses: the file, labels, updates, teachers."""
