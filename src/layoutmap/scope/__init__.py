"""The front that joins a layout map with an engine and an adapter: `plan`, `scope`, `build`, `apply`."""
