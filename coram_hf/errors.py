"""The one kind of error that an input can cause."""


class MergeError(ValueError):
    """The inputs cannot be merged; the message names what was found, what was expected, and a remedy."""
