"""The report of runs: one HTML page, its plots, and the figures that stand in it."""
