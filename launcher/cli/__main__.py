"""Runs the command line by `python -m launcher.cli`."""

from launcher.cli import main

if __name__ == "__main__":
    main()
