"""An adapter for modules of Equinox that does no more than it must: the recipe of CONTRIBUTING, tried.

It computes each array as Equinox does, on one device, and then lays it out. The library's own adapter for JAX, which
knows Equinox as pytrees, computes the shards alone.
"""

import equinox as eqx
import jax

from layoutmap.adapters import random_states
from layoutmap.adapters.protocol import ModelAdapter
from layoutmap.core.errors import PlanError, ScopeError
from layoutmap.core.variables import VariableSpec
from layoutmap.engines import get_engine


class Variable:
    """An array of a module, which is frozen for everybody else."""

    def __init__(self, path, owner, key):
        self.path, self._owner, self._key = path, owner, key

    @property
    def array(self):
        return getattr(self._owner, self._key) if isinstance(self._key, str) else self._owner[self._key]

    @property
    def layout(self):
        return get_engine("jax").get_layout(self.array)

    def read(self):
        if isinstance(self.array, (jax.core.Tracer, jax.ShapeDtypeStruct)):
            raise PlanError(
                f"{self.path}: only a plan, it has no values", fix="use the result of layout_map.build"
            )
        return get_engine("jax").to_numpy(self.array)

    def put(self, array):
        object.__setattr__(self._owner, self._key, array)

    def spec(self):
        return VariableSpec(self.path, self.array.shape, str(self.array.dtype))


def variables(model):
    """The arrays of a module by path."""
    found = {}
    for keys, leaf in jax.tree_util.tree_flatten_with_path(model)[0]:
        if eqx.is_array(leaf) or isinstance(leaf, jax.ShapeDtypeStruct):
            names = [key.name if hasattr(key, "name") else key.idx for key in keys]
            owner = model
            for name in names[:-1]:
                owner = getattr(owner, name) if isinstance(name, str) else owner[name]
            path = ".".join(map(str, names))
            found[path] = Variable(path, owner, names[-1])
    return found


class Session:
    """One scope's work."""

    library = "equinox"

    def __init__(self, context):
        self._context = context
        self._is_traced = False

    def defer_variables(self):
        raise ScopeError(
            "a scope is opened for Equinox", why="it defers nothing", fix="layout_map.build(make_model)"
        )

    def build_model(self, make):
        self._is_traced = True
        with random_states.preserve_python_and_numpy_states():
            shapes = eqx.filter_eval_shape(make)
        self._is_traced = False
        assignments = self._assigned(shapes)
        if self._context.plan_only:
            return shapes
        model = make()
        self._lay_out(model, assignments)
        return model

    def shard_model(self, model):
        self._lay_out(model, self._assigned(model))
        return model

    def _assigned(self, model):
        return self._context.assign_layouts([each.spec() for each in variables(model).values()], {}, (), True)

    def _lay_out(self, model, assignments):
        for each, assignment in zip(variables(model).values(), assignments, strict=True):
            each.put(self._context.engine.relayout(each.array, assignment.layout))

    def has_built(self, model):
        """Whether a module was made here: its arrays are traced. What is made once more was looked at before."""
        arrays = [each.array for each in variables(model).values()]
        return not self._is_traced or all(isinstance(each, jax.core.Tracer) for each in arrays)

    def list_unbuilt_layer_names(self):
        return ()

    def create_lazy_variables(self, model, inputs):
        pass

    def step(self, model, inputs, optimizer, loss):
        raise ScopeError("steps of Equinox are not counted", fix="use library='jax'")


class EquinoxAdapter(ModelAdapter):
    """Nine methods, and nothing else."""

    name = "equinox"

    @property
    def engine_name(self):
        return "jax"

    def check_scope_can_open(self):
        pass

    def owns_model(self, model):
        return isinstance(model, eqx.Module)

    def make_session(self, context):
        return Session(context)

    def preserve_random_states(self):
        return random_states.preserve_python_and_numpy_states()

    def set_seed(self, seed):
        random_states.seed_python_and_numpy(seed)

    def create_lazy_variables(self, model, batch):
        pass

    def variables(self, model):
        return variables(model)

    def read(self, variable):
        return variable.read()

    def write(self, variable, value):
        variable.put(get_engine("jax").relayout(value, variable.layout))


def make_adapter():
    return EquinoxAdapter()
