"""Plan models: the layout of each variable, the problems, and the memory. Import no framework."""
