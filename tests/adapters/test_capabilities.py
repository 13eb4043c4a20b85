"""What an adapter must know, and what it may: the protocols of `layoutmap.adapters.protocol`."""

import inspect

import pytest

from layoutmap.adapters import protocol, require_capability
from layoutmap.adapters.options import ScopeOptions
from layoutmap.core.errors import ScopeError


class Least(protocol.ModelAdapter):
    """An adapter that builds models and does nothing else: each method that has no default, and no other one."""

    name = "least"
    engine_name = "jax"
    check_scope_can_open = owns_model = make_session = preserve_random_states = set_seed = None
    create_lazy_variables = variables = read = write = None


def test_nine_methods_are_enough_to_build():
    """All else of the protocol has a default; and an adapter with these alone is one that builds."""
    written = {name for name, value in vars(Least).items() if value is None and not name.startswith("_")}
    methods = {
        name for name, _ in inspect.getmembers(protocol.ModelAdapter, inspect.isfunction) if name[0] != "_"
    }

    assert 9 == len(written)
    assert {
        "describe_arrays_created_after_build",
        "explain_why_padding_is_impossible",
        "forbid_building_models",
        "read_library_options",
    } == methods - written
    assert None is Least().read_library_options({}, ScopeOptions(), spans_processes=False)
    with Least().forbid_building_models("keras"):
        assert isinstance(Least(), protocol.ModelAdapter)


@pytest.mark.parametrize(
    ("capability", "missing"),
    [
        (
            protocol.TrainingAdapter,
            "build_model_on_one_device, forward, gradients, set_optimizer, train_step",
        ),
        (
            protocol.CheckpointAdapter,
            (
                "list_checkpoint_names, list_stored_variables, make_host_array, read_state_outside_variables"
                ", restore_state_outside_variables, restore_variables, restore_when_optimizer_is_set"
            ),
        ),
        (protocol.InspectionAdapter, "describe_variables, find_scope_context, list_gathered_dims"),
    ],
)
def test_what_an_adapter_does_not_know_is_refused_by_name(capability, missing):
    """With the methods that are missing, and not by an error of Python's in the middle of the work."""
    with pytest.raises(ScopeError, match="save does not support least models") as caught:
        require_capability(Least(), capability, "save")
    assert missing == caught.value.facts["missing"]
