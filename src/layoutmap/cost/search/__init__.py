"""The search for a layout map: the layouts that groups may have, the descent through them, the rules that say it.

What a candidate costs is a function that the search is given; nothing here knows a framework.
"""
