"""`python -m loosestep`: the command line."""

from loosestep.cli import main

if __name__ == "__main__":
    main()
