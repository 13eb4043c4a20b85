"""What a model holds: inspect it, guard it, compare it with one device and between processes."""
