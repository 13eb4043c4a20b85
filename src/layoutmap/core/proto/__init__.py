"""Generated protobuf code and its source, `layout.proto`; `make proto` makes the one from the other."""
