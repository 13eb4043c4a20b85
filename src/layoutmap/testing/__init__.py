"""Tests that ship: inherit them to test an engine or an adapter of your own. They need pytest and hypothesis."""
