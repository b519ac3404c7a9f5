"""Importing this loads UCX with our settings, and opens nothing: for processes that are forked."""

from transfer.ucx.library import load

LIBRARY = load()
