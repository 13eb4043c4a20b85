"""Inspect existing models, guard their layouts during training, and compare them with one device."""
