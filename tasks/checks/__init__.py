"""What is examined before a run begins: the machine, the import, the files, the disk, a rehearsal."""
