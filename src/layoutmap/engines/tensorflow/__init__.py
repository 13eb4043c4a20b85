"""Create and shard tensors with `tf.experimental.dtensor`."""
