"""The run folder: configuration, metrics and checkpoints of one run on disk."""
