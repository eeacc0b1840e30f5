"""The one error that a user's mistake raises, and the warning that goes with an answer all the same."""

from __future__ import annotations


class UserError(ValueError):
    """Bad input that the user can mend: one line that names the value, where it stands and the way out.

    The command lines print it without a traceback (unless `--debug`) and exit with code 2.
    """


class SoundWarning(UserWarning):
    """Sound that is taken although it may not be what was meant: silent, very short, or perhaps cut; one line that names it.

    The command lines print it as a line of its own.
    """
