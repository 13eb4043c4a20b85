"""What modules remember from one call to the next, all of it, each with its reason."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import frameworks

STATE = {
    # ambient
    "adapters.current._current": "the one ContextVar: which scope is open in this thread and task",
    # what is open on a thread, or anywhere; the patches of a library's classes themselves are `patches.PatchGroup`
    "adapters.keras.hooks._being_constructed": "the variables without values that are being constructed on this thread",
    "adapters.keras.backends.jax_steps._returns_stored_arrays": "whether variables give padded arrays in this block",
    "adapters.keras.backends.tensorflow_steps._open_blocks": "the steps that run; an option is off meanwhile",
    "adapters.keras.backends.tensorflow_functions._current": "the session whose call runs on this thread",
    "adapters.torch.mesh_context.thread_state": "the models that run on this thread",
    "engines.torch.deferred_init.interception._open": "the tapes that record on this thread",
    "engines.torch.engine._meshes": "the mesh that tensors come to on this thread, inside of run_on",
    # what a framework has one of in a process
    "engines.torch.simulation._simulation": "simulated ranks, while there are tensors on them",
    "engines.torch.simulation._group": "their process group",
    "engines.torch.changes.meshes": "the meshes of this library's tensors, while there are any",
    "engines.torch.changes._installed": "what is changed in torch, to be taken back",
    "engines.torch.changes._restore_callbacks": "what ends with them",
    "engines.torch.changes._keepers": "modules in layouts and open calls, weakly: nothing is taken back meanwhile",
    "engines.torch.simulation._num_devices": "how many ranks will be simulated, until they are",
    "adapters.torch.from_pretrained._make_transformers_patches": "what replaces functions of transformers in scopes",
    "adapters.torch.optimizer_hooks._replaced_tensors": "tensors that a model had before a layout, while they live",
    "adapters.torch.optimizer_hooks._num_compared_groups": "optimizers that all processes have compared",
    "engines.tensorflow.selfcheck._is_correct": "whether DTensor computes right in this process: found by experiments",
    "engines.torch.deferred_init.jump.can_advance_generator_exactly": "whether torch's generators jump: tried out",
    # what is known of a framework's objects that cannot be told from the objects
    "engines.tensorflow.arrays._mesh_of_native": "our first mesh for one of DTensor's, which makes it anew",
    "engines.tensorflow.combined._current": "of each thread: the values that the step being traced writes at its end",
    "engines.tensorflow.run_on._current": "of each thread: the mesh of the innermost run_on",
    "engines.torch.dtensor_ops.local_values._marks": "what was taken out of DTensors, weakly: an attribute is saved",
    "engines.torch.devices._mesh_of": "our first mesh for a DeviceMesh, for as long as that lives",
    "engines.torch.devices._device_meshes": "process groups are made once for each grid",
    "engines.torch.devices._mesh_cache": "the DeviceMesh of a mesh, as it was found before",
    "adapters.keras.backends.torch._num_draws": "how far a seed generator is, for as long as it lives",
    "adapters.jax.contexts._contexts": "the scope of a model, for as long as that lives: JAX's have no place for it",
    "adapters.torch.training._trainings": "what train_with said of a model, for as long as it lives",
    "saving.sync_versions._newest": "the newest version of a trainer that was synced, for as long as it lives",
    "saving.sync_versions._trained": "the identity of a trained tree by its first array, for as long as that lives",
    "saving.sync_versions._synced": "the versions of arrays of synced trees, for as long as they live",
    "saving.sync_versions._received": "the versions of its trainers that a sampler has, for as long as both live",
    # made once
    "engines.jax.engine.engine": "the engine: its compiled programs, and the meshes of its arrays",
    "engines.tensorflow.engine.engine": "the engine: its traced programs",
    "engines.torch.engine.engine": "the engine: what is known of programs",
    "adapters.keras.pending._classes": "the class of variables without a value, for each class of Keras's",
    "engines.torch.dtensor_ops.memories.copied": "memories in use that are copies of others; weakly held",
    "engines.torch.dtensor_ops.memories.outdated": "those of them with former values; weakly held",
    "engines.torch.dtensor_ops.guard.sharding_query": "whether DTensor is asked how it would compute, on each thread",
    "engines.torch.dtensor_ops.guard._reduced_gradients": "gradients of a backward pass with reduced sums; weakly held",
    "engines.torch.specs._cached_functions": "the caches of what is known of meshes, emptied as DTensor's are",
    "engines.torch.dtensor_ops.gathered._warned_functions": "each function is warned of once in a process",
    "engines.torch.dtensor_ops.gathered._thread_state": "whether warnings of gathering are ignored, on each thread",
    "engines.torch.deferred_init.streams._scratch_buffers": "memory for random numbers, one piece on each thread",
    "engines.torch.malloc._find_malloc_trim": "the C library's function",
    "engines.jax.corrections._permanent_use": "our rules in JAX's tables: they stay, since programs and arrays do",
    "engines.jax.corrections._without_devices": "whether this thread lowers for devices that are not there",
    "engines.jax.corrections._num_devices": "for how many devices this thread lowers a form",
    "adapters.torch.pretrained._files": "the files that this thread writes, while transformers saves a model",
    "engines.jax.corrections._is_lowering_replacement": "whether this thread lowers one of our forms, with JAX's rules",
    "cost.jax.attention._calls": "the step that is traced on this thread, whose calls of attention are named",
    "engines.jax.meshless._inner": "inner programs without their mesh: equal layers share them while JAX keeps them",
    "engines.jax.meshless._get_unspecified_sharding": "JAX's word for a sharding that is not given",
    "adapters.jax.step_programs._MAY_TRACE": "whether a program may be traced, in this context",
    "engines.jax.shardy.check_shardy_passes": "whether jaxlib has Shardy's passes, asked once",
    "rules.presets.list_patterns": "the patterns of all presets, read once",
    "rules.zoo.list_models": "the list of published models, read once",
    "cost.machines.load_built_in_devices": "the devices of machines.yaml, read once",
}

MUTABLE = {
    "ContextVar",
    "ExitStack",
    "local",
    "WeakKeyDictionary",
    "WeakValueDictionary",
    "WeakSet",
    "count",
    "defaultdict",
}
CONTAINERS = {"dict", "list", "set", "OrderedDict", "deque"}
CHANGING = {"add", "append", "clear", "extend", "insert", "pop", "popitem", "remove", "setdefault", "update"}


def _name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def _module(path: Path) -> str:
    return ".".join(path.relative_to(frameworks.PACKAGE).with_suffix("").parts).removesuffix(".__init__")


def state_of(source: str) -> set[str]:
    """The names of a module that hold something which changes after it is imported."""
    tree = ast.parse(source)
    return {*_made_to_change(tree), *_rebound(tree), *_changed(tree), *_found_once(tree)}


def _values(tree: ast.Module) -> Iterator[tuple[str, ast.expr]]:
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        value = getattr(node, "value", None)
        for target in targets:
            if isinstance(target, ast.Name) and isinstance(value, ast.expr):
                yield target.id, value


def _made_to_change(tree: ast.Module) -> Iterator[str]:
    """An empty container, or one of a kind that nobody writes a table as."""
    classes = (node for node in tree.body if isinstance(node, ast.ClassDef))
    local = {each.name for each in classes if any(_name(base) == "local" for base in each.bases)}
    for name, value in _values(tree):
        called = _name(value.func) if isinstance(value, ast.Call) else ""
        empty = isinstance(value, ast.Dict | ast.List) and not ast.unparse(value).strip("[]{}")
        if empty or called in MUTABLE | local or (called in CONTAINERS and not value.args):  # type: ignore[attr-defined]
            yield name


def _rebound(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            yield from node.names


def _changed(tree: ast.Module) -> Iterator[str]:
    """A name of the module that a function changes the value of."""
    names = {name for name, _ in _values(tree)}
    for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
        for node in ast.walk(function):
            changed: list[ast.expr] = []
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr in CHANGING
            ):
                changed = [node.func.value]
            elif isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
                changed = [node.value]
            yield from (each.id for each in changed if isinstance(each, ast.Name) and each.id in names)


def _found_once(tree: ast.Module) -> Iterator[str]:
    """A function without arguments whose result is kept."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and not node.args.args:
            decorators = (each.func if isinstance(each, ast.Call) else each for each in node.decorator_list)
            if any(_name(each) in ("cache", "lru_cache") for each in decorators):
                yield node.name


def test_the_list_is_what_the_source_has():
    """Every state of a module is listed with its reason, and nothing else is; none is which mesh was used last."""
    found = {
        f"{'.'.join(path.relative_to(frameworks.PACKAGE).with_suffix('').parts).removesuffix('.__init__')}.{name}"
        for path in frameworks.PACKAGE.rglob("*.py")
        for name in state_of(path.read_text())
        if name != "__all__"
    }

    assert set(STATE) == found


def test_the_search_can_fail():
    """It finds what is bound anew, made empty, changed in a function or kept, and no table."""
    source = """
TABLE = {"a": 1}
changed = {"a": 1}
empty: dict[str, int] = {}
local = threading.local()
number = 0

def change():
    global number
    changed["b"] = 2

@functools.cache
def once():
    return TABLE["a"]

@functools.cache
def of(argument):
    return argument
"""

    assert {"changed", "empty", "local", "number", "once"} == state_of(source)
