"""The command line: `layoutmap plan`, `explain`, `lint`, `diff` and more."""
