"""Adapters know model libraries: one module or package for each, loaded when first asked for."""
