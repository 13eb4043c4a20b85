"""Laws of engines, by topic. `layoutmap.testing.engine_contract` joins them."""
