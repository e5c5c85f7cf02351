"""Handles: the objects through which functions read and write their state."""

from cairn.backends.handles.batch import make_batch_handle, make_batch_table
from cairn.backends.handles.journaled import make_journaled_handle
from cairn.backends.handles.keyed import make_handle

__all__ = ["make_batch_handle", "make_batch_table", "make_handle", "make_journaled_handle"]
