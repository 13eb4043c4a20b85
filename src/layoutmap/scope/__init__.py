"""Join a layout map with an engine and an adapter: `plan`, `scope`, `build`, and `apply`."""
