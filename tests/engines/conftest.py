"""Eight virtual devices for each engine. The engines are tested in separate runs of pytest."""

import importlib.util

if importlib.util.find_spec("jax") is not None:
    import jax

    # No effect, and an error, once JAX has started; then the environment has to have asked for them (XLA_FLAGS).
    if not jax.distributed.is_initialized():
        try:
            jax.config.update("jax_num_cpu_devices", 8)
        except RuntimeError:
            assert 8 <= len(jax.devices("cpu"))
