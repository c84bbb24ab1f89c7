"""The two errors that are shown without a traceback: a mistake the user can correct, and a run that ended early."""


class UserError(Exception):
    """A mistake that the user can correct. `main` prints it as one line and exits with status 2."""


class RunStopped(Exception):
    """The run ended early, and everything up to its last checkpoint is safe. Exit status 1."""


def one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__


def require(condition: bool, message: str) -> None:
    if not condition:
        raise UserError(message)
