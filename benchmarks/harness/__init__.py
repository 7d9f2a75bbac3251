"""Measures any peer the same way: an emulated cluster, one step loop, figures taken by the clock.

cluster.py  starts the ranks once, then runs block after block on them rank.py     waits for orders;
every block runs in a fork, so a peer that hangs or dies costs its own block only block.py    one
block on one rank: prepare the peer, step until told to stop, report what the clock saw work.py
what a step computes: sleeps inside layers, real layers, or a recipe's task figures.py  paces, gaps
and verdicts out of the reports
"""
