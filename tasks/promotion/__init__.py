"""Whether an exported model becomes the champion, and which checkpoints and versions are kept."""
