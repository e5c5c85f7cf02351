"""A wall clock that tests can set for the processes they start; see `sitecustomize`."""

import os

FOLDER = os.path.dirname(__file__)
