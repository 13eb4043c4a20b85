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

    When this returns, the step is on the disk. An error or a crash leaves no part of it. With several processes, all
    must call this. Each writes shards that it holds, and no shard is written twice.

    Args:
        model: Model of any supported library, sharded or not.
        directory: Folder with the checkpoints of this model, or a URL for fsspec, as in `"s3://bucket/run"`. The step
            becomes its folder `step-<number>`.
        step: Number of the step, 0 or more. An existing step is never overwritten.
        optimizer: Optimizer of the model, if the model does not hold it: of torch, a state of optax, or an
            `nnx.Optimizer`. A compiled Keras model holds its optimizer.
        data: Other state to continue from: a data iterator, a learning rate schedule, or any object with `state_dict()`
            or `get_state()`, or a mapping of several, as in `{"loader": loader, "schedule": schedule}`. Each process
            saves its own.
        metadata: Numbers, texts, and lists and mappings of them to store with the step.
        progress: Whether to show progress on stderr; `None`: only on a terminal and if it takes long.

    Returns:
        The folder of the step.

    Raises:
        CheckpointError: The step exists, something cannot be saved, or writing fails.

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
    with plan.begin_step() as writer, Progress(plan.variables, enabled=progress, verb="saved") as shown:
        writer.write_step(shown)
    return writer.where
