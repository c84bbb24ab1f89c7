"""What the user can put right, said in one line; every other room raises these."""


class UserError(Exception):
    """Something the user can put right; `main` prints it as one line and exits with status 2."""


class RunStopped(Exception):
    """The run ended early, in order: everything up to the last checkpoint is safe. Exit status 1."""


def one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__


def require(condition: bool, message: str) -> None:
    if not condition:
        raise UserError(message)
