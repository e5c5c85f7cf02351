"""`python -m cairn.demo`: the same as `cairn demo`."""

import sys

from cairn.cli import main

main(["demo", *sys.argv[1:]])
