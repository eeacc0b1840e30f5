"""The one error that a user's mistake raises."""

from __future__ import annotations


class UserError(ValueError):
    """Bad input that the user can mend: one line that names the value, where it stands and the way out.

    The command lines print it without a traceback (unless `--debug`) and exit with code 2.
    """
