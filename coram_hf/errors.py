"""The one kind of error that a user can mend."""


class CoramError(ValueError):
    """The inputs or options are wrong; the message names what was found, what was expected, and a remedy."""


MergeError = CoramError
"""The name that versions before 0.2 had for it."""


def reason(error: Exception) -> str:
    """The type and message of another library's error, on one line, at most 300 characters."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
