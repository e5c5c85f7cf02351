"""`python -m cairn`: the command line, where the `cairn` script is not on the path."""

from cairn.cli import main

main()
