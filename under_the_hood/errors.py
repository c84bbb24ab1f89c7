"""The two errors that are shown without a traceback: a mistake the user can correct, and a run that ended early."""

import contextlib
import sys

from under_the_hood import parallel


class UserError(Exception):
    """A mistake that the user can correct. `main` prints it as one line and exits with status 2."""


class RunStopped(Exception):
    """The run ended early, and everything up to its last checkpoint is safe. Exit status 1."""


def one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__


def require(condition: bool, message: str) -> None:
    if not condition:
        raise UserError(message)


@contextlib.contextmanager
def said_in_one_line():
    """End the program on errors of these kinds with one line and a status: 2 mistake, 1 stopped, 130 interrupted."""
    try:
        yield
    except (UserError, FloatingPointError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except RunStopped as error:
        print(f"stopped: {error}", file=sys.stderr)
        sys.exit(1)
    except RuntimeError as error:
        if parallel.size() == 1:
            raise
        print(f"stopped: another process failed, see its message ({one_line(error)})", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        print("stopped at once; --resume continues from the last checkpoint, if there is one", file=sys.stderr)
        sys.exit(130)
    finally:
        parallel.stop()
