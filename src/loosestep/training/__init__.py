"""Training a recipe: the configuration, the run folder, the loop of a rank, checkpoints, the
process that watches it all.
"""
