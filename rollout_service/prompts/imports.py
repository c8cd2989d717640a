"""Functions that a settings file names as `module:function`.

Always true: the name comes from the settings of the run, never from a request.
"""

import importlib
import os
import sys
from collections.abc import Callable
from typing import Any

from protocol.errors import DataError


def import_function(spec: str, setting: str) -> Callable[..., Any]:
    """The function that `setting` names, found on `sys.path` and in the working folder.

    Raises DataError with the import's own complaint.
    """
    module_name, _, function_name = spec.partition(":")
    if not module_name or not function_name:
        raise DataError(f"{setting} = {spec!r} names no function; write module:function")
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        # A user's module may raise anything while it is imported; whatever it is, it belongs into the message.
        raise DataError(f"{setting} = {spec!r} can't be imported: {type(error).__name__}: {error}") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise DataError(f"{setting} = {spec!r}: module {module_name} has no function {function_name!r}")
    return function
