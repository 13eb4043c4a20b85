"""Hold the protobuf code that `make proto` generates from `layout.proto`."""
