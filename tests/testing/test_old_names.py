"""Tests that inherit the contracts may use the names of methods from the release before."""

import numpy as np
import pytest

from layoutmap.testing import engine_contract
from layoutmap.testing.engine_contract import EngineContract, generate_values


def test_a_method_with_an_old_name_is_used():
    """A subclass that defines or calls a method by its old name works, and warns with the new name."""
    with pytest.warns(DeprecationWarning, match="device_values has the new name get_device_values"):

        class MyEngine(EngineContract):
            def device_values(self, array):
                return {"CPU:0": array}

    contract = MyEngine()
    assert {"CPU:0": 1} == contract.get_device_values(1)
    with pytest.warns(DeprecationWarning, match="mesh has the new name make_mesh"):
        assert 2 == contract.mesh("x=2").size
    with pytest.raises(AttributeError, match="MyEngine has no attribute 'no_method'"):
        contract.no_method()


def test_a_function_with_an_old_name_is_found():
    """So are functions of `engine_contract`."""
    with pytest.warns(DeprecationWarning, match="random_values has the new name generate_values"):
        values = engine_contract.random_values((2,), "int8", seed=1)

    assert np.array_equal(generate_values((2,), "int8", seed=1), values)
    with pytest.raises(AttributeError, match="no_function"):
        engine_contract.no_function()
