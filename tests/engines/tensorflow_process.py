"""One of two processes of TensorFlow; run by test_tensorflow_processes.py."""

import sys
from pathlib import Path

import numpy as np
import tensorflow as tf
from several_processes import SHAPE, Framework, refusal, work

import layoutmap as lm
from layoutmap.core.initializers import Initializer, InitializerProgram
from layoutmap.core.variables import Assignment, VariableSpec
from layoutmap.engines.tensorflow.engine import engine


def normal(seed):
    return tf.random.stateless_normal(SHAPE, seed["key"]) * 0.3 + seed["shift"]


def seed_of(number):
    return {"key": tf.constant([number, 0], tf.int32), "shift": tf.constant(0.1 + number)}


def trained():
    """A weight and its momentum after two steps on rows that are sharded over the processes."""
    mesh = lm.Mesh(None, "x=2,y=4")
    layout = lm.Layout([None, "y"], mesh)
    weight, momentum = (lm.DVariable(np.zeros((2, 4), np.float32), layout=layout) for _ in range(2))
    bias, bias_momentum = (
        lm.DVariable(np.zeros(4, np.float32), layout=lm.Layout(["y"], mesh)) for _ in range(2)
    )
    steps = lm.DVariable(0, layout=lm.Layout([], mesh))
    rows = np.arange(16, dtype=np.float32).reshape(8, 2)

    @tf.function(autograph=False)
    def step(rows):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(rows @ weight + bias)
        gradients = tape.gradient(loss, [weight, bias])
        for variable, slot, gradient in zip(
            (weight, bias), (momentum, bias_momentum), gradients, strict=True
        ):
            slot.assign(slot * 0.5 + gradient)
            variable.assign_sub(slot)
        steps.assign_add(1)

    for _ in range(2):
        step(lm.dtensor.relayout(rows, lm.Layout(["x", None], mesh)))
    return [variable.numpy().tolist() for variable in (weight, momentum, bias, bias_momentum, steps)]


def other_numbers(number, with_programs):
    """What is said when process 1 makes one variable more than process 0."""
    layout = lm.Layout(["x", None], lm.Mesh(None, "x=8"))
    keys = ["first", "second"][: 1 + number]
    program = InitializerProgram("normal", seed_of(0), normal) if with_programs else None
    draw = Initializer(global_value=lambda: np.zeros(SHAPE, np.float32), program=program)
    assignments = {key: Assignment(VariableSpec(key, SHAPE, "float32"), layout) for key in keys}
    return refusal(lambda: engine().create_initial_values(assignments, dict.fromkeys(keys, draw)))


def main():
    number, folder = int(sys.argv[1]), Path(sys.argv[2])
    tf.experimental.dtensor.initialize_accelerator_system("CPU", num_logical_cpu_devices=4)
    framework = Framework(
        seed=seed_of,
        normal=normal,
        summed=lambda seed: normal(seed) / tf.norm(normal(seed)),
        plain=tf.constant,
        dtypes=("float32", "bfloat16", "bool", "int8", "uint32", "float64"),
        cuts_over_several_dims=False,
    )
    said = [other_numbers(number, with_programs) for with_programs in (True, False)]
    work(engine(), framework, number, folder, trained=trained(), other_numbers=said)


if __name__ == "__main__":
    main()
