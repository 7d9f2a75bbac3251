"""`python -m loosestep.cli`, as torchrun wants it."""

from loosestep.cli import main

main()
