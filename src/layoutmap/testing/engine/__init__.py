"""The laws of engines, by what they are about. `layoutmap.testing.engine_contract` has them all."""
