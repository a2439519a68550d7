"""What is put around functions of others, and found again where others have put theirs around it."""

import inspect
from collections.abc import Callable
from typing import Any

UNDER = "_hf_specdec_under"
"""of a function of ours: itself, for wrappers copy attributes, what it is put around, and whose it is"""
US = object()
"""this copy of the package: notebooks import it anew"""
DEEP = 8
"""wrappers of others that are looked into"""


def put_around(owner: Any, name: str, wrap: Callable[[Any], Any]) -> None:
    """Once: nothing is done where ours is there, or within what is there."""
    there = inspect.getattr_static(owner, name)
    if ours_in(there) is None:
        there = _under(there) if _mark(there)[0] is _function(there) else there  # of another copy
        ours = wrap(there)
        setattr(_function(ours), UNDER, (_function(ours), there, US))
        setattr(owner, name, ours)


def take_away(owner: Any, name: str) -> None:
    """Put back what was there. Where somebody has put something around ours since, both stay."""
    there = inspect.getattr_static(owner, name)
    if ours_in(there) is there:
        setattr(owner, name, _under(there))


def is_there(owner: Any, name: str) -> bool:
    """Whether ours is."""
    return ours_in(inspect.getattr_static(owner, name)) is not None


def beneath(owner: Any, name: str) -> Any:
    """What ours is put around; what is there where ours is not."""
    there = inspect.getattr_static(owner, name)
    ours = ours_in(there)
    return there if ours is None else _under(ours)


def _under(ours: Any) -> Any:
    return _mark(ours)[1]


def _mark(found: Any) -> tuple[Any, Any, Any]:
    mark = getattr(_function(found), UNDER, None)
    return mark if type(mark) is tuple else (None, None, None)


def ours_in(found: Any, deep: int = DEEP) -> Any:
    """Our function, which may lie within wrappers of others; None where there is none."""
    function = _function(found)
    if _mark(found)[::2] == (function, US):
        return found
    cells = [cell.cell_contents for cell in getattr(function, "__closure__", None) or () if _is_filled(cell)]
    inner = [getattr(function, "__wrapped__", None), *cells] if deep else []
    return next(filter(None, (ours_in(each, deep - 1) for each in inner if callable(each))), None)


def _function(found: Any) -> Any:
    return getattr(found, "__func__", found)


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:  # nothing was put there yet
        return False
