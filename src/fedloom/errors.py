"""Errors that speak to the person: what was wrong, where, and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class FedloomError(Exception):
    """A mistake that the user can mend. The command line prints it without a traceback and exits with 1."""


class ConfigError(FedloomError):
    """A configuration key or value is wrong."""


class DataError(FedloomError):
    """A file of rows or of a run is wrong; the message names the file and, where there are any, row and field."""


class BackboneError(FedloomError):
    """A backbone cannot be found or used."""


class AdapterError(FedloomError):
    """Adapter tensors do not fit the model or the specification."""


class ModelFolderError(FedloomError):
    """A model folder is missing something or was made for another backbone."""


class UpdateRejected(FedloomError):
    """A client's reply is unusable; the round goes on without it."""


class SiteRefusal(FedloomError):
    """A site does not do what the server asks; the words go to the server, so they hold nothing of the site's rows."""


class RoundError(FedloomError):
    """A round cannot be completed; the global model is untouched."""


def nearest(word: object, known: Iterable[object], n: int = 3) -> str:
    """Return ``" Did you mean 'x'?"`` for the known words nearest to ``word``, or a list of what there is."""
    known = sorted(map(str, known))
    close = difflib.get_close_matches(str(word), known, n=n, cutoff=0.5)
    if close:
        return " Did you mean " + " or ".join(repr(c) for c in close) + "?"
    shown = ", ".join(known[:12]) + (", …" if len(known) > 12 else "")
    return f" Known: {shown}." if known else ""
