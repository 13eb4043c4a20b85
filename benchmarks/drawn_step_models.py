"""Draw common models in random sizes, and layout maps for them, on 2 to 64 devices, for `step_cost.py`."""

from __future__ import annotations

import os
import random
from functools import partial

KERAS = ("decoder", "experts", "speech", "vit", "bert", "convolutions")
FLAX = ("scan", "remat", "blocks", "towers")
MESHES = ((2, 1), (1, 2), (4, 2), (2, 4), (8, 1), (4, 4), (8, 4), (16, 1), (8, 8), (16, 4), (64, 1), (32, 2))


def draw(seed):
    """Return a description of a random model, its maker, its layout map, and the options of `lm.lower_step`."""
    numbers = random.Random(seed)
    name = (*KERAS, *FLAX)[seed % (len(KERAS) + len(FLAX))]
    data, model = numbers.choice(MESHES)
    rows = data * numbers.choice((1, 2, 4, 8))
    sizes = {
        "depth": numbers.randint(2, 6),
        "heads": 8 * numbers.choice((1, 2, 4)),
        "head": numbers.choice((32, 64, 80, 128)),
        "inner": 64 * numbers.randint(8, 64),
        "length": numbers.choice((128, 197, 256, 500, 512, 1024, 1500)),
        "words": numbers.choice((8192, 30522, 32000, 50257)),
    }
    dtype = numbers.choice(("bfloat16", "bfloat16", "float32", "mixed_bfloat16"))
    if name in FLAX:
        import optax

        make, inputs = draw_nnx_model(name, rows, sizes, dtype.removeprefix("mixed_"))
        library, optimizer = "jax", numbers.choice((optax.adamw(1e-3), optax.sgd(1e-3)))
    else:
        os.environ["KERAS_BACKEND"] = "jax"
        import keras

        keras.config.set_dtype_policy(dtype)
        make, inputs = draw_keras_model(name, rows, sizes)
        library, optimizer = "keras", numbers.choice(("adamw", "sgd", "adafactor"))
    layout_map, kind = draw_layout_map(make, inputs, library, (data, model), numbers)
    facts = " ".join(f"{key} {value}" for key, value in sizes.items())
    options = {"inputs": inputs, "batch_dim": "data", "optimizer": optimizer, "library": library}
    return f"{name} {seed}, {data}x{model}, {kind}, {dtype}, {rows} rows, {facts}", make, layout_map, options


def draw_layout_map(make, inputs, library, grid, numbers):
    """Return a common layout map, or one with random rules, and its kind."""
    import layoutmap as lm
    from layoutmap.testing.models import maps
    from layoutmap.testing.models.choices import Choices

    mesh = lm.Mesh(None, f"data={grid[0]},model={grid[1]}")
    plan = lm.plan(make, lm.LayoutMap(mesh, rest="replicated"), inputs=inputs, library=library)
    shapes = {
        each.variable.path: each.variable.shape
        for each in plan.assignments
        if each.variable.kind == "weight" and each.variable.parent is None
    }
    kind = numbers.choice(
        ("data parallel", "fully sharded", "alternating", "alternating, fully sharded", "drawn")
    )
    rules, uneven = {}, "error"
    if kind == "drawn":
        text = ",".join(f"{each.name}={each.size}" for each in mesh.mesh_dims)
        drawn = maps.draw_layout_map(
            Choices(numbers.randrange), shapes, {}, maps.Devices(mesh.size, mesh=text)
        )
        rules, uneven = dict(drawn.rules), drawn.uneven
    else:
        turn = 0
        for path, shape in shapes.items():
            specs: list[str | None] = [None] * len(shape)
            if len(shape) > 1 and kind.startswith("alternating"):
                axis = (len(shape) - 1, len(shape) - 2)[turn % 2]
                turn += 1
                if shape[axis] % grid[1] == 0:
                    specs[axis] = "model"
            if len(shape) > 1 and kind.endswith("fully sharded"):
                free = [n for n, size in enumerate(shape) if specs[n] is None and size % grid[0] == 0]
                if free:
                    specs[max(free, key=lambda n: shape[n])] = "data"
            rules[f"{path.replace('.', '[.]')}$"] = tuple(specs)
    return lm.LayoutMap(mesh, rules, uneven=uneven, rest="replicated"), kind


def make_tokens(*shape):
    """Return the shape of a batch of token ids."""
    import jax

    return jax.ShapeDtypeStruct(shape, "int32")


def draw_keras_model(name, rows, sizes):
    """Return a function that makes a Keras model, and the shapes of its inputs."""
    import jax
    import keras
    import keras_hub

    hub, length = keras_hub.models, sizes["length"]
    width = sizes["heads"] * sizes["head"]
    text = {"token_ids": make_tokens(rows, length), "padding_mask": make_tokens(rows, length)}
    common = {"vocabulary_size": sizes["words"], "num_layers": sizes["depth"], "hidden_dim": width}
    grouped = {"num_query_heads": sizes["heads"], "num_key_value_heads": 8}
    if name == "decoder":
        return partial(hub.Llama3Backbone, intermediate_dim=sizes["inner"], **common, **grouped), text
    if name == "experts":
        experts = {"num_experts": 8, "top_k": 2, "output_router_logits": False}
        inner = sizes["inner"] // 2
        return partial(hub.MixtralBackbone, intermediate_dim=inner, **common, **grouped, **experts), text
    if name == "speech":
        make = partial(
            hub.WhisperBackbone,
            num_heads=sizes["heads"],
            intermediate_dim=sizes["inner"],
            max_encoder_sequence_length=2 * length,
            dropout=0.0,
            **common,
        )
        return make, {
            "encoder_features": jax.ShapeDtypeStruct((rows, 2 * length, 80), "float32"),
            "decoder_token_ids": make_tokens(rows, 64),
            "decoder_padding_mask": make_tokens(rows, 64),
        }
    if name == "vit":
        make = partial(
            hub.ViTBackbone,
            image_shape=(128, 128, 3),
            patch_size=16,
            num_layers=sizes["depth"],
            num_heads=sizes["heads"],
            hidden_dim=width,
            mlp_dim=sizes["inner"],
        )
        return make, jax.ShapeDtypeStruct((rows, 128, 128, 3), "float32")
    if name == "bert":
        make = partial(
            hub.BertBackbone,
            num_heads=sizes["heads"],
            intermediate_dim=sizes["inner"],
            max_sequence_length=length,
            dropout=0.0,
            **common,
        )
        return make, {**text, "segment_ids": make_tokens(rows, length)}

    def make_convolutions():
        x = inputs = keras.Input((64, 64, 8))
        for _ in range(sizes["depth"]):
            y = keras.layers.Conv2D(sizes["head"], 3, padding="same")(x)
            y = keras.layers.BatchNormalization()(y)
            y = keras.layers.Activation("relu")(y)
            x = keras.layers.Add()([x, y]) if x.shape == y.shape else y
        return keras.Model(inputs, keras.layers.Dense(10)(keras.layers.GlobalAveragePooling2D()(x)))

    return make_convolutions, jax.ShapeDtypeStruct((rows, 64, 64, 8), "float32")


def draw_nnx_model(name, rows, sizes, dtype):
    """Return a function that makes a module of flax.nnx, and the shape of its input."""
    import jax
    from flax import nnx

    width, inner, depth = sizes["heads"] * sizes["head"], sizes["inner"], sizes["depth"]
    types = {"dtype": dtype, "param_dtype": dtype}

    class Block(nnx.Module):
        def __init__(self, rngs):
            self.norm = nnx.RMSNorm(width, rngs=rngs, **types)
            self.up = nnx.Linear(width, inner, rngs=rngs, **types)
            self.down = nnx.Linear(inner, width, rngs=rngs, **types)

        def __call__(self, x):
            return x + self.down(nnx.gelu(self.up(self.norm(x))))

    class Scanned(nnx.Module):
        def __init__(self, rngs):
            self.blocks = nnx.split_rngs(splits=2 * depth)(nnx.vmap(Block, in_axes=0, out_axes=0))(rngs)

        def __call__(self, x):
            axes = {"in_axes": (0, nnx.Carry), "out_axes": nnx.Carry}
            return nnx.scan(lambda block, x: block(x), **axes)(self.blocks, x)

    class Blocks(nnx.Module):
        def __init__(self, rngs):
            self.blocks = nnx.List([Block(rngs) for _ in range(depth)])

        def __call__(self, x):
            for block in self.blocks:
                x = nnx.remat(lambda block, x: block(x))(block, x) if name == "remat" else block(x)
            return x

    class Towers(nnx.Module):
        def __init__(self, rngs):
            self.users = nnx.Embed(sizes["words"], width, rngs=rngs, **types)
            self.items = nnx.Embed(sizes["words"], width, rngs=rngs, **types)
            self.left, self.right = Block(rngs), Block(rngs)

        def __call__(self, ids):
            return (self.left(self.users(ids)) * self.right(self.items(ids))).sum(-1)

    if name == "towers":
        return lambda: Towers(nnx.Rngs(0)), make_tokens(64 * rows)
    kind = Scanned if name == "scan" else Blocks
    return lambda: kind(nnx.Rngs(0)), jax.ShapeDtypeStruct((rows, sizes["length"], width), dtype)
