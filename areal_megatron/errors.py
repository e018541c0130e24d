"""What an error says, for messages of one line."""


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's text, or the name of its class if it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
