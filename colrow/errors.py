"""The errors that colrow raises for its users.

A `UserError` is something the caller can put right: it says what is wrong, the value that was found, and what would work, in one line.
The command line prints it and exits with code 2; library users catch it. `RankError` is what a rank says when a peer is gone, disagrees or
hangs. Programming errors stay ordinary Python exceptions; nothing here wraps them.
"""

from __future__ import annotations


class ColrowError(Exception):
    """Base of all errors that colrow raises on purpose."""

    exit_code = 1


class UserError(ColrowError):
    """Wrong input: `what` is wrong, the `value` found, and what `works` instead.

    >>> str(UserError("tp must be at least 1", value=0, works="--tp 2"))
    'tp must be at least 1, got 0; try: --tp 2'
    """

    exit_code = 2

    def __init__(self, what: str, value: object = None, works: str = "") -> None:
        self.what, self.value, self.works = what, value, works
        text = what if value is None else f"{what}, got {value}"
        super().__init__(f"{text}; try: {works}" if works else text)

    def __reduce__(self) -> tuple:  # keeps the three parts when it crosses a process boundary
        return (type(self), (self.what, self.value, self.works))


def first_line(error: BaseException) -> str:
    """What somebody else's error says, short enough to be a part of one line.

    >>> first_line(ValueError("a long story")), first_line(KeyError())
    ('a long story', 'KeyError')
    """
    lines = [line.strip() for line in str(error).strip().split("\n")]
    said = " ".join(lines[: 2 if lines[0].endswith(":") else 1])
    return said[:160].rstrip(".") or type(error).__name__


class RankError(ColrowError):
    """A rank died, hangs, or asked for another collective than its peers. The text names the rank and the call site."""
