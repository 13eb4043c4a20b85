"""The engines' protocol: what is in it has a law that every engine must pass."""

import inspect
import re

import pytest

from layoutmap.engines.protocol import Engine
from layoutmap.testing.engine_contract import EngineContract

MEMBERS = sorted(name for name in {*vars(Engine), *Engine.__annotations__} if not name.startswith("_"))


def laws():
    """The source of each law of the contract."""
    return [
        inspect.getsource(law) for name, law in inspect.getmembers(EngineContract) if name.startswith("test_")
    ]


@pytest.mark.parametrize("member", [name for name in MEMBERS if name != "name"])
def test_each_member_of_the_protocol_has_a_law(member):
    """What an engine must have is used by a law of the contract, or it is not in the protocol."""
    assert [] != [law for law in laws() if re.search(rf"self\.engine\.{member}\b", law)]


def test_members_are_documented():
    """Each method of the protocol beyond the six is named in the protocol's docstring, which says why it is there."""
    six = {"list_device_names", "make_native_layout", "create_initial_values", "create_from_shards"}
    six |= {"iterate_shards", "relayout"}
    named = set(re.findall(r"`(\w+)`", inspect.getdoc(Engine)))
    methods = {name for name in MEMBERS if inspect.isfunction(getattr(Engine, name, None))}

    assert six <= methods
    assert methods <= named
