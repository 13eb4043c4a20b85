"""What takes the place of functions of torch is called as these are, by position and by name."""

import inspect
from types import FunctionType

import pytest
from torch.distributed.tensor import distribute_tensor

from layoutmap.engines.patches import AttributePatch
from layoutmap.engines.torch.dtensor_ops import conversions, outside

PROCESSES = ("torch",)


def _instead(change):
    """Return the function that a patch has called, with what torch does as its first argument."""
    return inspect.getclosurevars(change._make_replacement).nonlocals.get("replacement")


REPLACED = {
    change._name: change
    for change in outside._PATCHES
    if isinstance(change, AttributePatch) and _instead(change) is not None
}
PRIVATE = {"_unpack_none", "_zeropower_via_newtonschulz"}  # only torch calls these


def _parameters(function, skipped=0):
    """Return names, kinds and defaults; annotations are ours."""
    found = list(inspect.signature(function).parameters.values())[skipped:]
    return [(each.name, each.kind, each.default) for each in found]


def _passes_all_on(function):
    """Whether a function has whatever it is called with passed on to torch's."""
    kinds = {each.kind for each in inspect.signature(function).parameters.values()}
    return kinds >= {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}


@pytest.mark.parametrize("name", sorted(REPLACED.keys() - PRIVATE))
def test_a_replacement_has_the_signature_of_torch(name):
    """Names, kinds and defaults are torch's, unless all arguments are passed on; a method's object has any name."""
    change = REPLACED[name]
    instead = _instead(change)
    if _passes_all_on(instead):
        return
    own = inspect.getattr_static(change._owner, name)
    if isinstance(own, staticmethod):
        num_objects, own = 0, own.__func__
    else:
        num_objects = int(inspect.isclass(change._owner))
    expected = _parameters(own, num_objects)
    # Nobody can name those of an operator, as in x[index] = value.
    if any(kind is inspect.Parameter.POSITIONAL_ONLY for _, kind, _ in expected):
        assert len(expected) == len(_parameters(instead, 1 + num_objects))
    else:
        assert expected == _parameters(instead, 1 + num_objects)


def test_distribute_tensor_has_the_signature_of_torch():
    """Its code is replaced, and calls ours."""
    code = outside._DistributeTensorPatch._CODE
    own = FunctionType(code, {}, "distribute_tensor", distribute_tensor.__defaults__)
    own.__kwdefaults__ = distribute_tensor.__kwdefaults__

    assert (
        _parameters(own)
        == _parameters(conversions.distribute_tensor, 1)
        == _parameters(outside._call_layoutmap_distribute)
    )


def test_the_conversions_are_among_them():
    """The patches were found by what they call."""
    assert {"from_local", "full_tensor", "redistribute", "to_local", "swap_tensors"} <= REPLACED.keys()
