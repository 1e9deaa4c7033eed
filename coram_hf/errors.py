"""The one kind of error that an input can cause."""


class MergeError(ValueError):
    """The inputs cannot be merged; the message names what was found, what was expected, and a remedy."""


def reason(error: Exception) -> str:
    """What another library's error says, in one line of bearable length."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
