"""Eight logical CPU devices, made before TensorFlow's first operation.

The folder is not called `tensorflow`: pytest puts `tests` on the path, and where TensorFlow is missing, `import
tensorflow` would then find a folder of tests.
"""

from __future__ import annotations

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")

# Every test process reads this file, and only the one of TensorFlow, or a run of one's own choice, may load it.
if os.environ.get("LAYOUTMAP_TEST_PROCESS", "tensorflow") in ("", "tensorflow"):
    import tensorflow as tf

    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 8
    )
