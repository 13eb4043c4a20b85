"""Search a layout map: list the possible layouts, descend through them, and write rules for the result.

What a candidate costs is a function that the search is given; nothing here knows a framework.
"""
