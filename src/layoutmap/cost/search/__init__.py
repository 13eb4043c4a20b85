"""Search a layout map: list the possible layouts, vary one choice at a time, and write rules for the result.

The caller passes a function that computes the cost of a layout map, so these modules import no framework.
"""
