"""The one error type that a user may cause and a command line reports."""


class UsageError(Exception):
    """Wrong use: the message is one sentence that says what is wrong, why, and what to do.

    Command lines print it without a traceback and exit with code 2.
    """
