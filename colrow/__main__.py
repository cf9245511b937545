"""`colrow` and `python -m colrow`. A mistake of the user is one line on standard error and exit code 2, never a traceback."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from .errors import ColrowError


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; the exit code: 0, 1 for a proof or a run that failed, 2 for wrong input, 130 after Ctrl-C. SIGTERM ends
    the process with one line."""
    from .cli.interrupt import INTERRUPTED, ending_at_once, sigterm_is_said

    try:
        with sigterm_is_said():
            with ending_at_once():
                from .cli.app import app
            code = int(app(args=None if arguments is None else list(arguments), prog_name="colrow", standalone_mode=False) or 0)
    except ColrowError as error:
        return _fail(str(error), error.exit_code)
    except KeyboardInterrupt:
        code = INTERRUPTED
    except Exception as error:
        # The parser's own errors: their classes are click's in older releases of typer and typer's own in newer ones.
        if isinstance(error.__cause__, KeyboardInterrupt):
            code = INTERRUPTED
        elif hasattr(error, "format_message"):
            if type(error).__name__ == "NoArgsIsHelpError":  # no mistake: `colrow` alone; the message is the help, line by line
                print(error.format_message())
                return 0
            return _fail(error.format_message(), 2)
        else:
            raise
    return _fail("interrupted", code) if code == INTERRUPTED else code


def _fail(message: str, code: int) -> int:
    print("colrow: " + " ".join(message.split()), file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
