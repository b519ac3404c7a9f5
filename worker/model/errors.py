"""What can go wrong with a model, as types: a user can repair a load error, an input error is a
caller's bug.
"""

from __future__ import annotations


class ModelLoadError(Exception):
    """The model cannot be loaded; the message says what was expected and what to do."""


class AttentionInputError(ValueError):
    """The step handed to the model is inconsistent: wrong device, dtype, shape, length or slot."""
