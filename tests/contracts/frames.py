"""How deep the package's own frames stand when the parameters are changed at a step boundary."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import loosestep

PACKAGE = str(Path(loosestep.__file__).parent)


def frames_at(operation: str, work: Callable[[], Any]) -> list[list[str]]:
    """The functions of the package on the stack, outermost first, at every call of a built-in
    operation of this name while `work` runs on this thread; each way once.
    """
    found: list[list[str]] = []

    def watch(frame: Any, event: str, argument: Any) -> None:
        if event != "c_call" or getattr(argument, "__name__", "") != operation:
            return
        names = []
        while frame is not None:
            if frame.f_code.co_filename.startswith(PACKAGE):
                names.append(frame.f_code.co_qualname)
            frame = frame.f_back
        if names and names[::-1] not in found:
            found.append(names[::-1])

    sys.setprofile(watch)
    try:
        work()
    finally:
        sys.setprofile(None)
    return found
