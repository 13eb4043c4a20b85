"""Save a model, its optimizer, and the other states of a run as one step: `save`."""

from __future__ import annotations

import os

from layoutmap.saving.save_plan import plan_save
from layoutmap.scope.progress import Progress


def save(
    model: object,
    directory: str | os.PathLike[str],
    *,
    step: int = 0,
    optimizer: object = None,
    data: object = None,
    metadata: object = None,
    progress: bool | None = None,
) -> str:
    """Save a model as one step of a checkpoint. Each process writes its own shards.

    The step exists when this returns, and is durable: all of it, or, whatever happens on the way, none of it. With
    several processes all must call this; each writes the shards that it holds, and no shard is written twice.

    Args:
        model: The model, of any library, in layouts or plain.
        directory: Where checkpoints of this model are kept: a folder, or a URL that fsspec knows, as in
            `"s3://bucket/run"`. The step is its folder `step-<number>`.
        step: The number of the step, 0 or more. A step that exists is not written over.
        optimizer: The model's optimizer, where the model does not have it: of torch, a state of optax, an
            `nnx.Optimizer`. That of a compiled Keras model is saved with it.
        data: What else goes on where it is: an iterator over the data, a schedule of learning rates, anything with
            `state_dict()` or `get_state()`; or a mapping of several, as in `{"loader": loader, "schedule": schedule}`.
            With several processes each saves its own.
        metadata: What else to keep: numbers, texts, lists and mappings of them.
        progress: Whether to show on stderr how far it is; `None`: if it takes long, on a terminal.

    Returns:
        The folder of the step.

    Raises:
        CheckpointError: The step exists already, something cannot be saved, or it cannot be written.

    Example:
        >>> import keras, layoutmap as lm, tempfile
        >>> layout_map = lm.LayoutMap(lm.create_mesh("model=4"), {r".*\\.kernel": (None, "model")})
        >>> model = layout_map.build(lambda: keras.Sequential([keras.Input((8,)), keras.layers.Dense(16, name="d1")]))
        >>> directory = tempfile.mkdtemp()
        >>> folder = lm.save(model, directory, step=100, metadata={"loss": 0.25})
        >>> lm.describe(directory)["d1.kernel"].shape
        (8, 16)
    """
    plan = plan_save(model, directory, step, optimizer=optimizer, data=data, metadata=metadata)
    with plan.begin() as writer, Progress(plan.variables, enabled=progress, verb="saved") as shown:
        writer.write(shown)
    return writer.where
