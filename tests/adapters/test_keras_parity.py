"""`benchmarks/parity.py` finds what its page says, on one of its cases.

That models of Keras train in layouts as on one device is tried on drawn ones, and with each optimizer in
test_keras_optimizers.py.
"""

import parity

PROCESSES = ("tensorflow",)


def test_three_steps_give_the_numbers_of_one_device():
    """First weights bit for bit; outputs, gradients, losses and weights of three steps within 1e-5."""
    report = parity.check("embedding", "adam", "batch=2,model=4")

    assert report.agrees
    assert 0.0 == report.worst("weights")
    assert max(abs(plain - ours) for plain, ours in report.losses) <= 1e-5
